"""scripts/measure_card: what it builds, and packs for other machines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import _card_pack
from _tools import BuildError


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    """Return a pack in pieces of 1,000 bytes, and the folders in it."""
    source = tmp_path / "source"
    (source / "lib" / "deep").mkdir(parents=True)
    (source / "lib" / "a.so").write_bytes(os.urandom(5000))
    (source / "lib" / "deep" / "run").write_text("x")
    (source / "lib" / "deep" / "run").chmod(0o755)
    (source / "one").write_text("1")
    folders = {"ours/lib": source / "lib", "ours/one": source / "one"}
    path = tmp_path / "packs" / "card.pack"
    path.parent.mkdir()
    pieces = _card_pack.pack(path, folders, {"kinds": ["ours"]}, 1000)
    assert len(pieces) >= 6 and max(piece.stat().st_size for piece in pieces) == 1000
    return path, folders


def places(folder: Path) -> dict[str, Path]:
    return {"ours/lib": folder / "lib", "ours/one": folder / "one"}


def test_a_pack_gives_back_what_went_in(
    packed: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    path, folders = packed
    there = places(tmp_path / "there")
    assert _card_pack.unpack(path, there) == {"kinds": ["ours"]}
    for name in ("a.so", "deep/run"):
        assert (there["ours/lib"] / name).read_bytes() == (folders["ours/lib"] / name).read_bytes()
    assert os.access(there["ours/lib"] / "deep" / "run", os.X_OK)
    assert there["ours/one"].read_text() == "1"
    for piece in _card_pack.pieces_of(path):
        piece.read_bytes()
    whole = tmp_path / "whole"
    whole.write_bytes(b"".join(p.read_bytes() for p in _card_pack.pieces_of(path)))
    assert _card_pack.unpack(whole, places(tmp_path / "again")) == {"kinds": ["ours"]}


def spoil(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 255
    path.write_bytes(data)


@pytest.mark.parametrize("damage, said", [
    (lambda path: path.with_name("card.pack.002").unlink(), "broken"),
    (lambda path: _card_pack.pieces_of(path)[-1].unlink(), "broken"),
    (lambda path: spoil(path.with_name("card.pack.001"), 500), "broken"),
    (lambda path: [piece.unlink() for piece in _card_pack.pieces_of(path)], "no such pack"),
])  # fmt: skip
def test_a_broken_pack_is_refused(
    packed: tuple[Path, dict[str, Path]], tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    path, _ = packed
    damage(path)
    with pytest.raises(BuildError, match=said):
        _card_pack.unpack(path, places(tmp_path / "there"))


def test_a_pack_writes_only_into_its_folders(tmp_path: Path) -> None:
    folders = places(tmp_path)
    assert _card_pack.place("ours/lib/x/y.so", folders) == tmp_path / "lib" / "x" / "y.so"
    for name in ("ours/lib/../../x", "/etc/passwd", "other/x", "ours/library"):
        with pytest.raises(ValueError, match="unexpected file"):
            _card_pack.place(name, folders)
