"""A model in several stages: passes go from one to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import Any

import numpy as np

from moegraph.arch import ModelFile
from moegraph.config import EngineConfig
from moegraph.engine.loader import open_runners
from moegraph.ggml.device import Device
from moegraph.kinds import Kind
from moegraph.resident.kvpool import PoolShape
from moegraph.resident.sequences import Sequences
from moegraph.resident.stage import Stage, open_stage
from moegraph.runner import Batch, Output, reserve_graphs
from moegraph.runner.inspect import read_tensor

from .tree_shapes import TREES, path

N_CTX, N_SEQ = 512, 3
# A quarter of the experts have a slot.
PARTIAL = {"policy": "lru"}
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "quantized": {"type_k": "q8_0", "type_v": "q4_0"},
    "layered": {"mode": "layered"},
    "stream": {**PARTIAL, "miss": "stream", "host_pin": "none"},
    "cpu": {**PARTIAL, "miss": "cpu"},
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


def new_stage(
    file: ModelFile, layers: range, config: EngineConfig, sequences: Sequences | None = None
) -> Stage:
    """Open a stage on a device of its own."""
    device = Device(config.device, config.n_threads)
    n_slots = slots_of(file, config)
    return open_stage(device, file, layers, n_slots, config, N_CTX, sequences=sequences)


class Stages:
    """A model in several stages, with sequences of its own.

    runner: runs passes over all stages. runners: of the stages, in order of layers.
    """

    def __init__(
        self, file: ModelFile, cuts: Sequence[int], config: EngineConfig, stack: ExitStack
    ) -> None:
        ends = [0, *cuts, file.hparams.n_layer]
        self.sequences = Sequences(PoolShape.of(config, N_CTX))
        ranges = [range(first, stop) for first, stop in zip(ends, ends[1:])]
        stages = [
            stack.enter_context(closing(new_stage(file, layers, config, self.sequences)))
            for layers in ranges
        ]
        stack.callback(self.sequences.close)
        self.runner = open_runners(stages, [0] * len(stages), stack, config)
        self.runners = self.runner.parts
        reserve_graphs(self.runners)

    def run(self, batch: Batch) -> Output:
        """Run a pass through all stages."""
        self.runner.submit(batch)
        return self.runner.collect()

    def states(self) -> dict[tuple[str, int], np.ndarray]:
        """Copy recurrent states and caches, by kind and layer."""
        found = {
            (kind, il): read_tensor(tensor)
            for kind in ("k", "v")
            for state in self.sequences.states
            for il, tensor in getattr(state, kind).items()
        }
        for il, tensors in chain(*(state.layer_states.items() for state in self.sequences.states)):
            found |= {(f"state {i}", il): read_tensor(t) for i, t in enumerate(tensors)}
        return found


def batch_of(kind: str) -> Batch:
    """Return a pass of sequence 0: 'prefill', 'decode' or 'verify'."""
    tokens = np.arange(4, dtype=np.int32)[None, :]
    if kind == "prefill":
        return Batch(tokens, (0,), Kind.PREFILL)
    if kind == "decode":
        return Batch(tokens[:, :1], (0,))
    return Batch.verify(tokens, (0,), [[-1, 0, 1, 1]], [4])


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
