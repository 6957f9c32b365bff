"""A GGUF file on disk, in one file or several parts: opened and scanned."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ..errors import ModelFileError
from .metadata import Metadata
from .scan import Part, scan_part
from .tensorfile import TensorFile, TensorInfo

MAX_PARTS = 1024
_SPLIT_NO, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
_PART_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL | re.ASCII)


class GgufFile(TensorFile):
    """A well-formed GGUF file of any architecture; `open_gguf` returns it.

    metadata, kv: key-value pairs of the first part. version: its GGUF version.
    """

    metadata: Metadata
    kv: dict[str, Any]
    version: int

    def _scan(self) -> dict[str, TensorInfo]:
        first = self._scan_part(self.path)
        self.metadata = meta = first.metadata
        self.kv, self.version = meta.values, first.version
        n_parts = meta.integer(_SPLIT_COUNT, 0, 65_535, 1)
        parts = [first]
        if n_parts > 1:
            for no, path in enumerate(_part_names(self.path, meta, n_parts)[1:], 1):
                parts.append(self._scan_part(path))
                _check_part(parts[no], no, n_parts)
            total = meta.integer(_SPLIT_TENSORS, 0, 1 << 31)
            found = sum(len(part.tensors) for part in parts)
            if total != found:
                raise meta.error(_SPLIT_TENSORS, f"is {total} but the {n_parts} parts hold {found}")
        # llama.cpp ignores what follows the last tensor, and so does moegraph
        self.warnings = tuple(
            f"{part.path}: {part.trailing_bytes} bytes follow the last tensor, ignored"
            for part in parts
            if part.trailing_bytes
        )
        return _merge(parts)

    def _scan_part(self, path: Path) -> Part:
        no, part = len(self.paths), self._open(path)
        return scan_part(part.fd, path, part.size, no)


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a well-formed GGUF file of any architecture, for inspection."""
    return GgufFile(Path(path))


def _merge(parts: list[Part]) -> dict[str, TensorInfo]:
    """Return the tensors of all parts; each name may occur only once."""
    tensors = dict(parts[0].tensors)
    for part in parts[1:]:
        for name, info in part.tensors.items():
            if name in tensors:
                first = parts[tensors[name].part].path
                raise ModelFileError(f"{part.path}: tensor {name} is also in {first}")
            tensors[name] = info
    return tensors


def _part_names(path: Path, meta: Metadata, n_parts: int) -> list[Path]:
    """Return the path of every part; only the first part's name decides, not its metadata."""
    if n_parts > MAX_PARTS:
        raise meta.error(_SPLIT_COUNT, f"is {n_parts}; allowed are 1 to {MAX_PARTS}")
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        raise meta.error(
            _SPLIT_COUNT,
            f"says that this is one of {n_parts} parts, but the file name does not "
            f"end in -00001-of-{n_parts:05}.gguf; give the parts their original names",
        )
    prefix, number, count = match.group(1), int(match.group(2)), int(match.group(3))
    first = path.with_name(f"{prefix}-00001-of-{n_parts:05}.gguf")
    no = meta.integer(_SPLIT_NO, 0, n_parts - 1)
    if no != 0:
        raise ModelFileError(
            f"{path}: this is part {no + 1} of {n_parts}; open the first part, {first.name}"
        )
    if (number, count) != (1, n_parts):
        raise meta.error(
            _SPLIT_COUNT,
            f"says that this is part 1 of {n_parts}, but the file name says part "
            f"{number} of {count}; give the parts their original names",
        )
    return [path.with_name(f"{prefix}-{i + 1:05}-of-{n_parts:05}.gguf") for i in range(n_parts)]


def _check_part(part: Part, no: int, n_parts: int) -> None:
    """Check that a part's metadata agrees with its file name."""
    found = part.metadata.integer(_SPLIT_NO, 0, 65_535)
    if found != no:
        raise part.metadata.error(_SPLIT_NO, f"is {found}, but the file name says {no}")
    count = part.metadata.integer(_SPLIT_COUNT, 0, 65_535, n_parts)
    if count != n_parts:
        raise part.metadata.error(_SPLIT_COUNT, f"is {count}, but the first part says {n_parts}")
