"""Token ids as callers give them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import RequestError


def checked_ids(tokens: object, n_vocab: int) -> npt.NDArray[np.int32]:
    """Return token ids as I32, in the same numpy shape.

    Raises:
        RequestError: tokens are not integers, or an id is outside the vocabulary.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.size == 1:
        one: npt.NDArray[np.int32] = tokens  # one row of decode: the device waits for it
        if 0 <= one.item() < n_vocab:
            return one
    try:
        ids = np.asarray(tokens)
    except ValueError as error:  # rows of different lengths
        raise RequestError(f"token ids must be a list of integers: {error}") from error
    if ids.size == 0:
        return ids.astype(np.int32)
    is_large = ids.dtype.kind == "O" and all(isinstance(i, int) for i in ids.reshape(-1))
    if ids.dtype.kind not in "iu" and not is_large:
        got = {"f": "floats", "U": "text", "b": "booleans"}.get(ids.dtype.kind, "other values")
        raise RequestError(f"token ids must be integers, got {got}")
    if ids.min() < 0 or ids.max() >= n_vocab:
        at = int(np.flatnonzero((ids < 0) | (ids >= n_vocab))[0])
        raise RequestError(
            f"token id {ids.reshape(-1)[at]} at position {at} is out of range; "
            f"the vocabulary has ids 0 to {n_vocab - 1}"
        )
    return ids.astype(np.int32, copy=False)
