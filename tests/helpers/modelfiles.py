"""What tests of model files share: writing one, and the message of one that is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.ggufbytes import File
from moegraph.arch import open_model
from moegraph.errors import ModelFileError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def run(file: File, name: str = "m.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(file.build())
        return path

    return run


def n_open(path: Path) -> int:
    """Return how many descriptors of this process are of a file."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder is closed by now
            found += os.readlink(entry) == str(path)
    return found


def refused(path: Path, kind: type[ModelFileError] = ModelFileError) -> str:
    before = n_open(path)
    with pytest.raises(ModelFileError) as caught:
        open_model(path)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.isprintable() and message.startswith(f"{path}")
    assert n_open(path) == before, "a failed open leaks a file"
    return message
