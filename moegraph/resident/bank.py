"""Banks: expert slots on the device, as two or three tensors, and the table that finds them.

A graph names slots, not experts: it looks up the slots of a row's experts in a layer's table on the
device, I32 [1, n_expert], which maps an expert to its slot, or to -1 if it has none.

Each layer has a bank of its own, with slots for some or all of its experts. Layers whose stacks
have the same types and shapes share two staging banks, for experts that get no slot.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..arch import ModelFile
from ..errors import InternalError
from ..ggml.device import Device
from ..ggml.handles import Buffer, Context, Owner
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F32, I32, Tensor
from ..gguf import TensorInfo
from ..kinds import MAX_FETCH_IDS, MAX_FETCH_ROWS
from ..units import round_up
from .layout import N_STAGING, Packing, expert_tensors, group_bytes, stack_kind
from .store import ExpertStore, raw_rows
from .weights import Loader

_REMEDY = "lower --cache-slots or --vram, choose a smaller quantization, or use --device cpu"


@dataclass(frozen=True)
class Bank:
    """Slots of one or more layers.

    parts: gate, up [n_embd, n_ff_exp, n_slots] or gate_up [n_embd, 2 n_ff_exp, n_slots] (gate
    first), and down [n_ff_exp, n_embd, n_slots], and their biases F32 [n, 1, n_slots], gate_bias
    and so on, if there are any; empty if n_slots is 0. memory: all slots as one
    tensor, a packed expert every packing.stride bytes; None for a full layer or without slots.
    rows: the same memory as F32 [bytes / 4, n_slots], for a bank that graphs may fetch into.
    """

    n_slots: int
    parts: dict[str, Tensor] = field(default_factory=dict)
    memory: Tensor | None = None
    rows: Tensor | None = None

    @property
    def to_fill(self) -> Tensor:
        """The memory of a bank that experts can be uploaded to."""
        if self.memory is None:
            raise InternalError("an expert was uploaded to a bank of a full layer or without slots")
        return self.memory


class ExpertBanks(Owner):
    """The banks of some layers and their tables.

    n_slots: slots of each of these layers; a full layer's are loaded from the model file. A dense
    layer counts as full.
    n_victims: how many victims a list has room for.
    tables: I32 [1, n_expert] of each layer. victim_lists: I32 [2, n_victims] of each layer,
    after its table in memory: slots that may be evicted, and the expert in each, or -1. all_tables:
    the memory of all tables and victim lists as one I32 tensor, layers `table_stride` numbers
    apart.
    """

    def __init__(
        self, device: Device, loader: Loader, model: ModelFile, layers: range,
        n_slots: Sequence[int], has_staging: bool = True,
    ) -> None:  # fmt: skip
        """Load these layers; n_slots [n_layer] counts all layers of the model.

        has_staging: missing experts may go through staging.
        """
        hp = model.hparams
        self.n_victims = min(MAX_FETCH_ROWS * hp.n_expert_used, MAX_FETCH_IDS, hp.n_expert)
        self.n_slots = {il: n_slots[il] for il in layers}
        self.n_bytes = 0
        self._staging: dict[Hashable, list[Bank]] = {}
        self._banks = {il: self._bank(device, loader, model, il) for il in layers}
        self._staging_of = {
            il: self._staging_banks(device, model, il)
            for il, n in self.n_slots.items()
            if has_staging and n < hp.n_expert
        }
        context = self.own(Context(2 * len(layers) + 1))
        self.tables, self.victim_lists = (
            {il: C.ggml_new_tensor_2d(context.ptr, I32, *ne) for il in layers}
            for ne in ((1, hp.n_expert), (2, self.n_victims))
        )
        stride = round_up(4 * (hp.n_expert + 2 * self.n_victims), device.alignment)
        self.table_stride = stride // 4
        tables = self._buffer(device, stride * len(layers), "the expert tables")
        self.all_tables = C.ggml_new_tensor_1d(context.ptr, I32, stride * len(layers) // 4)
        place(tables, self.all_tables, 0)
        identity = np.arange(hp.n_expert, dtype=np.int32)
        for at, il in enumerate(layers):
            row = self.tables[il]
            place(tables, row, at * stride)
            place(tables, self.victim_lists[il], at * stride + identity.nbytes)
            C.ggml_backend_tensor_set(row, ffi.from_buffer(identity), 0, identity.nbytes)

    def _buffer(self, device: Device, size: int, what: str) -> Buffer:
        """Allocate memory that no kernel writes, which usage WEIGHTS says."""
        buffer = self.own(device.buffer(size, what, _REMEDY))
        C.ggml_backend_buffer_set_usage(buffer.ptr, C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        self.n_bytes += buffer.size
        return buffer

    def _bank(self, device: Device, loader: Loader, model: ModelFile, il: int) -> Bank:
        infos, n_slots = expert_tensors(model, il), self.n_slots[il]
        if n_slots == 0 or not infos:
            return Bank(0)
        if n_slots == model.hparams.n_expert:
            tensors = self.own(loader.load(infos.values(), f"the experts of layer {il}"))
            self.n_bytes += tensors.n_bytes
            return Bank(n_slots, {part: tensors.tensors[i.name] for part, i in infos.items()})
        return self._slots(device, infos, n_slots, f"{n_slots} expert slots of layer {il}")

    def _slots(self, device: Device, infos: dict[str, TensorInfo], n_slots: int, what: str) -> Bank:
        """Allocate a bank of empty slots."""
        # kernels may read past the last expert, up to the padding of a row
        buffer = self._buffer(device, Packing.of(infos).stride * n_slots + TAIL, what)
        context = self.own(Context(len(infos) + 2))
        # The buffer is marked as weights although slots change. Our CUDA kernels assume that
        # weights are constant (moegraph_is_constant, moegraph_moe_is_constant in native/), so they
        # may load them before the preceding kernel has ended. Every write to a slot must therefore
        # end before a kernel that reads the slot may start:
        # - an upload ends before an event that the compute stream waits for between two graphs;
        # - the look-up of slots that fetches lets the next kernel start early only if
        #   no expert is missing, and the gate-and-up kernel waits for the look-up before it lets
        #   the kernel of the down product start. Where gate and up fetch, the kernel of the down
        #   product waits for their end before it reads an expert that was fetched.
        # A new kernel between the look-up, gate and up, and down must keep this order. The test is
        # tests/cuda/test_engine_cuda.py::test_graphs_that_fetch_by_themselves_equal_whole.
        # kernels may read past the last row they need, so an empty slot must hold zeros
        C.ggml_backend_buffer_clear(buffer.ptr, 0)
        return _bank_at(context, buffer, infos, n_slots)

    def _staging_banks(self, device: Device, model: ModelFile, il: int) -> list[Bank]:
        infos = expert_tensors(model, il)
        kind = stack_kind(infos)
        if kind not in self._staging:
            self._staging[kind] = [
                self._slots(device, infos, N_STAGING, "staging slots") for _ in range(2)
            ]
        return self._staging[kind]

    def layer(self, il: int) -> Bank:
        """Return the bank of layer il."""
        return self._banks[il]

    def staging(self, il: int, turn: int) -> Bank:
        """Return one of the two staging banks that fit layer il."""
        return self._staging_of[il][turn]


def _bank_at(
    context: Context, buffer: Buffer, infos: dict[str, TensorInfo], n_slots: int, start: int = 0
) -> Bank:
    """Return a bank of n_slots packed experts with stacks like `infos`, from a byte of a buffer."""
    packing, parts = Packing.of(infos), dict[str, Tensor]()
    for part, info in infos.items():
        parts[part] = strided_stack(context, info, n_slots, packing.stride)
        place(buffer, parts[part], start + packing.offsets[part])
    memory = C.ggml_new_tensor_1d(context.ptr, F32, n_slots * packing.stride // 4)
    rows = raw_rows(context, packing, n_slots)
    place(buffer, memory, start)
    place(buffer, rows, start)
    return Bank(n_slots, parts, memory, rows)


def strided_stack(context: Context, info: TensorInfo, n_slots: int, stride: int) -> Tensor:
    """Make a stack [ne0, ne1, n_slots] of matrices like info's, `stride` bytes apart."""
    tensor = C.ggml_new_tensor_3d(context.ptr, int(info.type), info.ne[0], info.ne[1], n_slots)
    tensor.nb[2] = stride
    tensor.nb[3] = stride * n_slots
    return tensor


# Bytes; the padding of a row is smaller in every block format.
TAIL = 4096


class Ring(Owner):
    """n_groups groups of n_each slots, in memory that layers of all kinds share.

    A group holds experts of one layer at a time. Its bytes are the same for every kind of layer, so
    that groups of two layers can be filled at once. A graph over a group sees no other slots: CUDA
    divides the work of a product among all slots that it sees, also those that no row chose.
    """

    def __init__(self, device: Device, store: ExpertStore, n_groups: int, n_each: int) -> None:
        """store: holds the experts that may be missing."""
        self.n_groups, self.n_each = n_groups, n_each
        kinds: dict[Hashable, dict[str, TensorInfo]] = {}
        self._kind_of: dict[int, Hashable] = {}
        for il in store.layers:
            infos = store.infos(il)
            self._kind_of[il] = stack_kind(infos)
            kinds[self._kind_of[il]] = infos
        packings = {kind: Packing.of(infos) for kind, infos in kinds.items()}
        self._step = group_bytes([packing.stride for packing in packings.values()], n_each)
        self.n_bytes = self._step * n_groups + TAIL
        what, remedy = "the ring of prompts", "lower --vram or -ub"
        buffer = self.own(device.buffer(self.n_bytes, what, remedy))
        C.ggml_backend_buffer_set_usage(buffer.ptr, C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        # kernels may read past the last row that they need
        C.ggml_backend_buffer_clear(buffer.ptr, 0)
        context = self.own(Context(8 * n_groups * len(kinds)))
        self._banks: dict[Hashable, list[Bank]] = {}
        for kind, infos in kinds.items():
            stride = packings[kind].stride
            starts = [-(-group * self._step // stride) * stride for group in range(n_groups)]
            self._banks[kind] = [_bank_at(context, buffer, infos, n_each, at) for at in starts]

    def kind(self, il: int) -> Hashable:
        """Return what layers must have in common to be read by the same graphs."""
        return self._kind_of[il]

    def bank(self, il: int, group: int) -> Bank:
        """Return the slots of a group, as layer il uses them."""
        return self._banks[self._kind_of[il]][group]
