"""What the paged attention op reads: the pages of each sequence, and where each row's keys are.

The op takes K and V from the pool through the list of pages, so its graphs do not depend on how
long the sequences are. The ring of a sequence in a layer with a window is some pages that repeat:
each row attends to the last ones of its positions, which no later position has overwritten.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..ggml.device import Device
from ..ggml.handles import Context
from ..ggml.lib import C
from ..ggml.ops import F32, I32, MAX_ATTN_HEAD, Builder, Tensor
from ..resident.layout import PAGE
from ..resident.stage import Stage
from .rows import Tree

# I32 words that describe a row.
ROW_WORDS = 36
# Words of a row: its sequence, the positions that are committed, those that it attends to, one that
# is not used, then the path: the rows behind the committed positions, in order.
_SEQ, _N_PAST, _N_KEYS, _PATH = 0, 1, 2, 4
_CHAIN = np.arange(ROW_WORDS - _PATH, dtype=np.int32)


def can_page(stage: Stage) -> bool:
    """Return whether decode and verify passes read K and V through pages.

    They do if the device has the op for the heads of this model. On the CPU, llama.cpp's own op
    keeps the bits.

    Raises:
        ConfigError: they cannot, but a row's bits must not depend on the rows beside it.
    """
    device, hp, state = stage.device, stage.hp, stage.state
    if device.can.exact_sums or not state.k:
        return False
    kinds, n_pages = {}, state.pool.table.shape[1]
    for il, k in state.k.items():
        at, window = hp.at(il), hp.layer(il).window or 0
        kinds[at.n_embd_head_k, at.n_embd_head_v, at.n_head, window] = k, state.v.get(il)
    for (d, d_v, n_head, window), (k, v) in kinds.items():
        is_fit = d % 32 == 0 and d <= MAX_ATTN_HEAD
        if is_fit and v and pages_are_supported(device, d, n_head, k, v, n_pages, PAGE, window):
            continue
        if device.is_invariant:
            raise ConfigError(
                f"--deterministic needs attention over pages, which {device.name} lacks for heads "
                f"of {d} keys and {d_v} values; drop it"
            )
        return False
    return True


def pages_are_supported(
    device: Device, d: int, n_head: int, k: Tensor, v: Tensor, n_pages: int, page_size: int,
    window: int = 0,
) -> bool:  # fmt: skip
    """Return whether a device has attention over lists of n_pages pages for heads of size d."""
    with Context(16, 16) as context:
        b = Builder(context, 16)
        q, pages = b.leaf(F32, (d, n_head, 1), "q"), b.leaf(I32, (n_pages, 1), "pages")
        rows = b.leaf(I32, (ROW_WORDS, 1), "rows")
        out = b.paged_attn(q, k, v, pages, rows, page_size, 1.0, None, window)
        return bool(C.ggml_backend_supports_op(device.compute.ptr, out))


def describe_path(
    words: npt.NDArray[np.int32], seq: int, n_past: int, n_keys: npt.NDArray[np.int64],
    path: npt.NDArray[np.int32],
) -> None:  # fmt: skip
    """Describe rows of a sequence with one path, I32 numpy [n, ROW_WORDS]; n_keys: [n]."""
    words[:, _SEQ], words[:, _N_PAST], words[:, _N_KEYS] = seq, n_past, n_keys
    words[:, _N_KEYS + 1] = 0
    words[:, _PATH : _PATH + len(path)] = path


def prompt_rows(
    seqs: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], n: int
) -> npt.NDArray[np.int32]:
    """Describe rows of prompts: I32 numpy [n, ROW_WORDS]; those after the given ones are padding.

    seqs, positions: numpy [at most n], of each row; positions of a sequence follow each other. CUDA
    takes so many rows at a time as a path has words: those of one sequence among them are a chain.
    """
    out = np.zeros((n, ROW_WORDS), dtype=np.int32)
    words, i = out[: len(seqs)], np.arange(len(seqs))
    begins = (i % len(_CHAIN) == 0) | (np.diff(seqs, prepend=-1) != 0)
    first = positions[begins][np.cumsum(begins) - 1]
    words[:, _SEQ], words[:, _N_PAST], words[:, _N_KEYS] = seqs, first, positions + 1
    words[:, _PATH:] = _CHAIN
    return out


def fill_rows(
    out: npt.NDArray[np.int32], pos0: list[int], n_seq_tokens: int, tree: Tree | None,
    n_pad: int = 0,
) -> None:  # fmt: skip
    """Describe the rows of a pass: I32 numpy [n_tokens, ROW_WORDS]; pos0: first positions.

    n_pad: sequences at the end that are padding.
    """
    if out.size == ROW_WORDS and tree is None:  # one row of decode: the device waits for it
        out[_SEQ], out[_N_PAST], out[_N_KEYS], out[_PATH] = 0, pos0[0], pos0[0] + 1, 0
        return
    words = out.reshape(len(pos0), n_seq_tokens, ROW_WORDS)
    first = np.array(pos0, dtype=np.int32)[:, None]
    words[:, :, _SEQ] = np.arange(len(pos0))[:, None]
    words[:, :, _N_PAST] = first
    words[:, :, _N_KEYS] = first + np.arange(1, n_seq_tokens + 1)
    words[:, :, _N_KEYS + 1] = 0
    words[:, :, _PATH:] = _CHAIN
    if n_pad:
        words[-n_pad:, :, _N_KEYS] = 0
    if tree is None:
        return
    words[:, :, _PATH : _PATH + n_seq_tokens] = tree.paths
    words[:, :, _N_KEYS] = np.where(tree.real, first + 1 + tree.depths, 0)
