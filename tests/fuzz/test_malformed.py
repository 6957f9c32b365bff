"""Each malformed file ends in one clear line and exit code 3, inside memory and time limits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import N_FILES, family_cases
from helpers.ggufbytes import Shape, model_file
from helpers.sparse import file_of, preset_contents
from malformed import cases
from regression.harness import FAMILIES

Open = Callable[[Path], dict[str, Any]]
# The largest files of the table take half a second; an idle machine's figure, tripled.
MAX_SECONDS = 5.0
# Interpreter, numpy and the largest file of the table twice over.
MAX_RSS_BYTES = 400 << 20
CASES = {name: (raw, words) for name, raw, words in cases()}


def check(result: dict[str, Any], path: Path) -> str:
    assert result.get("crash") is None and result["status"] == 0, result
    assert result["seconds"] < MAX_SECONDS and result["max_rss_bytes"] < MAX_RSS_BYTES, result
    assert not result["opened"], "a malformed file was accepted"
    assert result["kind"] in ("ModelFileError", "UnsupportedModel") and result["code"] == 3
    message = str(result["message"])
    assert message.startswith(str(path)) and message.isprintable() and len(message) <= 1200
    return message


def test_the_table_has_no_case_twice() -> None:
    names = [name for name, _, _ in cases()]
    assert len(names) == len(set(names)) and len(names) > 150


def test_well_formed_models_open(tmp_path: Path, open_in_child: Open) -> None:
    for i, shape in enumerate((Shape(), Shape(merged=True, tied=True, n_nextn=1))):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(model_file(shape).build())
        assert open_in_child(path)["opened"]


@pytest.mark.parametrize("name", CASES)
def test_a_malformed_file_ends_in_one_clear_line(
    tmp_path: Path, open_in_child: Open, name: str
) -> None:
    raw, words = CASES[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    assert words in check(open_in_child(path), path)


@pytest.mark.parametrize("preset", FAMILIES)
def test_what_a_family_asks_for_is_checked(
    tmp_path: Path, open_in_child: Open, preset: str
) -> None:
    path, found = tmp_path / "m.gguf", family_cases(preset)
    file_of(*preset_contents(preset)).write_sparse(path)
    assert open_in_child(path)["opened"]
    assert len({name for name, _ in found}) == N_FILES
    for name, file in found:
        file.write_sparse(path)
        result = open_in_child(path)
        assert not result["opened"], name
        check(result, path)


@pytest.mark.parametrize("size", [1 << 32, 1 << 42])
def test_a_sparse_file_of_any_size_is_not_read(
    tmp_path: Path, open_in_child: Open, size: int
) -> None:
    """The claims fit into these files: only the header limit stands between them and memory."""
    for name in ("u8 array of 1073741823", "string array of 1073741823", "n_kv beyond the file"):
        path = tmp_path / "m.gguf"
        path.write_bytes(CASES[name][0])
        os.truncate(path, size)
        check(open_in_child(path), path)


def test_nodes_that_are_no_files_never_block(tmp_path: Path, open_in_child: Open) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), tmp_path / "absent"):
        check(open_in_child(path), path)
