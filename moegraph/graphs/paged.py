"""What the paged attention op reads: the pages of each sequence, and where each row's keys are.

The op takes K and V from the pool through the list of pages, so its graphs do not depend on how
long the sequences are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..ggml.device import Device
from ..modelfile.hparams import HParams
from .rows import Tree

# Most rows of a pass that the op takes, and I32 words that describe one of them.
MAX_ROWS, ROW_WORDS = 32, 36
# Words of a row: its sequence, the positions that are committed, those that it attends to (0 for
# padding), one that is not used, then the path: the rows behind the committed positions, in order.
_SEQ, _N_PAST, _N_KEYS, _PATH = 0, 1, 2, 4
_CHAIN = np.arange(ROW_WORDS - _PATH, dtype=np.int32)


def can_page(device: Device, hp: HParams) -> bool:
    """Return whether the device's op computes this model's attention."""
    return device.can.paged_attention and hp.n_embd_head_k in (64, 128, 256)


def fill_rows(
    out: npt.NDArray[np.int32], pos0: list[int], n_seq_tokens: int, tree: Tree | None
) -> None:
    """Describe the rows of a pass: I32 numpy [n_tokens, ROW_WORDS]; pos0: first positions."""
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
    if tree is None:
        return
    for seq, row in np.ndindex(words.shape[:2]):
        path = np.flatnonzero(tree.sees[seq, row])
        words[seq, row, _PATH : _PATH + len(path)] = path
    words[:, :, _N_KEYS] = np.where(tree.real, first + 1 + tree.depths, 0)
