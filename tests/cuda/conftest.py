"""Models and the device for the tests that need CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.shared import model_writer

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


@pytest.fixture(scope="session")
def capability() -> int:
    """Return the compute capability of the first CUDA device: 75, 86, 90, ..."""
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuInit(0) == 0
    first = ctypes.c_int()
    assert driver.cuDeviceGet(ctypes.byref(first), 0) == 0
    found = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        value = ctypes.c_int()
        assert driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, first) == 0
        found.append(value.value)
    return 10 * found[0] + found[1]
