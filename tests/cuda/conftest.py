"""Models and the device for the tests that need CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest_helpers import model_writer

if TYPE_CHECKING:  # the fixture imports it: it needs the native libraries
    from moegraph.ggml.device import Device


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from preset name to a model file written once per session."""
    return model_writer(tmp_path_factory.mktemp("cuda-models"), seed=7)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """Yield the first CUDA device."""
    from moegraph.ggml.device import Device

    opened = Device("cuda")
    yield opened
    opened.close()
