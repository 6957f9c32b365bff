"""Routing profiles: how often each expert was chosen, in a file that runs read and update.

A profile is a JSON file with named classes of prompts, because one kind of text uses other experts
than another:

    {"format": "moegraph routing profile", "version": 1, "n_layer": .., "n_expert": ..,
     "n_expert_used": .., "model": "<router fingerprint>",
     "classes": {"default": {"n_tokens": .., "counts": [[.. n_expert ..] .. n_layer ..]}},
     "drafts": {"mtp": {"seen": [..], "right": [..]}}}

`drafts` says how often drafts of the model were right, if there were any (draftcounts.py).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import RequestError
from ..units import KiB, format_bytes
from .draftcounts import MAX_LISTS, MAX_NUMBERS, DraftCounts, added, from_fields, to_fields
from .identity import RouterShape
from .trace import replace_file

FORMAT = "moegraph routing profile"
_VERSION = 1
_MAX_CLASSES = 64
_MAX_NAME = 64
_MAX_COUNT = 1 << 48
# Limits of a file's size. A count has at most 15 digits and a comma, a class has a name and three
# more fields. Any file may have _SMALL_FILE bytes.
_COUNT_BYTES, _CLASS_BYTES, _SMALL_FILE = 16, 256, 64 * KiB
# A class that would count more tokens first halves its counts.
_MAX_TOKENS = 1 << 16


@dataclass
class RoutingClass:
    """Choices of n_tokens tokens; counts: numpy [n_layer, n_expert]."""

    n_tokens: int
    counts: npt.NDArray[np.int64] = field(repr=False)


class Profile:
    """Routing statistics of one model, by class of prompts; drafts: how right its drafts were."""

    def __init__(self, shape: RouterShape) -> None:
        self.shape = shape
        self.classes: dict[str, RoutingClass] = {}
        self.drafts: DraftCounts = {}

    def add_drafts(self, more: DraftCounts) -> None:
        """Add how often drafts were right."""
        self.drafts = added(self.drafts, more)

    def add(self, name: str, counts: npt.ArrayLike, n_tokens: int) -> None:
        """Add the choices of n_tokens tokens, [n_layer, n_expert], to a class, which may be new."""
        require_class_name(name)
        more = np.asarray(counts, dtype=np.int64)
        known = self.classes.get(name)
        if known is None:
            if len(self.classes) == _MAX_CLASSES:
                raise RequestError(f"a profile holds {_MAX_CLASSES} classes; use one of them")
            self.classes[name] = RoutingClass(n_tokens, more.copy())
            return
        while known.n_tokens + n_tokens > _MAX_TOKENS and known.n_tokens > n_tokens:
            known.n_tokens //= 2
            known.counts //= 2
        known.n_tokens += n_tokens
        known.counts += more

    def shares(self, name: str | None = None) -> npt.NDArray[np.float64]:
        """Return the expected choices of each expert per token, numpy [n_layer, n_expert].

        name: a class, or None for the mean of all classes. Each row adds up to n_expert_used, or to
        0 if nothing was counted.
        """
        if name is not None and name not in self.classes:
            known = ", ".join(sorted(self.classes)) or "none yet"
            raise RequestError(f"the profile has no class {name!r}; it has: {known}")
        chosen = self.classes.values() if name is None else [self.classes[name]]
        k, size = self.shape.n_expert_used, self.shape.sizes[:2]
        parts = [k * c.counts / np.maximum(c.counts.sum(axis=1, keepdims=True), 1) for c in chosen]
        return np.mean(parts, axis=0) if parts else np.zeros(size)

    def ranking(self, name: str | None = None) -> npt.NDArray[np.intp]:
        """Return the experts of each layer, [n_layer, n_expert], most chosen first, ties by id."""
        return np.argsort(-self.shares(name), axis=1, kind="stable")

    def demand(self) -> npt.NDArray[np.float64]:
        """Return the choices per token of the most, second most, ... chosen expert of each layer.

        Numpy [n_layer, n_expert], rows falling. Each class is sorted before the mean is taken,
        because classes prefer different experts, but to a similar degree.
        """
        parts = [-np.sort(-self.shares(name), axis=1) for name in self.classes]
        return np.mean(parts, axis=0) if parts else np.zeros(self.shape.sizes[:2])

    def save(self, path: str | Path) -> None:
        """Write the profile; replace an older file only when the new one is complete."""
        n_layer, n_expert, n_expert_used = self.shape.sizes
        content = {
            "format": FORMAT, "version": _VERSION, "n_layer": n_layer, "n_expert": n_expert,
            "n_expert_used": n_expert_used, "model": self.shape.model,
            "classes": {
                name: {"n_tokens": c.n_tokens, "counts": c.counts.tolist()}
                for name, c in self.classes.items()
            },
        }  # fmt: skip
        if self.drafts:
            content["drafts"] = to_fields(self.drafts)
        replace_file(path, (json.dumps(content, separators=(",", ":")).encode(), b"\n"))


def require_class_name(name: str) -> None:
    """Refuse a name that is not allowed for a class."""
    if not _is_name(name):
        raise RequestError(
            f"profile class {name!r}: not allowed; use 1 to {_MAX_NAME} letters, digits or ._-"
        )


def profile_path(model: str | Path) -> Path:
    """Return the default path of a model file's profile."""
    path = Path(model)
    return path.with_name(f"{path.name}.routing.json")


def read_profile(path: str | Path, model: RouterShape) -> Profile:
    """Read and check the profile of a model."""
    data = _read_bounded(path, model)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RequestError(f"{path}: not a routing profile; `moegraph run --profile` writes them")
    if content.get("version") != _VERSION:
        raise RequestError(
            f"{path}: profile version {content.get('version')!r}; this moegraph reads {_VERSION}"
        )
    shape = RouterShape.from_fields(content)
    if shape is None:
        raise _damaged(path, "it does not describe a router")
    shape.require(model, f"{path}: the profile")
    profile = Profile(shape)
    profile.classes = _classes(path, shape, content.get("classes"))
    drafts = from_fields(content.get("drafts"))
    if drafts is None:
        raise _damaged(path, "its drafts are no counts")
    profile.drafts = drafts
    return profile


def _read_bounded(path: str | Path, model: RouterShape) -> bytes:
    """Return the bytes of a file, after checks that parsing it cannot take much memory.

    The file beside a model may come from somebody else, and an empty list of three bytes takes
    sixty in Python. So the lists, objects and values are counted before they are parsed.
    """
    n_rows = _MAX_CLASSES * model.n_layer
    n_counts = n_rows * model.n_expert
    n_bytes = (n_counts + MAX_NUMBERS) * _COUNT_BYTES + (_MAX_CLASSES + MAX_LISTS) * _CLASS_BYTES
    limit = max(n_bytes, _SMALL_FILE)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(limit + 1) if size <= limit else b""
    except OSError as error:
        raise RequestError(f"{path}: cannot read the profile: {error.strerror}") from error
    size = max(size, len(data))
    if size > limit:
        raise RequestError(
            f"{path}: a routing profile of {format_bytes(size)}; one of this model has at most "
            f"{format_bytes(limit)}"
        )
    most = {
        b"[": n_rows + _MAX_CLASSES + MAX_LISTS, b"{": _MAX_CLASSES + 2 + MAX_LISTS,
        b",": n_counts + 8 * _MAX_CLASSES + MAX_NUMBERS + MAX_LISTS,
    }  # fmt: skip
    for char, n in most.items():
        if data.count(char) > n:
            raise RequestError(
                f"{path}: not a routing profile of this model: it contains {char.decode()!r} "
                f"{data.count(char)} times; at most {n} are allowed"
            )
    return data


def _classes(path: str | Path, shape: RouterShape, content: Any) -> dict[str, RoutingClass]:
    if not isinstance(content, dict) or len(content) > _MAX_CLASSES:
        raise _damaged(path, f"it has no object of at most {_MAX_CLASSES} classes")
    classes = {}
    for name, entry in content.items():
        if not _is_name(name) or not isinstance(entry, dict):
            raise _damaged(path, f"class {name!r} has a bad name, or is not an object")
        n_tokens, rows = entry.get("n_tokens"), entry.get("counts")
        if type(n_tokens) is not int or not 0 <= n_tokens <= _MAX_COUNT:
            raise _damaged(path, f"class {name!r} has n_tokens {n_tokens!r}")
        if not _is_table(rows, shape):
            raise _damaged(
                path, f"class {name!r} has no counts of {shape.n_layer} x {shape.n_expert}"
            )
        classes[name] = RoutingClass(n_tokens, np.array(rows, dtype=np.int64))
    return classes


def _is_table(rows: Any, shape: RouterShape) -> bool:
    """Return whether rows is a list [n_layer][n_expert] of counts."""
    if not isinstance(rows, list) or len(rows) != shape.n_layer:
        return False
    return all(
        isinstance(row, list) and len(row) == shape.n_expert
        and all(type(count) is int and 0 <= count <= _MAX_COUNT for count in row)
        for row in rows
    )  # fmt: skip


def _is_name(name: str) -> bool:
    plain = name.replace(".", "").replace("_", "").replace("-", "")
    return 0 < len(name) <= _MAX_NAME and plain.isalnum() and name.isascii()


def _damaged(path: str | Path, what: str) -> RequestError:
    return RequestError(f"{path}: damaged routing profile: {what}; remove it or record it again")
