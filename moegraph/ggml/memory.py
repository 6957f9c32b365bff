"""Tensors in memory that the caller has allocated."""

from __future__ import annotations

from ..errors import NativeError
from .handles import Buffer
from .lib import C, ffi, last_error
from .ops import Tensor


def place(buffer: Buffer, tensor: Tensor, offset: int) -> None:
    """Give a tensor its memory, at a byte offset of a buffer."""
    address = ffi.cast("void *", buffer.base + offset)
    status = C.ggml_backend_tensor_alloc(buffer.ptr, tensor, address)
    if status != C.GGML_STATUS_SUCCESS:
        name = ffi.string(tensor.name).decode("utf-8", "replace") or "a tensor"
        raise NativeError(f"ggml could not place {name} in its buffer: {last_error() or status}")
