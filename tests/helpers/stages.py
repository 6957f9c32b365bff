"""A model in several stages: passes go from one to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from moegraph.config import EngineConfig
from moegraph.engine.loader import open_runner
from moegraph.experts.prefetch import MAX_PREFETCH
from moegraph.ggml.device import Device
from moegraph.ggml.lib import C, ffi
from moegraph.kinds import Kind
from moegraph.modelfile import ModelFile
from moegraph.resident.stage import Stage, open_stage
from moegraph.runner import Batch, LayeredRunner, Output, Runner
from moegraph.runner.inspect import read_tensor

from .tree_shapes import TREES, path

N_CTX, N_SEQ = 512, 3
# A quarter of the experts have a slot.
PARTIAL = {"policy": "lru", "prefetch": "off"}
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "quantized": {"type_k": "q8_0", "type_v": "q4_0"},
    "layered": {"mode": "layered"},
    "stream": {**PARTIAL, "miss": "stream", "host_pin": "none"},
    "cpu": {**PARTIAL, "miss": "cpu"},
    "prefetch": {"policy": "lru", "miss": "stream", "host_pin": "none"},
    "fetch": {**PARTIAL, "miss": "stream", "host_pin": "all"},
}


def new_config(**settings: Any) -> EngineConfig:
    """Return settings, for the CPU if they do not say otherwise."""
    base = {"device": "cpu", "n_threads": 1, "n_ubatch": 32, "n_ctx": N_CTX, "n_seq": N_SEQ}
    return EngineConfig(**{**base, **settings}).validate()


def slots_of(file: ModelFile, config: EngineConfig) -> list[int]:
    """Return all slots, or, where experts may be missing, fewer, with the last layer full."""
    hp = file.hparams
    if config.miss == "auto":
        return [hp.n_expert] * hp.n_layer
    return [hp.n_expert // 4] * (hp.n_layer - 1) + [hp.n_expert]


def new_stage(file: ModelFile, layers: range, config: EngineConfig) -> Stage:
    """Open a stage on a device of its own."""
    device = Device(config.device, config.n_threads)
    n_prefetch_slots = MAX_PREFETCH if config.prefetch == "auto" else 0
    n_slots = slots_of(file, config)
    return open_stage(device, file, layers, n_slots, config, N_CTX, n_prefetch_slots)


class Stages:
    """A model in several stages; passes go from one to the next, with a copy of the rows.

    runners: of the stages, in order of layers.
    """

    def __init__(
        self, file: ModelFile, cuts: Sequence[int], config: EngineConfig, stack: ExitStack
    ) -> None:
        ends = [0, *cuts, file.hparams.n_layer]
        self.runners: list[Runner] = []
        for first, stop in zip(ends, ends[1:]):
            stage = stack.enter_context(closing(new_stage(file, range(first, stop), config)))
            self.runners.append(stack.enter_context(closing(open_runner(stage, config))))
            self.runners[-1].reserve_graphs()
            if isinstance(runner := self.runners[-1], LayeredRunner):
                runner.residency.prefetcher.enabled = True

    def run(self, batch: Batch) -> Output:
        """Run a pass through all stages."""
        before: Runner | None = None
        for runner in self.runners:
            if before:
                copy_rows(before, runner, batch.tokens.size)
            runner.submit(batch)
            output = runner.collect()
            if runner is not self.runners[-1]:
                assert output.argmax is output.logits is None
            before = runner
        return output

    def states(self) -> dict[tuple[str, int], np.ndarray]:
        """Copy recurrent states and caches, by kind and layer."""
        found: dict[tuple[str, int], np.ndarray] = {}
        for runner in self.runners:
            for kind in ("conv", "ssm", "k", "v"):
                tensors = getattr(runner.stage.state, kind)
                found |= {(kind, il): read_tensor(t) for il, t in tensors.items()}
        return found


def copy_rows(source: Runner, to: Runner, n_tokens: int) -> None:
    """Copy the rows that a stage left to where the next one finds them."""
    assert source.hidden and to.hidden
    raw = np.empty(4 * source.stage.hp.n_embd * n_tokens, np.uint8)
    C.ggml_backend_tensor_get(source.hidden.all, ffi.from_buffer(raw), 0, raw.nbytes)
    C.ggml_backend_tensor_set(to.hidden.all, ffi.from_buffer(raw), 0, raw.nbytes)


def batches(n_vocab: int) -> Iterator[tuple[Batch, dict[int, list[int]]]]:
    """Yield passes of all kinds, and the paths to commit after each."""
    rng = np.random.default_rng(5)

    def tokens(*shape: int) -> np.ndarray:
        return rng.integers(0, n_vocab, shape).astype(np.int32)

    for slot, n in enumerate((30, 9, 3)):
        yield Batch(tokens(1, n), (slot,), Kind.PREFILL, all_rows=slot < 2), {}
    for turn in range(5):
        yield Batch(tokens(1, 1), (turn % N_SEQ,), greedy=turn % 2 == 0), {}
        slots = tuple(rng.permutation(N_SEQ)[: 1 + turn % N_SEQ].tolist())
        yield Batch(tokens(len(slots), 1), slots), {}
        parents = [TREES[rng.integers(0, len(TREES))](5, rng) for _ in slots]
        lengths = rng.integers(1, 6, len(slots)).tolist()
        tree = Batch.verify(tokens(len(slots), 5), slots, parents, lengths)
        rows = [path(p, int(rng.integers(0, n))) for p, n in zip(parents, lengths)]
        yield tree, dict(zip(slots, rows))


def assert_same(got: Output, wanted: Output, batch: Batch) -> None:
    """Compare the bits of all results that count."""
    for a, b in ((got.argmax, wanted.argmax), (got.logits, wanted.logits)):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            real = batch.tree.real.reshape(-1) if batch.tree else slice(None)
            np.testing.assert_array_equal(a[real], b[real])
