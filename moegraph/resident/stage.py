"""A stage: everything that lives on one device for a range of layers, opened and closed as one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from ..arch import ModelFile
from ..arch.base import Architecture
from ..config import EngineConfig
from ..errors import ConfigError, InternalError
from ..events import Progress, Stopwatch
from ..ggml.device import Device
from ..ggml.handles import closed_on_failure
from ..ggml.lib import C
from ..ggml.memory import Block
from .bank import ExpertBanks
from .kvpool import PoolShape
from .sequences import Sequences
from .state import HiddenStates, State
from .store import ExpertStore
from .weights import Loader, Weights


@dataclass(frozen=True, eq=False)
class Stage:
    """Consecutive layers of a model on one device; a model on one device is one stage.

    The stage with the first layer has the token embedding, the one with the last layer the head.
    Every part has the layers of the stage alone, by their numbers in the model.

    hp: of the whole model. state: of its layers. sequences: of the whole model, which all stages
    share. hidden_states: kept for a drafter. store: the experts of the layers that are not full,
    in host memory. mapped_bytes: tensors that passes read where the file is mapped.
    """

    device: Device
    hp: Architecture
    layers: range
    weights: Weights
    banks: ExpertBanks
    state: State
    sequences: Sequences
    hidden_states: HiddenStates
    store: ExpertStore
    mapped_bytes: int
    _opened: ExitStack = field(repr=False)

    @property
    def has_embedding(self) -> bool:
        """Whether passes begin here, with token ids."""
        return self.weights.embedding is not None

    @property
    def has_head(self) -> bool:
        """Whether passes end here, with logits."""
        return self.weights.head is not None

    @property
    def is_full(self) -> bool:
        """Whether all layers are full, so that no expert can be missing."""
        return not self.store.layers

    @property
    def n_slots(self) -> list[int]:
        """Expert slots of each layer of the model; another stage's layers count as full."""
        mine, n_expert = self.banks.n_slots, self.hp.n_expert
        return [mine.get(il, n_expert) for il in range(self.hp.n_layer)]

    def close(self) -> None:
        """Free everything and close the device; a second call does nothing."""
        self._opened.close()


def open_stage(
    device: Device, file: ModelFile, layers: range, n_slots: Sequence[int], config: EngineConfig,
    n_ctx: int, progress: Progress | None = None, times: Stopwatch | None = None,
    has_mtp: bool = False, sequences: Sequences | None = None,
    host_mem: tuple[int | None, float] = (None, 1.0),
) -> Stage:  # fmt: skip
    """Load consecutive layers of a model onto a device, which the stage closes.

    If this fails, all that was opened is closed, and the device too. Slots of layers that are not
    full are empty.

    n_slots [n_layer]: expert slots of each layer of the model; the other layers' do not matter.
    config: its n_seq, n_kv, n_draft, type_k, type_v and host_pin count. n_ctx: positions of a
    sequence. progress: see `Loader`. times: measures the
    phases. has_mtp: make room in the state for the MTP block (mtp.py), which follows these layers.
    sequences: what the stages before have; None for the first stage. host_mem: see `ExpertStore`.
    """
    hp, times = file.hparams, times or Stopwatch()
    with closed_on_failure(), ExitStack() as stack:
        own = stack.enter_context
        own(closing(device))
        if not layers or layers.step != 1 or not 0 <= layers.start < layers.stop <= hp.n_layer:
            raise InternalError(f"a stage of {layers} in a model of {hp.n_layer} layers")
        partial = [il for il in layers if n_slots[il] < hp.n_expert]
        if partial and not device.can.host_access:
            raise ConfigError(
                f"{device.name} must hold all experts of its layers {layers.start} to "
                f"{layers.stop - 1}; give it fewer layers"
            )
        with closing(Loader(device, file, progress)) as loader:
            weights = own(closing(Weights(loader, file, layers)))
            times.lap("weights")
            banks = ExpertBanks(device, loader, file, layers, n_slots)
            own(closing(banks))
        times.lap("banks")
        cached = range(layers.start, layers.stop + has_mtp)
        if sequences is None:
            sequences = own(closing(Sequences(PoolShape.of(config, n_ctx))))
        state = own(closing(State(device, hp, cached, sequences, config.type_k, config.type_v)))
        sequences.add(state)
        times.lap("state")
        hidden_states = own(closing(HiddenStates(device, hp)))
        store = own(closing(ExpertStore(
            device, file, partial, config.host_pin, loader.report, n_slots, *host_mem
        )))  # fmt: skip
        if partial:
            times.lap("host")
        in_place = loader.in_place | store.in_place
        if weights.embedding:
            in_place |= {weights.embedding.name}
        mapped = sum(file.tensors[name].nbytes for name in in_place)
        parts = weights, banks, state, sequences, hidden_states, store
        return Stage(device, hp, layers, *parts, mapped, stack.pop_all())


_BYTES = 64 << 20
_N_COPIES = 8
# The first measurement is slow, and another program may disturb any.
_N_TIMES = 4


def measure_rates(device: Device) -> tuple[float, float]:
    """Return bytes a second out of a device's memory, and from pinned host memory to it.

    It takes some hundredths of a second. The second is infinite for a device on another machine:
    it has all experts of its layers, so no pass waits for any.
    """
    shapes, what = {"words": (_BYTES // 4, 1)}, "measuring its speed"
    with (
        closing(Block(device, shapes, what, "free some of it")) as block,
        closing(device.host_buffer(_BYTES // 2)) as host,
    ):
        words = block.tensors["words"]
        stream, half = device.compute.ptr, _BYTES // 2

        def least(n: int, copy: Callable[..., object], *args: object) -> float:
            times = []
            for _ in range(_N_TIMES):
                device.synchronize()
                start = time.perf_counter()
                for _ in range(n):
                    copy(stream, *args)
                device.synchronize()
                times.append(time.perf_counter() - start)
            return min(times)

        took_s = least(_N_COPIES, C.mg_copy_bytes, words, 0, words, half, half)
        inside = 2 * _N_COPIES * half / took_s  # a copy reads and writes
        if not device.can.host_access:
            return inside, math.inf
        upload = C.ggml_backend_tensor_set_async
        return inside, 2 * half / least(2, upload, words, host.address(), 0, half)
