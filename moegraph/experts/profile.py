"""Routing profiles: how often each expert was chosen, kept from run to run beside the model.

One JSON file holds several classes of prompts by name, because the popular experts of one kind of
text are not those of another:

    {"format": "moegraph routing profile", "version": 1, "n_layer": .., "n_expert": ..,
     "n_expert_used": .., "model": "<router fingerprint>",
     "classes": {"default": {"n_tokens": .., "counts": [[.. n_expert ..] .. n_layer ..]}}}
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
from .identity import RouterShape
from .trace import replace_file

FORMAT = "moegraph routing profile"
_VERSION = 1
_MAX_CLASSES = 64
_MAX_NAME = 64
_MAX_COUNT = 1 << 48
# What a file may take: a count has 15 digits and a comma at most, a class its name and three more
# fields, and a small model's file is not worth measuring.
_COUNT_BYTES, _CLASS_BYTES, _SMALL_FILE = 16, 256, 64 * KiB
# A class forgets: once it has seen more tokens, everything before counts half.
_MAX_TOKENS = 1 << 16


@dataclass
class RoutingClass:
    """counts: numpy [n_layer, n_expert], choices over n_tokens tokens."""

    n_tokens: int
    counts: npt.NDArray[np.int64] = field(repr=False)


class Profile:
    """Routing statistics of one model, by class of prompts."""

    def __init__(self, shape: RouterShape) -> None:
        self.shape = shape
        self.classes: dict[str, RoutingClass] = {}

    def add(self, name: str, counts: npt.ArrayLike, n_tokens: int) -> None:
        """Add the choices of n_tokens tokens, [n_layer, n_expert], to a class, new or not.

        Raises:
            RequestError: the name is unusable, or there are too many classes.
        """
        require_class_name(name)
        more = np.asarray(counts, dtype=np.int64)
        known = self.classes.get(name)
        if known is None:
            if len(self.classes) == _MAX_CLASSES:
                raise RequestError(f"a profile holds {_MAX_CLASSES} classes; remove one")
            self.classes[name] = RoutingClass(n_tokens, more.copy())
            return
        while known.n_tokens + n_tokens > _MAX_TOKENS and known.n_tokens > n_tokens:
            known.n_tokens //= 2
            known.counts //= 2
        known.n_tokens += n_tokens
        known.counts += more

    def shares(self, name: str | None = None) -> npt.NDArray[np.float64]:
        """Return how often a token is expected to choose each expert, [n_layer, n_expert].

        name: a class, or None for the mean of all; rows add up to n_expert_used.

        Raises:
            RequestError: there is no such class.
        """
        if name is not None and name not in self.classes:
            known = ", ".join(sorted(self.classes)) or "none yet"
            raise RequestError(f"the profile has no class {name!r}; it has: {known}")
        chosen = self.classes.values() if name is None else [self.classes[name]]
        k, size = self.shape.n_expert_used, self.shape.sizes[:2]
        parts = [k * c.counts / np.maximum(c.counts.sum(axis=1, keepdims=True), 1) for c in chosen]
        return np.mean(parts, axis=0) if parts else np.zeros(size)

    def ranking(self, name: str | None = None) -> npt.NDArray[np.intp]:
        """Return the experts of each layer, most chosen first, [n_layer, n_expert]; ties by id."""
        return np.argsort(-self.shares(name), axis=1, kind="stable")

    def demand(self) -> npt.NDArray[np.float64]:
        """Return how often a token chooses the best, second best, ... expert of each layer.

        Numpy [n_layer, n_expert], rows falling: mean over classes of each one's own order, because
        what is popular changes with the class and how much it is so does not.
        """
        parts = [-np.sort(-self.shares(name), axis=1) for name in self.classes]
        return np.mean(parts, axis=0) if parts else np.zeros(self.shape.sizes[:2])

    def save(self, path: str | Path) -> None:
        """Write the profile; an older file is replaced only by a complete one.

        Raises:
            ConfigError: the file cannot be written.
        """
        n_layer, n_expert, n_expert_used = self.shape.sizes
        content = {
            "format": FORMAT, "version": _VERSION, "n_layer": n_layer, "n_expert": n_expert,
            "n_expert_used": n_expert_used, "model": self.shape.model,
            "classes": {
                name: {"n_tokens": c.n_tokens, "counts": c.counts.tolist()}
                for name, c in self.classes.items()
            },
        }  # fmt: skip
        replace_file(path, (json.dumps(content, separators=(",", ":")).encode(), b"\n"))


def require_class_name(name: str) -> None:
    """Refuse a name that a class cannot have.

    Raises:
        RequestError: it is empty, long, or has other characters than letters, digits and ._-.
    """
    if not _is_name(name):
        raise RequestError(
            f"profile class {name!r}; use 1 to {_MAX_NAME} letters, digits or any of ._-"
        )


def profile_path(model: str | Path) -> Path:
    """Return where the profile of a model file is kept unless told otherwise."""
    path = Path(model)
    return path.with_name(f"{path.name}.routing.json")


def read_profile(path: str | Path, model: RouterShape) -> Profile:
    """Read and check a profile for a model.

    Raises:
        RequestError: it cannot be read, is damaged, or is of another model.
    """
    data = _read_bounded(path, model)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RequestError(f"{path}: not a routing profile; moegraph writes them with --profile")
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
    return profile


def _read_bounded(path: str | Path, model: RouterShape) -> bytes:
    """Return the bytes of a file that cannot take much memory when it is parsed.

    A profile can lie beside a model that somebody else provides, and an empty list of three bytes
    is an object of sixty: so lists, objects and values are counted before any is made.
    """
    n_rows = _MAX_CLASSES * model.n_layer
    n_counts = n_rows * model.n_expert
    limit = max(n_counts * _COUNT_BYTES + _MAX_CLASSES * _CLASS_BYTES, _SMALL_FILE)
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
    most = {b"[": n_rows + _MAX_CLASSES, b"{": _MAX_CLASSES + 2, b",": n_counts + 8 * _MAX_CLASSES}
    for char, n in most.items():
        if data.count(char) > n:
            raise RequestError(
                f"{path}: not a routing profile of this model: it has {char.decode()!r} "
                f"{data.count(char)} times, and one of this model at most {n} times"
            )
    return data


def _classes(path: str | Path, shape: RouterShape, content: Any) -> dict[str, RoutingClass]:
    if not isinstance(content, dict) or len(content) > _MAX_CLASSES:
        raise _damaged(path, f"it has no list of at most {_MAX_CLASSES} classes")
    classes = {}
    for name, entry in content.items():
        if not _is_name(name) or not isinstance(entry, dict):
            raise _damaged(path, f"class {name!r} is none")
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
    """Return whether rows is [n_layer][n_expert] of plain counts."""
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
