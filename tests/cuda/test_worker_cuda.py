"""A worker's GPU gives the bits of the same split in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers.shared import prompt
from helpers.workers import WorkerProcess, working

from moegraph.engine import Engine
from moegraph.ggml.device import gpu_names

Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def lent() -> str:
    """Return the GPU that the worker lends: the second one, if there are two."""
    return gpu_names()[:2][-1]


@pytest.fixture(scope="module")
def worker(lent: str) -> Iterator[WorkerProcess]:
    """Yield a worker that lends a GPU."""
    with working("--device", lent) as running:
        yield running


def answer(engine: Engine, n: int) -> tuple[list[int | None], np.ndarray]:
    """Return tokens and logits after a prompt of n tokens."""
    events = list(
        engine.generate(
            prompt(engine, n), max_tokens=24, text=False, ignore_eos=True, keep_logits=True
        )
    )
    logits = [event.logits for event in events if event.logits is not None]
    return [event.token for event in events], np.concatenate(logits)


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"type_k": "q8_0"}], ids=str)
@pytest.mark.parametrize("order", ["{0},{1}", "{1},{0}"], ids=["last", "first"])
def test_a_workers_gpu_gives_the_bits_of_a_gpu_here(
    worker: WorkerProcess, lent: str, open_cuda: Open, order: str, settings: dict[str, object]
) -> None:
    """Fused kernels and captured graphs included; several prompts alternate."""
    found = []
    for second in (lent, worker.url):
        engine = open_cuda(device=order.format("cuda:0", second), split="1,1", **settings)
        found.append([answer(engine, n) for n in (5, 200, 5)])
        engine.close()
    for (tokens, logits), (usual, usual_logits) in zip(*found, strict=True):
        assert tokens == usual
        np.testing.assert_array_equal(logits, usual_logits)


def test_drafted_text_is_that_of_a_gpu_here(
    worker: WorkerProcess, lent: str, open_cuda: Open
) -> None:
    found = []
    for second in (lent, worker.url):
        engine = open_cuda(
            device=f"cuda:0,{second}", split="1,1", spec="lookup", deterministic=True
        )
        ids = np.tile(prompt(engine, 12), 8)
        events = engine.generate(ids, max_tokens=40, text=False, ignore_eos=True)
        found.append([event.token for event in events])
        engine.close()
    assert found[0] == found[1]
