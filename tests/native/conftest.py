"""Small random models and engines on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.shared import model_writer
from helpers.workers import WorkerProcess, working

from moegraph.arch import ModelFile, open_model
from moegraph.config import EngineConfig

if TYPE_CHECKING:  # the fixtures import it: it needs the native libraries
    from moegraph.engine import Engine


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from preset name to a model file written once per session."""
    return model_writer(tmp_path_factory.mktemp("native-models"), seed=7)


@pytest.fixture
def open_engine(model_path: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    """Return a function that loads an engine on the CPU and closes it after the test."""
    from moegraph.engine import Engine

    opened: list[Engine] = []

    def load(preset: str = "legacy32", **settings: object) -> Engine:
        chosen = {"device": "cpu", "n_threads": 1, "n_ctx": 512, "n_ubatch": 64, **settings}
        engine = Engine.load(model_path(preset), EngineConfig(**chosen))
        opened.append(engine)
        return engine

    yield load
    for engine in opened:
        engine.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close what a test opened."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def opened(model_path: Callable[[str], Path], stack: ExitStack) -> Callable[[str], ModelFile]:
    """Return a function that opens a model file, which is closed after the test."""
    return lambda preset: stack.enter_context(closing(open_model(model_path(preset))))


@pytest.fixture
def mini35b(opened: Callable[[str], ModelFile]) -> ModelFile:
    """Return a small model of the 35B-A3B's kind."""
    return opened("mini35b")


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    """Yield a worker that lends the CPU."""
    with working() as running:
        yield running


@pytest.fixture
def no_leak() -> Iterator[None]:
    """Assert that a test closes as many native handles as it opens."""
    from moegraph.ggml.handles import live_handles

    gc.collect()  # what an earlier test left in a cycle would be closed during this one
    before = live_handles()
    yield
    assert live_handles() == before
