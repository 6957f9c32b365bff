"""The prediction (MTP) block of a model: one more layer, which drafts tokens.

It is a stage of one layer, layer n_layer, on the device of the model. Its K and V belong to the
state of the model and are in the same pages, so they go where those of the other layers go.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from ..arch import ModelFile
from ..arch.mtp import require_nextn
from ..errors import ConfigError, InternalError, NativeError
from ..ggml.device import Device
from ..ggml.free_memory import host_memory
from ..ggml.handles import Context, closed_on_failure
from ..ggml.memory import place
from ..ggml.ops import Tensor
from ..gguf import TensorInfo
from ..gguf.vocab import frequent_ids
from ..units import round_up
from .bank import ExpertBanks
from .drafthead import DraftHead
from .expertcopies import shortage
from .layout import NEXTN_EMBD, draft_vocab, mtp_output
from .mtpexperts import BlockExperts
from .reading import PIECE_BYTES, Readers
from .stage import Stage
from .store import ExpertStore
from .weights import HeadWeights, LayerWeights, Loader, Weights, new_tensor

# Bytes; tensors begin at a multiple.
_ALIGN = 128


class EmbeddingTable:
    """The embeddings of all tokens, where graphs can read rows of them.

    The CPU reads them in the mapped file, CUDA in pinned host memory: a step reads one row, so the
    table (1 GB in F16 for the 35B) is not worth device memory.

    tensor: [n_embd, n_vocab], in the type of the file. pinned_bytes: host memory taken.
    """

    def __init__(self, device: Device, loader: Loader, model: ModelFile, info: TensorInfo) -> None:
        """Load the table.

        Raises:
            NativeError: there is too little host memory, or it cannot be pinned.
            ModelFileError: the file is shorter than its header says.
            ConfigError: graphs of the device cannot read host memory.
        """
        if not device.can.host_access:
            raise ConfigError(
                f"the MTP block drafts where the last layer is, and {device.name} cannot read "
                "embeddings in host memory; name a device of this machine last, or draft otherwise"
            )
        self._parts: list[Any] = []
        self.pinned_bytes = 0
        if not device.can.own_memory:
            tensors = loader.load([info], "the embeddings")
            self._parts = [tensors]
            self.tensor: Tensor = tensors.tensors[info.name]
            return
        # the row before the first one is read too: on CUDA, the argmax of NaN is -1
        start = round_up(info.nbytes // info.ne[1], _ALIGN)
        short = shortage(start + info.nbytes, host_memory().available)
        if short:
            raise NativeError(f"drafts need the embeddings in pinned memory, {short}")
        memory = device.host_buffer(start + info.nbytes, must_pin=True)
        memory.array[:start] = 0
        context = Context(1)
        self._parts = [memory, context]
        self.pinned_bytes = memory.array.nbytes
        self.tensor = new_tensor(context, info.name, info)
        place(memory, self.tensor, start)
        out = memory.array[start : start + info.nbytes]
        with Readers(model) as readers:
            starts = range(0, info.nbytes, PIECE_BYTES)
            reads = [readers.read(info, out[at : at + PIECE_BYTES], at) for at in starts]
            for read in reads:
                read.result()

    def close(self) -> None:
        """Free the memory."""
        for part in self._parts:
            part.close()


@dataclass(frozen=True, eq=False)
class MtpBlock:
    """What drafts with the MTP block of a model.

    stage: the block as a stage of layer n_layer alone; device, state and taps are the model's.
    experts: which of them are on the device; None if all are. embeddings: of the tokens. head: the
    norm after the block, and the output matrix. part: which tokens that is for, or None for all.
    output_norm: of the model, F32 [n_embd]: the block takes the model's output after it.
    """

    stage: Stage
    experts: BlockExperts | None
    embeddings: EmbeddingTable
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

    Raises:
        InternalError: the stage has no head, or its state no room for the block.
        ModelFileError, UnsupportedModel: the file has no such block, or it is damaged.
        OutOfDeviceMemory: it does not fit.
        NativeError, ConfigError: the memory for embeddings or experts cannot be pinned.
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
            table = own(closing(EmbeddingTable(device, loader, file, info)))
        store = own(closing(ExpertStore(device, file, [] if is_full else [il], "all")))
        experts = None
        if not is_full:
            experts = own(closing(BlockExperts(device, banks, store, il, hp.n_expert_used)))
        mapped = sum(file.tensors[name].nbytes for name in loader.in_place)
        mine = weights, banks, stage.state, stage.sequences, stage.taps, store
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
