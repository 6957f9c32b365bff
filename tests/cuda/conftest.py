"""Models for the tests that need a CUDA device; skipped with a reason when nothing is built."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest_helpers import model_writer

try:
    from moegraph.ggml.device import Device, list_devices

    list_devices()
except Exception as error:  # noqa: BLE001 - whatever the reason, it is the skip's reason
    collect_ignore_glob = ["test_*.py"]
    print(f"tests/cuda is skipped: {error}", file=sys.stderr)


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from preset name to a model file written once per session."""
    return model_writer(tmp_path_factory.mktemp("cuda-models"), seed=7)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """Yield the first CUDA device."""
    opened = Device("cuda")
    yield opened
    opened.close()
