"""The hash of a model's files: it changes with whatever changes in them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.build import write_model
from modelgen.presets import PRESETS

from moegraph.arch import open_model
from moegraph.placement.identity import file_hash


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a model in three parts."""
    chosen = PRESETS["kquant40"]
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_model(path, chosen.shape, chosen.mix, seed=1, n_splits=3)


def hash_of(path: Path) -> str:
    with open_model(path) as model:
        return file_hash(model)


@contextmanager
def edited(path: Path, offset: int, n: int) -> Iterator[None]:
    """Invert n bytes of a file for a while."""
    with open(path, "r+b") as file:
        data = np.memmap(file, np.uint8, "r+", offset, n)
        data ^= 255
        yield
        data ^= 255


def test_each_expert_of_each_tensor_counts_even_if_no_time_tells(parts: list[Path]) -> None:
    """The times that count are those at opening."""
    n_experts = 0
    with open_model(parts[0]) as model:
        before = file_hash(model)
        for info in model.tensors.values():
            n_slices = info.ne[2]
            size = info.nbytes // n_slices
            for expert in sorted({0, 1, n_slices // 2, n_slices - 1} & {*range(n_slices)}):
                with edited(model.paths[info.part], info.offset + expert * size, size):
                    assert file_hash(model) != before, f"{info.name} {expert}"
                n_experts += n_slices > 1
        assert n_experts > 20 and file_hash(model) == before


def test_a_tensor_is_sampled_in_several_places(parts: list[Path]) -> None:
    with open_model(parts[0]) as model:
        before, info = file_hash(model), model.tensors["token_embd.weight"]
        tenth = info.nbytes // 10
        for at in range(10):
            with edited(model.paths[0], info.offset + at * tenth, tenth):
                assert file_hash(model) != before, at


@pytest.mark.parametrize("no", range(3))
def test_the_time_of_each_part_counts_but_neither_names_nor_folders(
    parts: list[Path], tmp_path: Path, no: int
) -> None:
    copies = [Path(shutil.copy2(path, tmp_path / path.name)) for path in parts]
    assert hash_of(copies[0]) == hash_of(parts[0])
    status = copies[no].stat()
    os.utime(copies[no], ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    assert hash_of(copies[0]) != hash_of(parts[0])


def test_the_size_of_each_part_counts(parts: list[Path], tmp_path: Path) -> None:
    copies = [Path(shutil.copy2(path, tmp_path / path.name)) for path in parts]
    status = copies[2].stat()
    with open(copies[2], "ab") as file:
        file.write(bytes(64))
    os.utime(copies[2], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hash_of(copies[0]) != hash_of(parts[0])
