"""What the sizes of weights, KV cache and expert slots follow from; the planner reads it too."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES

from ..arch import ModelFile
from ..arch.base import Architecture
from ..gguf import TensorInfo
from ..kinds import MOST_BEHIND
from ..units import round_up

# Rows of a page of the KV caches, and the step in which the KV length of graphs grows, as
# upstream's does: CUDA's attention kernels need a multiple of it.
PAGE = 256
# Zeros that are copied to empty a state; more of them make fewer copies.
_MIN_ZEROS = 1 << 20
PARTS = ("gate", "up", "gate_up", "down")
# Most rows of a pass whose attention reads K and V through lists of pages.
MAX_PAGED_ROWS = 32
# Fewest rows of verify passes that there is room for; more rows double the room until they fit.
_MIN_DRAFT_ROWS = 32
# Of attention over pages: splits of all heads of keys together.
_MOST_SPLITS = 128
# Chunks that a sweep may have beyond the fewest: those beside other requests are short.
MORE_CHUNKS = 512
# Host memory of built graphs, with one sequence.
GRAPH_BYTES = 128 << 20
# Sequences of decode passes on a device with streams; where others end, padding begins. Each number
# has graphs of its own, and to build and record them takes as long as tens of passes.
PADDED_WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
# Device memory that CUDA takes for a captured graph, for each of its nodes, and nodes of a layer:
# 640 KiB for an attention layer over many rows on an H200, less where nodes are fused.
CAPTURED_NODE_BYTES, _LAYER_NODES = 9 << 10, 70
# Host memory of ggml-cuda's record of a node, by which it sees whether a graph has changed.
RECORDED_NODE_BYTES = 1056
# Forms of passes and of chunks whose captured graphs are kept beside those of the usual widths.
_OTHER_FORMS = 6
# Experts uploaded at a time: slots of a staging bank, and blocks of the ring.
N_STAGING = 16
# Where host memory is a cache: bytes of experts that are read from the file at a time, which keep a
# disk busy.
_READ_BYTES = 32 << 20
# Groups of the ring through which prompts send experts, at least: one is computed, one has arrived,
# one is under way, and one is given back.
N_GROUPS = 4
# A graph over experts in the ring computes at most such a share of the choices of a chunk: one part
# in so many. What it needs on the device is then not more than what a chunk needs.
UNIT_SHARE = 2
# Most tokens that the MTP block drafts at once; few drafts are right for so long. And how many are
# usual.
MAX_MTP_DRAFT, USUAL_MTP_DRAFT = 16, 8
# Known rows whose K and V the MTP block computes at a time.
MTP_ROWS = 256
# Tensors of the head, unless the embeddings are its matrix.
HEAD = ("output_norm.weight", "output.weight")
# Embeddings that an MTP block has for itself, after `blk.N.`.
NEXTN_EMBD = "nextn.embed_tokens.weight"
# Of device buffers; CUDA kernels read matrices in pieces of up to 16 bytes.
_PART_ALIGNMENT = 128
# Numbers of a quantized row that CUDA's tiles read at once, at most.
_ROW_PIECE = 512


def graph_bytes(n_seq: int, is_fast: bool) -> int:
    """Return the host memory that built graphs may take.

    Several sequences have passes of several widths, and prompts of several lengths. On a fast
    device, to build the graphs of one again takes as long as ten passes; on the CPU, a part of one.
    """
    if not is_fast:
        return GRAPH_BYTES // 2
    return GRAPH_BYTES if n_seq == 1 else 2 * GRAPH_BYTES


def captured_bytes(n_layer: int, n_widths: int) -> int:
    """Return the device memory to keep for captured graphs; n_widths: usual widths of passes."""
    return (n_widths + _OTHER_FORMS) * n_layer * _LAYER_NODES * CAPTURED_NODE_BYTES


def zeros_bytes(hp: Architecture) -> int:
    """Return the size of the block of zeros that is copied to empty states and KV rows."""
    sizes = (size for il in range(hp.n_layer) for size in hp.layer(il).state_sizes)
    return max(4 * max(sizes, default=0), _MIN_ZEROS)


def draft_room(n_rows: int) -> int:
    """Return for how many rows there is room after a verify pass of n_rows rows."""
    return max(_MIN_DRAFT_ROWS, 1 << (n_rows - 1).bit_length())


def hidden_bytes(n_embd: int, n_layers: int, n_rows: int, n_seq: int = 0) -> int:
    """Return the bytes of `HiddenStates`, with a ring for n_seq sequences if that is not 0."""
    return 4 * n_embd * n_layers * (hidden_room(n_rows) + ring_room(n_rows, n_seq))


def hidden_room(n_rows: int) -> int:
    """Return the rows from one layer of passes of n_rows rows to the next: each is aligned."""
    return round_up(n_rows, _PART_ALIGNMENT // 4)


def ring_room(n_rows: int, n_seq: int) -> int:
    """Return the rows of a layer that a ring keeps: of each sequence what waits, and a pass.

    One more is for padding.
    """
    return n_seq * (MOST_BEHIND + n_rows) + 1 if n_seq else 0


def paged_scratch_bytes(hp: Architecture, n_rows: int) -> int:
    """Return what attention over pages needs beside its result.

    Each row and head has room for a partial sum of each split of its positions, whatever its
    length (native/ggml/src/ggml-cuda/moegraph-attn-plan.cuh).
    """
    n_sums = n_rows * hp.n_head * max(_MOST_SPLITS // hp.n_head_kv, 1)
    return round_up(4 * hp.n_embd_head_k * n_sums, 128) + round_up(8 * n_sums, 128)


def expert_tensors(model: ModelFile, il: int) -> dict[str, TensorInfo]:
    """Return a layer's expert stacks by part: gate, up and down, or gate_up and down.

    Biases, gate_bias and so on, have the shape of matrices [n, 1, n_expert].
    """
    names = {part: f"blk.{il}.ffn_{part}_exps" for part in PARTS}
    found = {part: model.tensors.get(f"{name}.weight") for part, name in names.items()}
    if model.hparams.has_expert_biases:
        for part, name in names.items():
            info = model.tensors.get(f"{name}.bias")
            ne = info and (info.ne[0], 1, info.ne[1], 1)
            found[f"{part}_bias"] = replace(info, ne=ne, n_dims=3) if info and ne else None
    return {part: info for part, info in found.items() if info}


def draft_vocab(n_vocab: int, wanted: int) -> int:
    """Return for how many of n_vocab tokens a draft head is; wanted: 0 for all.

    Rows of logits begin at addresses that kernels read fast.
    """
    return min(round_up(wanted, 64) or n_vocab, n_vocab)


def head_tensor(model: ModelFile) -> TensorInfo:
    """Return the output matrix of a model: its own, or the embeddings."""
    names = "output.weight", "token_embd.weight"
    return next(model.tensors[name] for name in names if name in model.tensors)


def mtp_output(model: ModelFile) -> TensorInfo:
    """Return the output matrix of the MTP block: its own, the model's, or the embeddings."""
    own = f"blk.{model.hparams.n_layer}.nextn.shared_head_head.weight"
    return model.tensors[own] if own in model.tensors else head_tensor(model)


def stack_kind(infos: dict[str, TensorInfo]) -> Hashable:
    """Return parts, types and shapes of stacks; layers where they are equal share staging slots."""
    return tuple((part, info.type, info.ne[:2]) for part, info in infos.items())


@dataclass(frozen=True)
class Packing:
    """Where the parts of one expert are inside a slot, in bytes.

    offsets, sizes: by part. n_bytes: from the start of the first part to the end of the last, with
    what kernels read after it. stride: from slot to slot, a multiple of every part's block size,
    because kernels count strides in blocks.

    CUDA's tiles multiply whole pieces of a row, also where the row ends before: what comes then is
    multiplied by zero. It must be finite, so there are zeros after a part, not the next part,
    whose bytes can mean anything in this part's type.
    """

    offsets: dict[str, int]
    sizes: dict[str, int]
    n_bytes: int
    stride: int

    @classmethod
    def of(cls, infos: dict[str, TensorInfo]) -> Packing:
        """Return the packing of an expert of these stacks."""
        offsets, sizes, end, unit = {}, {}, 0, _PART_ALIGNMENT
        for part, info in infos.items():
            offsets[part] = round_up(end, _PART_ALIGNMENT)
            sizes[part] = info.nbytes // info.ne[2]
            block, block_bytes = GGML_QUANT_SIZES[info.type]
            after = round_up(info.ne[0], _ROW_PIECE) - info.ne[0] if block > 1 else 0
            end = offsets[part] + sizes[part] + after // block * block_bytes
            unit = math.lcm(unit, block_bytes)
        return cls(offsets, sizes, end, round_up(end, unit))

    def clear_gaps(self, rows: npt.NDArray[np.uint8]) -> None:
        """Write zeros wherever there is no part; rows: numpy [..., bytes of a packed expert]."""
        at = 0
        for part, offset in self.offsets.items():
            rows[..., at:offset] = 0
            at = offset + self.sizes[part]
        rows[..., at:] = 0


def group_size(n_expert: int) -> int:
    """Return the slots of a group of the ring, for layers of n_expert experts.

    More of them make fewer graphs, and fewer make the first experts usable earlier and leave memory
    for slots.
    """
    return max(4, min(16, n_expert // 8))


def host_slots(
    room: int | None, sizes: Mapping[int, int], n_slots: Sequence[int], n_expert: int
) -> dict[int, int]:
    """Return how many experts of each layer host memory holds: n_expert if it holds copies of all.

    Else it holds experts that the device has no slots for: in all layers alike, or all of them, and
    copies of whole layers as far as there is room. Graphs can fetch from such layers.

    room: bytes; None without a limit. sizes: bytes of an expert of each layer that is not full.
    n_slots: the device's, by layer.
    """
    if room is None or n_expert * sum(sizes.values()) <= room:
        return dict.fromkeys(sizes, n_expert)
    room -= passing_bytes(sizes.values())
    found = {il: n_expert - max(n_slots[il], 1) for il in sizes}
    spare = room - sum(n * sizes[il] for il, n in found.items())
    if spare < 0:
        each = max(0, room) // sum(sizes.values())
        return {il: min(n, each) for il, n in found.items()}
    for il, n in found.items():
        more = (n_expert - n) * sizes[il]
        if more <= spare:
            found[il], spare = n_expert, spare - more
    return found


def n_at_once(size: int) -> int:
    """Return how many experts of a size move at a time where host memory is a cache."""
    return max(1, min(N_STAGING, _READ_BYTES // size))


def n_passing(size: int) -> int:
    """Return the blocks of host memory through which experts of a size pass.

    Some are read, some wait, some leave for the device, and some come back from it.
    """
    return 4 * n_at_once(size)


def passing_bytes(sizes: Collection[int]) -> int:
    """Return the bytes of all such blocks."""
    return sum(size * n_passing(size) for size in set(sizes))


def ring_bytes(strides: Collection[int], n_each: int) -> int:
    """Return the bytes of the smallest ring, with groups of n_each slots.

    strides: the bytes of a slot, of each kind of layer.
    """
    return N_GROUPS * group_bytes(strides, n_each)


def group_bytes(strides: Collection[int], n_each: int) -> int:
    """Return the bytes of a group of n_each slots of the ring."""
    # the first slot of a kind may begin up to a slot after the group does
    return max(strides, default=0) * (n_each + (len(set(strides)) > 1))


def most_terms(n_expert_used: int, n_each: int) -> int:
    """Return how many experts of a group a row may have chosen, rounded up to a power of two."""
    return 1 << (min(n_expert_used, n_each) - 1).bit_length()


def is_dense(name: str, layers: range) -> bool:
    """Return whether a tensor is always on the device: of these layers, of none, or the head.

    Experts and embeddings are not, nor are MTP blocks, which follow the layers of a model, unless
    they are among these layers.
    """
    others = f".{NEXTN_EMBD}", "_exps.weight", "_exps.bias"
    if name == "token_embd.weight" or name.endswith(others):
        return False
    if name.startswith("blk."):
        return int(name.split(".")[1]) in layers
    return name in (*HEAD, "rope_freqs.weight")
