"""Single modules of a large package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moegraph.lazypackage import import_lazily


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "big_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .table import *\nfrom .slow import walk\nVALUE = 7\n")
    (folder / "table.py").write_text("ROW = [1]\n")
    (folder / "slow.py").write_text("def walk():\n    return 'slowly'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith("big_package")]:
        del sys.modules[name]


def test_a_module_comes_alone(big: Path) -> None:
    import_lazily("big_package")
    table = importlib.import_module("big_package.table")
    assert table.ROW == [1]
    assert sys.modules["big_package"].table is table
    assert "big_package.slow" not in sys.modules


def test_the_rest_comes_when_it_is_needed(big: Path) -> None:
    import_lazily("big_package")
    table = importlib.import_module("big_package.table")
    package = importlib.import_module("big_package")
    assert (package.VALUE, package.walk(), package.ROW) == (7, "slowly", [1])
    assert package.ROW is table.ROW
    with pytest.raises(AttributeError, match="has no attribute 'NOTHING'"):
        _ = package.NOTHING
