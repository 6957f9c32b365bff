"""Names of models on a hub, `OWNER/REPO[:QUANT]`, and which files of a repository they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from ..errors import ConfigError, ModelFileError
from ..units import format_bytes

PREFIX = "hf:"
# As llama.cpp's -hf: what is meant by a name without a quantization.
DEFAULT_QUANT = "Q4_K_M"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?::(?P<pick>[^:\\\s]{{1,200}}))?", re.A)
# Of a page, or what Ollama takes.
_ADDRESS = re.compile(
    r"(?:https?://)?(?:huggingface|hf)\.co/"
    rf"(?P<name>{_PART}/{_PART}(?::[^:/\\\s]{{1,200}})?)(?:/.*)?",
    re.A,
)
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:IQ\d\w*|T?Q\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4\w*))$", re.I | re.A
)
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$", re.A)
# Beside models, repositories have image encoders and statistics as GGUF files.
_NO_MODEL = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.I | re.A)
_MMPROJ = re.compile(r"mmproj[^/]*\.gguf$", re.I | re.A)
_MAX_LISTED = 12


@dataclass(frozen=True)
class HubName:
    """A model on a hub. repo: OWNER/REPO. pick: a quantization or a file's name; None: default."""

    repo: str
    pick: str | None = None

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}" + (f":{self.pick}" if self.pick else "")


def is_hub_name(target: str) -> bool:
    """Return whether a TARGET names a model on a hub: hf:OWNER/REPO[:QUANT]."""
    return target.startswith(PREFIX)


def name_in(text: str) -> str | None:
    """Return OWNER/REPO[:QUANT] if that is what a text seems to mean, as a name or an address."""
    match = _ADDRESS.fullmatch(text)
    is_name = match or (_NAME.fullmatch(text) and not text.endswith(".gguf"))
    return (match["name"] if match else text) if is_name else None


def parse_hub_name(text: str) -> HubName:
    """Parse OWNER/REPO, OWNER/REPO:QUANT or OWNER/REPO:FILE.gguf, with or without "hf:"."""
    name = text.removeprefix(PREFIX)
    match = _NAME.fullmatch(name)
    if match is None or ".." in name or "--" in match["repo"]:
        raise ConfigError(f"{text!r} names no model on a hub; write OWNER/REPO or OWNER/REPO:QUANT")
    return HubName(match["repo"], match["pick"])


def quant_of(file: str) -> str | None:
    """Return the quantization in a file's name, in capitals, such as UD-Q4_K_XL; None: no such."""
    match = _QUANT.search(model_name(file))
    return match[1].upper() if match else None


def choose_files(files: Iterable[str], name: HubName) -> tuple[str, ...]:
    """Return the GGUF file that a name means among a repository's files; of a split one, all parts.

    Without a quantization it is Q4_K_M, or the only model that there is. A quantization also
    means its UD- variant, if there is no other.
    """
    known = sorted(set(files))
    models = models_among(known)
    if not models:
        raise ModelFileError(f"{name.repo}: the repository has no GGUF file of a model")
    if name.pick and name.pick.lower().endswith(".gguf"):
        if name.pick not in known:
            raise ModelFileError(f"{name.repo}: no file {name.pick}; there are {_listed(models)}")
        return _parts(name.pick, known, name)
    found = _of_quant(models, (name.pick or DEFAULT_QUANT).upper())
    if not found and name.pick is None and len(models) == 1:
        found = models
    if not found:
        quants = sorted({quant_of(f) or f for f in models})
        wanted = name.pick or f"{DEFAULT_QUANT}, the default"
        raise ModelFileError(
            f"{name.repo}: no file with the quantization {wanted}; there are {_listed(quants)}"
        )
    if len(found) > 1:
        raise ModelFileError(
            f"{name}: several files fit: {_listed(found)}; write {PREFIX}{name.repo}:FILE"
        )
    return _parts(found[0], known, name)


def fitting(sizes: Mapping[str, int], name: HubName, room: int) -> tuple[HubName, str]:
    """Return what to take where a name has no quantization, and a line if the default is too large.

    Then it is the largest that fits. sizes: bytes of the repository's files. room: bytes of memory.
    """
    known = sorted(sizes)

    def n_bytes(file: str) -> int:
        return sum(sizes[part] for part in _parts(file, known, name))

    default = choose_files(known, name)[0]
    if (most := n_bytes(default)) <= room:
        return name, ""
    fits = sorted((n, file) for file in models_among(known) if (n := n_bytes(file)) <= room)
    why = f"{default} ({format_bytes(most)}) does not fit into {format_bytes(room)} of memory"
    if not fits:
        return name, f"{why}, nor does any other; a part is read from the disk"
    n, file = fits[-1]
    return replace(name, pick=file), f"taking {file} ({format_bytes(n)}), because {why}"


def mmproj_for(model: str, files: Iterable[str]) -> str | None:
    """Return the picture encoder of a model among a repository's files; None: there is none.

    As llama.cpp's -hf (`find_best_sibling` in common/download.cpp): one in the model's folder or
    above it, the deepest first, then that whose type has the bits closest to the model's.
    """
    above = PurePosixPath(model).parents
    found = [f for f in sorted(files) if PurePosixPath(f).parent in above and _MMPROJ.search(f)]

    def order(file: str) -> tuple[int, int]:
        return -len(PurePosixPath(file).parents), abs(_bits(file) - _bits(model))

    return min(found, key=order, default=None)


def _bits(file: str) -> int:
    digits = re.search(r"\d+", quant_of(file) or "", re.A)
    return int(digits[0]) if digits else 0


def models_among(files: Iterable[str]) -> list[str]:
    """Return the GGUF files that are models, in order; of a split one, its first part."""
    return sorted(file for file in set(files) if _is_model(file))


def model_name(file: str) -> str:
    """Return the name of a file without the suffix and the number of its part."""
    return _SPLIT.sub("", PurePosixPath(file).stem)


def _is_model(file: str) -> bool:
    """Return whether a file is a model, or the first part of one."""
    path = PurePosixPath(file)
    split = _SPLIT.search(path.stem)
    is_first = split is None or int(split[1]) == 1
    return path.suffix.lower() == ".gguf" and is_first and not _NO_MODEL.search(path.stem)


def _of_quant(models: list[str], quant: str) -> list[str]:
    exact = [f for f in models if quant_of(f) == quant]
    return exact or [f for f in models if quant_of(f) == f"UD-{quant}"]


def _parts(file: str, known: list[str], name: HubName) -> tuple[str, ...]:
    path = PurePosixPath(file)
    split = _SPLIT.search(path.stem)
    if split is None:
        return (file,)
    stem, n_parts = path.stem[: split.start()], int(split[2])
    parts = [
        str(path.with_name(f"{stem}-{i:05}-of-{n_parts:05}{path.suffix}"))
        for i in range(1, n_parts + 1)
    ]
    missing = [part for part in parts if part not in known]
    if missing or file not in parts:
        raise ModelFileError(f"{name}: parts of a split file are missing: {_listed(missing)}")
    return tuple(parts)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
