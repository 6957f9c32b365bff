"""Models and the device for the tests that need CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.shared import model_writer

from moegraph.config import EngineConfig

if TYPE_CHECKING:  # the fixtures import them: they need the native libraries
    from moegraph.engine import Engine
    from moegraph.ggml.device import Device


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from preset name to a model file written once per session."""
    return model_writer(tmp_path_factory.mktemp("cuda-models"), seed=7)


@pytest.fixture
def open_cuda(model_file: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    """Return a function that loads a random model on the GPU and closes it after the test."""
    from moegraph.engine import Engine

    opened: list[Engine] = []

    def load(preset: str = "mini35b", **settings: object) -> Engine:
        chosen = {"device": "cuda", "n_ctx": 512, "n_ubatch": 64, "n_threads": 4, **settings}
        if "cache_slots" in settings:  # or the planner would pin all other layers
            chosen.setdefault("pin_layers", 0)
        opened.append(Engine.load(model_file(preset), EngineConfig(**chosen)))
        return opened[-1]

    yield load
    for engine in opened:
        engine.close()


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
