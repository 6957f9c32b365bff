"""A model with its MTP block, without an engine around it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moegraph.config import EngineConfig

if TYPE_CHECKING:  # they need the native libraries
    from typing_extensions import Self

    from moegraph.runner import Output
    from moegraph.runner.sweep_batch import SweepBatch

Ids = npt.NDArray[np.int32]


class MtpModel:
    """A model on the CPU, all experts resident, and a drafter with its MTP block; closes all."""

    def __init__(
        self, path: Path, max_rows: int = 64, n_ctx: int = 512, n_vocab: int = 0,
        n_kept: int | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        """n_vocab, n_kept: see `open_mtp`. settings: as in `EngineConfig`."""
        from moegraph.arch import open_model
        from moegraph.draft.mtp import MtpDrafter
        from moegraph.engine.loader import open_runner
        from moegraph.ggml.device import Device
        from moegraph.resident.mtp import open_mtp
        from moegraph.resident.stage import open_stage

        chosen = {"device": "cpu", "n_threads": 1, "n_ubatch": 64, "n_ctx": n_ctx, **settings}
        config = EngineConfig(**chosen).validate()
        with ExitStack() as stack:
            own = stack.enter_context
            self.file = file = own(closing(open_model(path)))
            self.hp = hp = file.hparams
            device = Device(config.device, config.n_threads, config.cpu_reference)
            slots = [hp.n_expert] * hp.n_layer
            layers = range(hp.n_layer)
            stage = open_stage(device, file, layers, slots, config, n_ctx, has_mtp=True)
            self.stage = own(closing(stage))
            stage.hidden_states.reserve((hp.n_layer - 1,), 32, config.n_seq)
            self.runner = own(closing(open_runner(stage, config)))
            self.block = own(closing(open_mtp(stage, file, n_vocab, n_kept)))
            self.drafter = own(closing(MtpDrafter(self.block, max_rows)))
            self.state = stage.sequences
            self._opened = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def read(self, ids: Sequence[int] | Ids, slot: int = 0, **batch: Any) -> Output:
        """Compute a prompt that continues a sequence, the block's part too."""
        from moegraph.runner.sweep_batch import SweepBatch

        tokens = np.asarray(ids, dtype=np.int32)
        readers = self.drafter.prompt_readers(slot, tokens, self.state.n_past[slot])
        return self.sweep(SweepBatch(tokens, slot, readers=readers, **batch))

    def sweep(self, batch: SweepBatch) -> Output:
        """Compute a prompt."""
        from moegraph.runner.sweep import Sweep

        sweep = Sweep([self.runner.sweeps], [batch])
        sweep.begin()
        while sweep.step():
            pass
        self.saved = sweep.prompts[0].saved
        assert sweep.prompts[0].output
        return sweep.prompts[0].output

    def decode(self, token: int, slot: int = 0) -> Output:
        """Run a row and tell the drafter."""
        from moegraph.runner import Batch

        self.runner.submit(Batch(np.array([[token]], dtype=np.int32), (slot,)))
        output = self.runner.collect()
        self.drafter.committed([(slot, self.state.n_past[slot] - 1, [token])])
        return output

    def cache(self, slot: int = 0) -> list[npt.NDArray[Any]]:
        """Return the block's K and V rows of the positions of a sequence, and its last output."""
        from moegraph.runner.inspect import read_tensor

        self.stage.device.synchronize()  # what the drafter was told last may be under way
        state, il = self.stage.state, self.hp.n_layer
        assert state.last_out is not None
        rows = state.pool.rows(np.array(slot), np.arange(state.n_past[slot]))
        found = [read_tensor(t)[rows].copy() for t in (state.k[il], state.v[il])]
        return [*found, read_tensor(state.last_out)[slot].copy()]

    def logits(self, n: int) -> npt.NDArray[np.float32]:
        """Return the logits of the steps of the last draft, numpy shape [n, n_vocab]."""
        from moegraph.runner.inspect import read_tensor

        rows: npt.NDArray[np.float32] = read_tensor(self.drafter.memory.logits)[:n].copy()
        return rows
