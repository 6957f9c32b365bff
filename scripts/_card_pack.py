"""Pack what was built into files that a machine without compilers or packages unpacks.

A pack is one .tar.xz, cut into pieces NAME.000, NAME.001, ... of at most so many bytes. Its first
member, manifest.json, holds the options of scripts/build and the patch set. The others lie under
the names of the folders that were packed.
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from _tools import BuildError

MANIFEST = "manifest.json"
Manifest = dict[str, object]


def pieces_of(path: Path) -> list[Path]:
    """Return the pieces of a pack, or the file itself if it is in one."""
    found = [path] if path.is_file() else sorted(path.parent.glob(f"{path.name}.[0-9][0-9][0-9]"))
    if not found:
        raise BuildError(f"{path}: no such pack (nor {path.name}.000)")
    return found


def pack(path: Path, folders: Mapping[str, Path], about: Manifest, n_bytes: int) -> list[Path]:
    """Pack files and folders by name into pieces; return these. Old pieces of that name go."""
    for old in path.parent.glob(f"{path.name}.[0-9][0-9][0-9]"):
        old.unlink()
    text, pieces = json.dumps(about).encode(), list[Path]()
    with tempfile.TemporaryFile(dir=path.parent) as whole:
        with tarfile.open(fileobj=whole, mode="w:xz", dereference=True) as tar:
            head = tarfile.TarInfo(MANIFEST)
            head.size = len(text)
            tar.addfile(head, io.BytesIO(text))
            for name, folder in folders.items():
                tar.add(folder, name, filter=lambda x: None if "__pycache__" in x.name else x)
        whole.seek(0)
        while data := whole.read(n_bytes):
            pieces.append(path.with_name(f"{path.name}.{len(pieces):03d}"))
            pieces[-1].write_bytes(data)
    return pieces


def unpack(path: Path, folders: Mapping[str, Path]) -> Manifest:
    """Unpack into folders by name; return the manifest."""
    with tempfile.TemporaryFile() as whole:
        for piece in pieces_of(path):
            whole.write(piece.read_bytes())
        whole.seek(0)
        try:
            with tarfile.open(fileobj=whole, mode="r:xz") as tar:
                first = tar.next()
                if first is None or first.name != MANIFEST:
                    raise ValueError("no manifest")
                about: Manifest = json.loads(_read(tar, first))
                for member in (one for one in tar if one.isfile() and one.name != MANIFEST):
                    target = place(member.name, folders)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.unlink(missing_ok=True)  # a running process may map it
                    target.write_bytes(_read(tar, member))
                    target.chmod(member.mode)
                return about
        except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
            raise BuildError(f"{path} is broken or no pack of measure_card: {error}") from error


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    content = tar.extractfile(member)
    return content.read() if content else b""


def place(name: str, folders: Mapping[str, Path]) -> Path:
    """Return where a member goes."""
    parts = PurePosixPath(name).parts
    for known, folder in folders.items():
        own = PurePosixPath(known).parts
        if parts[: len(own)] == own and ".." not in parts:
            return folder.joinpath(*parts[len(own) :])
    raise ValueError(f"unexpected file {name}")
