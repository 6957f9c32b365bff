"""What the sizes of a DFlash drafter follow from; the planner reads it too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..arch.dflash import DFlashHParams
from ..arch.draftfile import DraftFile
from ..errors import UnsupportedModel
from ..gguf.scan import TensorInfo
from ..units import round_up
from .ringshape import RING_PAGE, draft_ring_bytes, ring_shapes

_Q = GGMLQuantizationType
# Bytes; no device aligns tensors to more.
_ALIGN = 128
EMBEDDING = "token_embd.weight"
# Rows of a prompt in one graph.
CHUNK = 512
# Tokens that a sequence took whose K and V one graph makes, at most.
N_TAKEN = 64
# Sequences and rows of a graph that drafts for several sequences, at most.
MOST_JOINT, JOINT_ROWS = 16, 32
# Lengths of drafts that have graphs, where graphs are dear.
_LENGTHS = (3, 7, 11)
# Of inputs of candidates and alignment, for each row of a block, and in all.
_ROW_BYTES, _SMALL = 4096, 16 << 10


def built_length(n: int, most: int) -> int:
    """Return the length of the draft whose graph drafts n tokens, where graphs are dear.

    A block takes nearly the same time for any length, and a device that captures graphs takes long
    for a new one. most: the longest draft.
    """
    return next((at for at in _LENGTHS if n <= at < most), most)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor as it will be on the device: ne, of a type; from column `first` of a file's."""

    name: str
    type: GGMLQuantizationType
    ne: tuple[int, int]
    source: TensorInfo
    first: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.ne[0] // block * size


def plan_tensors(file: DraftFile, as_stored: bool) -> Iterator[PlannedTensor]:
    """Yield what goes to the device; fc is cut into one matrix for each tap."""
    n_embd = file.hparams.n_embd
    has_head = "output.weight" in file.tensors
    for name, info in file.tensors.items():
        if name == "d2t" or (name == EMBEDDING and has_head):
            continue
        n_rows = info.ne[1] * info.ne[2] * info.ne[3]
        if name == "fc.weight":
            kind = _stored(info, n_embd, as_stored)
            for k in range(len(file.hparams.taps)):
                yield PlannedTensor(f"fc.{k}", kind, (n_embd, n_rows), info, k * n_embd)
        else:
            kind = _stored(info, info.ne[0], as_stored)
            yield PlannedTensor(name, kind, (info.ne[0], n_rows), info, 0)


def _stored(info: TensorInfo, n: int, as_stored: bool) -> GGMLQuantizationType:
    """Return the type of rows of n elements on the device."""
    if info.n_dims == 1 or info.ne[1] == 1:
        return _Q.F32
    if n % GGML_QUANT_SIZES[info.type][0]:
        raise UnsupportedModel(f"tensor {info.name}: rows of {info.type.name} cannot be cut at {n}")
    return _Q.Q8_0 if info.type is _Q.BF16 and not as_stored and n % 32 == 0 else info.type


def draft_weight_bytes(file: DraftFile, as_stored: bool = False) -> int:
    """Return the device bytes of a drafter's weights; see `DraftWeights`."""
    planned = plan_tensors(file, as_stored)
    return sum(round_up(p.row_bytes * p.ne[1], _ALIGN) for p in planned)


def dflash_bytes(
    file: DraftFile, n_vocab: int, n_ctx: int, n_seq: int, n_sweep: int, as_stored: bool = False
) -> int:
    """Return a bound on the device bytes of a `DFlashDrafter`; arguments as there.

    n_vocab: tokens of the target. n_ctx: most positions that layers without a window see.
    """
    hp = file.hparams
    parts = draft_ring_bytes(hp, n_ctx, n_seq), _memory_bytes(hp, n_ctx, n_seq, n_sweep)
    graphs = _graph_bytes(hp, n_vocab, n_seq, n_sweep)
    return draft_weight_bytes(file, as_stored) + sum(parts) + graphs


def _memory_bytes(hp: DFlashHParams, n_ctx: int, n_seq: int, n_sweep: int) -> int:
    """Return a bound on what `DraftMemory` takes, and `JointMemory` of several sequences."""
    shapes = ring_shapes(hp, n_ctx)
    masks = 2 * hp.block_size * sum(shape.n_rows for shape in shapes)
    block = hp.block_size * (4 * hp.n_embd + _ROW_BYTES)
    words = 4 * ((2 + len(shapes)) * N_TAKEN + (1 + len(shapes)) * n_sweep)
    rows = 4 * hp.n_embd * n_sweep
    joint = 0
    if n_seq > 1:
        pages = 4 * MOST_JOINT * sum(shape.n_rows // RING_PAGE + 1 for shape in shapes)
        joint = JOINT_ROWS * (4 * hp.n_embd + _ROW_BYTES) + MOST_JOINT * 4 * hp.n_embd + pages
        joint += _SMALL
    return masks + block + words + rows + 4 * hp.n_vocab_draft + joint + _SMALL


def joint_lengths(most: int, n_seqs: int, has_anchor: bool) -> set[int]:
    """Return the lengths of drafts of several sequences that have graphs, where graphs are dear.

    most: the longest draft of one. has_anchor: a block has a row that drafts nothing.
    """
    longest = JOINT_ROWS // n_seqs - has_anchor
    return {min(built_length(n, most), longest) for n in range(1, min(most, longest) + 1)}


def _graph_bytes(hp: DFlashHParams, n_vocab: int, n_seq: int, n_sweep: int) -> int:
    """Return a bound on the intermediates of a drafter's graphs."""
    # of a chunk of a prompt: fused and normed rows, K and V; of a block: its widest layer, logits
    chunk = 4 * min(CHUNK, n_sweep) * (4 * hp.n_embd + 6 * hp.n_embd_gqa)
    widest = 4 * hp.n_embd_head * hp.n_head + 3 * hp.n_ff + 6 * hp.n_embd
    logits = (4 if hp.markov_rank else 2) * (hp.n_vocab_draft or n_vocab)
    n_rows = max(hp.block_size, JOINT_ROWS if n_seq > 1 else 0)
    return max(chunk, 4 * n_rows * (widest + logits))
