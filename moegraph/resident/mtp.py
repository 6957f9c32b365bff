"""The prediction (MTP) block of a model: one more layer, which drafts tokens.

It is a stage of one layer, layer n_layer, on the device of the model. Its K and V belong to the
state of the model and are in the same pages, so they go where those of the other layers go.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..arch import ModelFile
from ..arch.mtp import require_nextn
from ..errors import ConfigError, InternalError, NativeError
from ..ggml.device import Device
from ..ggml.free_memory import host_memory
from ..ggml.handles import Context, Owner, closed_on_failure
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import Tensor
from ..gguf import TensorInfo
from ..gguf.vocab import frequent_ids
from ..units import round_up
from .bank import ExpertBanks
from .draftweights import DraftHead
from .layout import NEXTN_EMBD, draft_vocab, mtp_output
from .stage import Stage
from .store import ExpertStore, shortage
from .weights import PIECE_BYTES, HeadWeights, LayerWeights, Loader, Readers, Weights, new_tensor

# A count counts half after about so many drafts.
_HALF_LIFE = 200
# How much more often an expert must be chosen than the one whose slot it takes.
_MARGIN = 2.0


class BlockExperts(Owner):
    """The slots of layer il of a bank, of which the last n_expert_used are for fetched experts.

    The others keep the experts that drafts choose most often. Each step of a chain fetches what it
    lacks from pinned memory, and forgets it. So no graph depends on what an earlier step fetched,
    and the host changes what is kept only between drafts.

    source: all packed experts, F32 [bytes / 4, n_expert], in pinned memory. n_kept: experts that
    have slots. n_exchanged: how often one took the slot of another.
    """

    def __init__(
        self, device: Device, banks: ExpertBanks, store: ExpertStore, il: int, n_expert_used: int
    ) -> None:
        """Fill the slots that keep experts with the first ones."""
        self._device, self._banks, self._store, self._il = device, banks, store, il
        self.source: Tensor = store.rows[il]
        n_expert, n_slots = int(self.source.ne[1]), banks.n_slots[il]
        self.n_kept, self.n_exchanged = n_slots - n_expert_used, 0
        if not 0 <= self.n_kept < n_expert:
            raise InternalError(f"{n_slots} slots for {n_expert} experts, {n_expert_used} of a row")
        self._owner = np.arange(self.n_kept)  # slot -> expert
        self._counts = np.zeros(n_expert)
        self._host = self.own(device.host_buffer(4 * n_expert))
        self._table: npt.NDArray[np.int32] = self._host.array[: 4 * n_expert].view(np.int32)
        self._table[:] = -1
        self._table[: self.n_kept] = self._owner
        for slot in range(self.n_kept):
            self._upload(slot, slot)
        self._send_table()
        lists = np.full((banks.n_victims, 2), -1, dtype=np.int32)
        lists[:n_expert_used, 0] = np.arange(self.n_kept, n_slots)
        device.synchronize()
        C.ggml_backend_tensor_set(banks.victim_lists[il], ffi.from_buffer(lists), 0, lists.nbytes)

    def _upload(self, expert: int, slot: int) -> None:
        """Enqueue the copy of an expert to a slot, after the graphs that read the slot."""
        packing, memory = self._store.packing(self._il), self._banks.layer(self._il).to_fill
        source = self._store.pinned(self._il) + expert * packing.stride
        stream, at = self._device.compute.ptr, slot * packing.stride
        C.ggml_backend_tensor_set_async(stream, memory, source, at, packing.n_bytes)

    def _send_table(self) -> None:
        self._device.send(self._banks.tables[self._il], self._host, 0, self._table.nbytes)

    def note(self, ids: npt.NDArray[np.int32]) -> None:
        """Count what a draft chose, and enqueue an exchange of two experts if it is worth it.

        ids: I32 numpy, of all steps. The device is idle.
        """
        self._counts *= 0.5 ** (1 / _HALF_LIFE)
        np.add.at(self._counts, ids.reshape(-1), 1.0)
        if not self.n_kept:
            return
        absent = np.where(self._table < 0, self._counts, -1.0)
        expert, slot = int(absent.argmax()), int(self._counts[self._owner].argmin())
        if absent[expert] < self._counts[self._owner[slot]] + _MARGIN:
            return
        self._table[self._owner[slot]], self._table[expert] = -1, slot
        self._owner[slot] = expert
        self.n_exchanged += 1
        self._upload(expert, slot)
        self._send_table()


# Bytes; tensors begin at a multiple.
_ALIGN = 128


def _embeddings(
    owner: Owner, device: Device, loader: Loader, model: ModelFile, info: TensorInfo
) -> Tensor:
    """Return the embeddings of all tokens, as in the file, where graphs can read rows of them.

    The CPU reads them in the mapped file, CUDA in pinned host memory: a step reads one row, so the
    table (1 GB in F16 for the 35B) is not worth device memory. owner: of the memory.
    """
    if not device.can.host_access:
        raise ConfigError(
            f"the MTP block drafts where the last layer is, and {device.name} cannot read "
            "embeddings in host memory; name a device of this machine last, or draft otherwise"
        )
    if not device.can.own_memory:
        return owner.own(loader.load([info], "the embeddings")).tensors[info.name]
    # the row before the first one is read too: on CUDA, the argmax of NaN is -1
    start = round_up(info.nbytes // info.ne[1], _ALIGN)
    short = shortage(start + info.nbytes, host_memory().available)
    if short:
        raise NativeError(f"drafts need the embeddings in pinned memory, {short}")
    memory = owner.own(device.host_buffer(start + info.nbytes, must_pin=True))
    memory.array[:start] = 0
    tensor = new_tensor(owner.own(Context(1)), info.name, info)
    place(memory, tensor, start)
    out = memory.array[start : start + info.nbytes]
    with closing(Readers(model)) as readers:
        starts = range(0, info.nbytes, PIECE_BYTES)
        reads = [readers.read(info, out[at : at + PIECE_BYTES], at) for at in starts]
        for read in reads:
            read.result()
    return tensor


@dataclass(frozen=True, eq=False)
class MtpBlock:
    """What drafts with the MTP block of a model.

    stage: the block as a stage of layer n_layer alone; the rest of it is the model's.
    experts: which of them are on the device; None if all are. embeddings: of the tokens. head: the
    norm after the block, and the output matrix. part: which tokens that is for, or None for all.
    output_norm: of the model, F32 [n_embd]: the block takes the model's output after it.
    """

    stage: Stage
    experts: BlockExperts | None
    embeddings: Tensor
    head: HeadWeights
    part: DraftHead | None
    output_norm: Tensor
    _opened: ExitStack = field(repr=False)

    @property
    def weights(self) -> LayerWeights:
        """The tensors of the block by their name after `blk.N.`."""
        return self.stage.weights.layer(self.stage.layers.start)

    @property
    def n_bytes(self) -> int:
        """Device memory of the weights."""
        part = self.part.n_bytes if self.part else 0
        return self.stage.weights.n_bytes + self.stage.banks.n_bytes + part

    def close(self) -> None:
        """Free the weights; the model's device and state stay open."""
        self._opened.close()


def open_mtp(
    stage: Stage, file: ModelFile, n_vocab: int = 0, n_kept: int | None = None
) -> MtpBlock:
    """Load the MTP block of a model onto the device of the stage with all its other layers.

    n_vocab: draft only so many tokens, the most frequent ones; 0: all. n_kept: how many experts
    stay on the device, the others being fetched from pinned memory; None: all.
    """
    hp, device, head = file.hparams, stage.device, stage.weights.head
    require_nextn(file.path, hp, file.tensors)
    il = hp.n_layer
    if head is None or il not in stage.state.k:
        raise InternalError(f"the stage of {stage.layers} was not opened for an MTP block")
    layers = range(il, il + 1)
    with closed_on_failure(), ExitStack() as stack:
        own = stack.enter_context
        with closing(Loader(device, file)) as loader:
            weights = own(closing(Weights(loader, file, layers)))
            n_each = hp.n_expert if n_kept is None else n_kept + hp.n_expert_used
            is_full, n_slots = n_each >= hp.n_expert, [min(n_each, hp.n_expert)] * (il + 1)
            banks = ExpertBanks(device, loader, file, layers, n_slots, has_staging=False)
            own(closing(banks))
            names = f"blk.{il}.{NEXTN_EMBD}", "token_embd.weight"
            info = next(file.tensors[name] for name in names if name in file.tensors)
            table = _embeddings(own(closing(Owner())), device, loader, file, info)
        store = own(closing(ExpertStore(device, file, [] if is_full else [il], "all")))
        experts = None
        if not is_full:
            experts = own(closing(BlockExperts(device, banks, store, il, hp.n_expert_used)))
        mapped = sum(file.tensors[name].nbytes for name in loader.in_place)
        mine = weights, banks, stage.state, stage.sequences, stage.hidden_states, store
        block = Stage(device, hp, layers, *mine, mapped, ExitStack())
        w = weights.layer(il)
        norm = w.get("nextn.shared_head_norm.weight", head.norm)
        output, part = w.get("nextn.shared_head_head.weight", head.output), None
        n_drafted = draft_vocab(hp.n_vocab, n_vocab)
        if n_drafted < hp.n_vocab:
            ids = frequent_ids(file.metadata, hp.n_vocab, n_drafted)
            part = own(closing(DraftHead(device, file, mtp_output(file), ids)))
            output = part.output
        parts = HeadWeights(norm, output), part, head.norm
        return MtpBlock(block, experts, table, *parts, stack.pop_all())
