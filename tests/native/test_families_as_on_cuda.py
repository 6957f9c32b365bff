"""Each family goes the way of CUDA on the CPU: only the kernels are the CPU's.

The device says that it has streams, memory of its own and sums of another order. So graphs are not
shortened, attention reads pages where it can, missing experts are added to finished sums, and tiles
are narrowed. Products have the reference kernels, whose rows do not depend on their number: what
changes no order of sums changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from regression.harness import FAMILIES, WITH_PAGES, Models, random_ids

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import ConfigError
from moegraph.ggml.device import Capabilities, Device
from moegraph.ggml.lib import C

Open = Callable[..., Engine]
Rows = npt.NDArray[np.float32]
# Tokens of passes: prompts for tiles and for units of missing experts, then few rows.
WIDTHS = (200, 1, 1, 1, 7, 1, 40, 1, 1)
# A slot for a third of the experts.
SLOTS = {"pin_layers": 0, "cache_slots": 1, "policy": "lru", "miss": "stream"}
WAYS: dict[str, dict[str, Any]] = {
    "layered": {"mode": "layered"},
    "fetched": {**SLOTS, "host_pin": "all"},
    "uploaded": {**SLOTS, "host_pin": "none"},
    "streamed": {**SLOTS, "cache_slots": 0},
    "by default": {**SLOTS, "miss": "auto"},
}
# Squared error over squared logits: adding in another order seldom makes a router choose others.
# A wrong term gives more than 0.1 everywhere.
USUAL = 2e-3
N_SEQ = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("as-on-cuda"))


@pytest.fixture
def open_as_cuda(models: Models, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Return a function that opens a model on a CPU device that goes the way of CUDA."""
    real, engines = Device._open, list[Engine]()

    def open_device(device: Device, n_threads: int | None, reference: bool) -> None:
        real(device, n_threads, reference)
        C.ggml_backend_cpu_set_use_ref(device.compute.ptr, True)
        C.ggml_backend_cpu_set_n_threads(device.compute.ptr, 1)

    can = Capabilities(
        streams=True, own_memory=True, host_access=True, exact_sums=False, cpu_threads=False
    )
    monkeypatch.setattr(Capabilities, "of", classmethod(lambda cls, dev: can))
    monkeypatch.setattr(Device, "_open", open_device)
    monkeypatch.setattr(Device, "_needs_pins", False)
    monkeypatch.setattr(Device, "event", lambda device: None)

    def load(name: str, **settings: Any) -> Engine:
        with open_model(models.path(name)) as model:
            hp = model.hparams
        if settings.get("cache_slots"):
            settings["cache_slots"] = len(hp.routed_layers) * hp.n_expert // 3
        chosen = {"device": "cpu", "n_threads": 1, "n_ctx": 1024, "n_ubatch": 256, **settings}
        engines.append(Engine.load(models.path(name), EngineConfig(**chosen)))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


def error(found: Rows, expected: Rows) -> npt.NDArray[np.float64]:
    """Return the squared error of each row over its squares."""
    squares = (expected.astype(np.float64) ** 2).sum(-1)
    return ((found - expected).astype(np.float64) ** 2).sum(-1) / squares


def pass_rows(engine: Engine) -> list[Rows]:
    """Return the logits of each pass."""
    ends = np.cumsum(WIDTHS)
    ids = random_ids(engine.hparams.n_vocab, ends[-1])
    return [engine.forward_logits(ids[at - n : at], at - n) for n, at in zip(WIDTHS, ends)]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_those_of_the_whole_model_wherever_experts_are(
    name: str, open_as_cuda: Open
) -> None:
    whole = open_as_cuda(name)
    hp, expected = whole.hparams, pass_rows(whole)
    assert whole.runner.shapes.can_page == (name in WITH_PAGES)
    for way, settings in WAYS.items():
        engine = open_as_cuda(name, **settings)
        found = pass_rows(engine)
        errors = np.concatenate([error(*pair) for pair in zip(found, expected)])
        assert np.median(errors) < USUAL, (way, np.median(errors))
        stats = engine.expert_stats()
        if way == "layered" or not hp.adds_late:  # no sum has another order
            np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected), way)
        if way != "layered":
            assert stats is not None and stats.cache.missing.sum() > 0
            assert (stats.n_fetching > 0) == (way in ("fetched", "by default"))
        engine.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_sequences_in_company_have_the_bits_that_they_have_alone(
    name: str, open_as_cuda: Open
) -> None:
    """Passes of any slots, padded ones among them; trees and what is taken of them.

    Prompts attend by mask, unless --deterministic has them read pages as other passes do.
    """
    settings = {"deterministic": name in WITH_PAGES}
    engine, alone = open_as_cuda(name, n_seq=N_SEQ, **settings), open_as_cuda(name, **settings)
    passes, rng, n_vocab = engine.passes, np.random.default_rng(1), engine.hparams.n_vocab
    held = [rng.integers(0, n_vocab, 35 + slot).tolist() for slot in range(N_SEQ)]
    for slot, tokens in enumerate(held):
        engine.prefill(np.array(tokens), slot, greedy=True)
    for turn in range(8):
        slots, n = rng.permutation(N_SEQ)[: 1 + turn % N_SEQ].tolist(), 1 + 2 * (turn % 3 == 2)
        tokens = rng.integers(0, n_vocab, (len(slots), n))
        if n > 1:  # the third row continues the first one
            passes.verify(tokens, slots, [[-1, 0, 0]] * len(slots), greedy=False)
            rows = passes.collect().require_logits().reshape(len(slots), n, -1)[:, [0, 2]]
            tokens = tokens[:, [0, 2]]
            passes.commit({slot: [0, 2] for slot in slots})
        else:
            rows = engine.forward(tokens, slots).require_logits()[:, None]
        for slot, new, found in zip(slots, tokens.tolist(), rows):
            held[slot] += new
            alone.reset()
            alone.prefill(np.array(held[slot][: -len(new)]), greedy=True)
            wanted = [alone.forward([token]).require_logits()[0] for token in new]
            np.testing.assert_array_equal(found, wanted, f"turn {turn}, sequence {slot}")


@pytest.mark.parametrize("name", FAMILIES)
def test_deterministic_needs_pages(name: str, open_as_cuda: Open) -> None:
    if name in WITH_PAGES:
        assert open_as_cuda(name, deterministic=True).runner.shapes.is_paged(1)
        return
    with pytest.raises(ConfigError, match="--deterministic needs attention over pages"):
        open_as_cuda(name, deterministic=True)
