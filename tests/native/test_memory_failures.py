"""Memory that cannot be had, and interrupts while it is: what was there before goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.shared import greedy_tokens, prompt

from moegraph.errors import NativeError
from moegraph.ggml.device import Device
from moegraph.ggml.lib import C
from moegraph.graphs import cache


@pytest.mark.parametrize("mode", ["whole", "layered"])
def test_results_that_find_no_memory_cost_one_request(open_engine, monkeypatch, mode: str) -> None:
    engine = open_engine(mode=mode)
    ids = prompt(engine, 30)
    expected = greedy_tokens(engine, ids, 5)
    engine.reset()
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise NativeError("cannot allocate host memory for transfers")

        patch.setattr(Device, "host_buffer", refuse)
        with pytest.raises(NativeError, match="cannot allocate"):
            engine.forward(ids, all_rows=True)
        assert engine.held(0) == []
        assert greedy_tokens(engine, ids, 5) == expected
    engine.reset()
    assert engine.forward(ids, all_rows=True).logits.shape[0] == 30
    assert greedy_tokens(engine, ids, 5) == expected


class Interrupting:
    """The native library, but an interrupt comes as the k-th assignment of memory returns."""

    def __init__(self, at: int) -> None:
        self._left = at

    def mg_graph_alloc(self, *args: Any) -> bool:
        ok = C.mg_graph_alloc(*args)
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return ok

    def __getattr__(self, name: str) -> Any:
        return getattr(C, name)


@pytest.mark.parametrize("mode", ["whole", "layered"])
def test_no_graph_outlives_an_interrupt_that_comes_with_a_larger_block(
    open_engine, monkeypatch, mode: str
) -> None:
    """They might have addresses of the block that is gone."""
    monkeypatch.setattr("moegraph.engine.loader.reserve_graphs", lambda *_: None)
    expected = open_engine(mode=mode).forward_logits(np.arange(3))
    for at in (1, 2, 3):
        engine = open_engine(mode=mode)
        np.testing.assert_array_equal(engine.forward_logits(np.arange(3)), expected)
        engine.reset()
        graphs, before = engine.runner.graphs, engine.runner.graphs.n_bytes
        n_graphs, generation = len(graphs), graphs.generation
        assert n_graphs > 0
        with monkeypatch.context() as patch:
            patch.setattr(cache, "C", Interrupting(at))
            for n_rows in (20, 33, 64):  # larger, and the block moves
                try:
                    engine.forward_logits(np.arange(n_rows))
                except KeyboardInterrupt:
                    break
                engine.reset()
            else:
                raise AssertionError("it did not come")
        assert graphs.n_bytes > before, "the block did not move"
        assert len(graphs) == 0 and graphs.generation > generation
        np.testing.assert_array_equal(engine.forward_logits(np.arange(3)), expected)
