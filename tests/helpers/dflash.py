"""A DFlash drafter beside a loaded target that computes nothing: tests give it features."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from moegraph.arch import open_model
from moegraph.arch.draftfile import open_drafter
from moegraph.config import EngineConfig
from moegraph.draft.dflash import DFlashDrafter, DSparkDrafter
from moegraph.draft.drafter import Draft
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.memory import place
from moegraph.ggml.ops import F32, Builder
from moegraph.resident.stage import open_stage
from moegraph.runner.inspect import read_tensor

N_ROWS = 128  # of a pass


class FedDrafter:
    """A drafter with features that a test makes up; a context manager."""

    def __init__(
        self, target: Path, path: Path, device: str = "cpu", n_ctx: int = 512, n_seq: int = 1,
        **settings: Any,
    ) -> None:  # fmt: skip
        with ExitStack() as stack:
            own = stack.enter_context
            self.model = own(closing(open_model(target)))
            self.file = own(closing(open_drafter(path)))
            self.file.require_target(self.model)
            hp = self.model.hparams
            config = EngineConfig(device=device, n_threads=1, n_ctx=n_ctx, n_seq=n_seq).validate()
            slots = [hp.n_expert] * hp.n_layer
            layers = range(hp.n_layer)
            opened = Device(device, 1)
            self.stage = own(closing(open_stage(opened, self.model, layers, slots, config, n_ctx)))
            self.stage.hidden_states.reserve(self.file.hparams.target_layers, N_ROWS, n_seq)
            kind = DSparkDrafter if self.file.hparams.markov_rank else DFlashDrafter
            self.drafter = own(closing(kind(self.stage, self.file, n_ctx, **settings)))
            self.drafter.reserve()
            self._opened = stack.pop_all()

    def __enter__(self) -> FedDrafter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._opened.close()

    def _of(self, features: np.ndarray, il: int) -> np.ndarray:
        k, n = self.file.hparams.target_layers.index(il), self.file.hparams.n_embd
        return np.ascontiguousarray(features[:, k * n : (k + 1) * n], np.float32)

    def take(self, features: np.ndarray, slot: int = 0) -> None:
        """Have a sequence take tokens with features [n, n_layers * n_embd], as passes do."""
        states = self.stage.hidden_states
        for at in range(0, len(features), N_ROWS):
            part, first = features[at : at + N_ROWS], self.drafter._rings.spans[slot].n_past
            with Context(8) as context:
                ring = states._ring(Builder(context, 8))
                memory = read_tensor(ring).copy()
                for k, il in enumerate(states.layers):
                    memory[k, states.ring_rows(slot, first, len(part))] = self._of(part, il)
                C.ggml_backend_tensor_set(ring, ffi.from_buffer(memory), 0, memory.nbytes)
            self.drafter.committed([(slot, first, [0] * len(part))])
            self.stage.device.synchronize()

    def read(self, features: np.ndarray, slot: int = 0) -> None:
        """Have a sequence take them as a prompt."""
        first, n = self.drafter._rings.spans[slot].n_past, len(features)
        readers = self.drafter.prompt_readers(slot, np.zeros(n, np.int32), first)
        size = 4 * self.file.hparams.n_embd * n
        with Context(1) as context, closing(self.stage.device.buffer(size, "a test", "")) as memory:
            hidden = C.ggml_new_tensor_2d(context.ptr, F32, self.file.hparams.n_embd, n)
            place(memory, hidden, 0)
            for il in sorted(readers):
                data = self._of(features, il)
                C.ggml_backend_tensor_set(hidden, ffi.from_buffer(data), 0, data.nbytes)
                readers[il](hidden, 0, n, first)
                self.stage.device.synchronize()
            self.drafter.graphs.clear()  # they have the address of this memory

    def draft(self, anchor: int, n_top: int, n: int = 99, slot: int = 0) -> Draft:
        """Return a draft."""
        return self.drafter.draft(slot, anchor, n, n_top)


def random_features(n: int, n_layers: int, n_embd: int, seed: int = 0) -> np.ndarray:
    """Return features of n positions, F32 numpy [n, n_layers * n_embd]."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, n_layers * n_embd), dtype=np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log probabilities of rows of logits, F64."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def nmse(log_p: np.ndarray, wanted: np.ndarray, tokens: np.ndarray) -> float:
    """Return the squared error of a draft's log probabilities relative to those wanted."""
    there = np.take_along_axis(wanted, tokens.astype(np.int64), 1)
    return float(((log_p - there) ** 2).sum() / (there**2).sum())
