"""What tests of model files share: writing one, and the message of one that is refused."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.ggufbytes import File
from moegraph.errors import ModelFileError
from moegraph.modelfile import open_model

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def run(file: File, name: str = "m.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(file.build())
        return path

    return run


def refused(path: Path, kind: type[ModelFileError] = ModelFileError) -> str:
    gc.collect()  # what an earlier test left would be closed during this one
    n_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelFileError) as caught:
        open_model(path)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.isprintable() and message.startswith(f"{path}")
    assert len(os.listdir("/proc/self/fd")) == n_open, "a failed open leaks a file"
    return message
