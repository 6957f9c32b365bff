"""Experts fetched before the graphs that may miss them: copies beside graphs, however late."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.cache_rules import check_cache
from helpers.fetching_engines import check_sound
from helpers.shared import prompt

from moegraph.ggml.lib import C
from moegraph.ggml.memory import Block
from moegraph.kinds import MAX_AHEAD
from moegraph.runner import layer_graphs
from moegraph.runner.ahead import AheadFetch

PRESETS = ["wide64", "mini35b", "legacy32", "gptoss"]
_DELAY = 16 << 20  # numbers: a copy that takes longer than a pass


@pytest.fixture
def sent(monkeypatch) -> list[int]:
    """Return a list of how many experts each pass has sent."""
    counts, real = [], AheadFetch.send

    def send(self):
        counts.append(len(self.sent))
        return real(self)

    monkeypatch.setattr(AheadFetch, "send", send)
    return counts


@pytest.fixture(autouse=True)
def short_first_graph(monkeypatch) -> None:
    """Nothing is fetched ahead for the layers of the first graph, and test models have few."""
    monkeypatch.setattr(layer_graphs, "MERGED", 1)


def open_ahead(open_cuda, preset, n_rows=1, **settings):
    """Return an engine with slots for a few rows, and what is fetched ahead of them."""
    hp = open_cuda(preset).hparams
    each = min(n_rows * hp.n_expert_used + MAX_AHEAD, hp.n_expert - 1)
    slots = len(hp.routed_layers) * each
    return open_cuda(preset, cache_slots=slots, policy="lfu", miss="stream", **settings)


@pytest.mark.parametrize("preset", PRESETS)
def test_tokens_that_occur_again_have_the_bits_of_whole(open_cuda, sent, preset):
    whole, engine = open_cuda(preset), open_ahead(open_cuda, preset)
    ids = np.tile(prompt(whole, 40, seed=5), 6)
    for at, token in enumerate(ids):
        rows = [e.forward_logits([token], at) for e in (engine, whole)]
        np.testing.assert_array_equal(*rows, err_msg=f"token {at}")
    check_cache(engine.runner.cache)
    check_sound(engine)
    assert sum(sent) > 100


@pytest.mark.parametrize("n", [2, 4, 6])
def test_rows_have_the_bits_of_whole(open_cuda, sent, n):
    whole, engine = open_cuda("legacy32"), open_ahead(open_cuda, "legacy32", n)
    ids, at = np.tile(prompt(whole, 41, seed=5), 7), 0
    while at + n < len(ids):
        rows = [e.forward_logits(ids[at : at + n], at) for e in (engine, whole)]
        np.testing.assert_array_equal(*rows, err_msg=f"rows from {at}")
        at += n
    check_sound(engine)
    assert sum(sent) > 10


@pytest.mark.parametrize(("preset", "n"), [("wide64", 1), ("mini35b", 1), ("legacy32", 2)])
def test_graphs_wait_for_copies_that_come_late(open_cuda, monkeypatch, preset, n):
    """The look-ups of a pass run while the upload stream is busy with something else."""
    whole, engine = open_cuda(preset), open_ahead(open_cuda, preset, n)
    device, real, n_late = engine.device, AheadFetch.send, []
    host = device.host_buffer(4 * _DELAY, must_pin=True)
    block = Block(device, {"delay": (_DELAY, 1)}, "a delay", "free memory")

    def send(self):
        n_late.append(len(self.sent))
        C.ggml_backend_tensor_set_async(
            device.upload.ptr, block.tensors["delay"], host.address(0), 0, 4 * _DELAY
        )
        return real(self)

    monkeypatch.setattr(AheadFetch, "send", send)
    ids, at = np.tile(prompt(whole, 24, seed=5), 5), 0
    while at + n <= len(ids):
        rows = [e.forward_logits(ids[at : at + n], at) for e in (engine, whole)]
        np.testing.assert_array_equal(*rows, err_msg=f"rows from {at}")
        at += n
    device.synchronize()
    check_sound(engine)
    assert sum(n_late) > 20
    block.close()
    host.close()
