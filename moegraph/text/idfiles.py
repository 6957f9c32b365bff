"""Token ids in files: raw little-endian int32, no header."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import RequestError
from ..units import format_bytes
from .tokenizer import MAX_PROMPT_BYTES


def read_ids(path: Path) -> npt.NDArray[np.int32]:
    """Return the ids in a file.

    Raises:
        RequestError: the file cannot be read, is empty or too large, or is not a multiple of 4
            bytes long.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{path}: cannot read token ids: {error.strerror}") from error
    if not data:
        raise RequestError(f"{path}: the file is empty; it must hold at least one token id")
    if len(data) > MAX_PROMPT_BYTES:
        raise RequestError(f"{path}: larger than {format_bytes(MAX_PROMPT_BYTES)} of token ids")
    if len(data) % 4:
        raise RequestError(
            f"{path}: {len(data)} bytes is not a multiple of 4; "
            "token ids are little-endian 32-bit integers"
        )
    return np.frombuffer(data, dtype="<i4")


def require_ids_in_range(path: Path, ids: npt.NDArray[np.int32], n_vocab: int) -> None:
    """Refuse ids that the model does not have.

    Raises:
        RequestError: names the first such id and its position.
    """
    wrong = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if wrong.size:
        at = int(wrong[0])
        raise RequestError(
            f"{path}: token id {ids[at]} at position {at}; the model has ids 0 to {n_vocab - 1}"
        )
