"""Which models are in huggingface_hub's cache, and how they leave it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelFileError
from .hub import cache_folder
from .hubnames import HubName, choose_files, models_among, quant_of

_PREFIX = "models--"


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache. used: when a file of it was read last, in seconds since 1970."""

    name: HubName
    quant: str
    n_bytes: int
    used: float


def cached_models() -> list[CachedModel]:
    """Return the GGUF models in the cache, in order of their names.

    Raises:
        ConfigError: the package huggingface_hub is missing.
    """
    found = [one for folder in cache_folder().glob(f"{_PREFIX}*--*") for one in _models_of(folder)]
    return sorted(found, key=lambda one: str(one.name))


def remove_model(name: HubName) -> int:
    """Remove a model's files of all revisions from the cache; return the bytes that are free now.

    Raises:
        ModelFileError: the cache has no such model, or a file cannot be removed.
    """
    folder = cache_folder() / f"{_PREFIX}{name.repo.replace('/', '--')}"
    links = list(_links(folder))
    if not links:
        raise ModelFileError(f"{name}: not in the cache; moegraph models lists what is there")
    known = {file for file, _ in links}
    files = choose_files(known, name)
    if not models_among(known.difference(files)):
        files = tuple(known)  # with the last model goes its picture encoder
    gone = [link for file, link in links if file in files]
    kept = {link.resolve() for file, link in links if file not in files}
    # what a link of the user's own leads to is none of the cache's
    own = {path for path in (link.resolve() for link in gone) if folder.resolve() in path.parents}
    blobs = own - kept
    n_bytes = sum(_size(blob) for blob in blobs)
    try:
        for path in (*blobs, *gone):
            path.unlink(missing_ok=True)
        if len(gone) == len(links) and not any((folder / "blobs").glob("*")):
            shutil.rmtree(folder)
    except OSError as error:
        raise ModelFileError(f"{error.filename}: cannot remove it: {error.strerror}") from None
    return n_bytes


def _links(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of all revisions of a repository: the name there, and the path."""
    for snapshot in (folder / "snapshots").glob("*"):
        for path in snapshot.rglob("*.gguf"):
            if path.is_file():
                yield str(path.relative_to(snapshot)), path


def _models_of(folder: Path) -> Iterator[CachedModel]:
    repo = folder.name.removeprefix(_PREFIX).replace("--", "/", 1)
    links = list(_links(folder))
    files = {file for file, _ in links}
    for file in models_among(files):
        try:
            parts = choose_files(files, HubName(repo, file))
        except ModelFileError:  # parts are missing
            parts = (file,)
        blobs = {link.resolve() for name, link in links if name in parts}
        quant = quant_of(file) or ""
        is_only = [quant_of(one) for one in models_among(files)].count(quant) == 1
        used = max(max(b.stat().st_atime, b.stat().st_mtime) for b in blobs)
        name = HubName(repo, quant if is_only else file)
        yield CachedModel(name, quant, sum(map(_size, blobs)), used)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
