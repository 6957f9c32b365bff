"""Tensors in memory that the caller has allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import NativeError
from ..units import round_up
from .device import Device
from .handles import Buffer, Context, Owner
from .lib import C, ffi, last_error
from .ops import F32, Builder, Tensor


def place(buffer: Buffer, tensor: Tensor, offset: int) -> None:
    """Give a tensor its memory, at a byte offset of a buffer."""
    address = ffi.cast("void *", buffer.base + offset)
    status = C.ggml_backend_tensor_alloc(buffer.ptr, tensor, address)
    if status != C.GGML_STATUS_SUCCESS:
        name = ffi.string(tensor.name).decode("utf-8", "replace") or "a tensor"
        raise NativeError(f"ggml could not place {name} in its buffer: {last_error() or status}")


class Block(Owner):
    """Matrices in one device buffer, zeros at first.

    tensors: by name. n_bytes: of the buffer.
    """

    def __init__(
        self, device: Device, shapes: Mapping[Any, tuple[int, ...]], what: str, remedy: str
    ) -> None:
        """shapes: ne0 and ne1 by name, and the type if it is not F32.

        what, remedy: as in `Device.buffer`.
        """
        context = self.own(Context(len(shapes)))
        self.tensors: dict[Any, Tensor] = {}
        self._offsets, self.n_bytes = dict[object, int](), 0
        for name, (ne0, ne1, *dtype) in shapes.items():
            tensor = C.ggml_new_tensor_2d(context.ptr, dtype[0] if dtype else F32, ne0, ne1)
            C.ggml_set_name(tensor, str(name).encode())
            self.tensors[name], self._offsets[name] = tensor, self.n_bytes
            needed = C.ggml_backend_buft_get_alloc_size(device.buft, tensor)
            self.n_bytes = round_up(self.n_bytes + needed, device.alignment)
        self.n_bytes = self.n_bytes or device.alignment  # a device has no buffer of no bytes
        self.buffer = self.own(device.buffer(self.n_bytes, what, remedy))
        C.ggml_backend_buffer_clear(self.buffer.ptr, 0)
        for name, tensor in self.tensors.items():
            self.put(tensor, name)

    def put(self, tensor: Tensor, name: object, offset: int = 0) -> Tensor:
        """Give a tensor the memory of that name, from a byte on; return the tensor."""
        place(self.buffer, tensor, self._offsets[name] + offset)
        return tensor

    def leaf(self, b: Builder, name: object, dtype: int, *ne: int, at: int = 0) -> Tensor:
        """Return a leaf that reads the memory of that name from byte `at` on; ne: its shape."""
        return self.put(b.leaf(dtype, ne, str(name)), name, at)

    def set(self, name: object, values: npt.NDArray[Any], at: int = 0) -> None:
        """Write values to the memory of that name from byte `at` on, and wait."""
        data = np.ascontiguousarray(values)
        C.ggml_backend_tensor_set(self.tensors[name], ffi.from_buffer(data), at, data.nbytes)


class Sender(Owner):
    """Host memory, pinned if possible, from which copies to a device are enqueued."""

    def __init__(self, device: Device, n_bytes: int) -> None:
        self._device, self._sent = device, self.own(device.event())
        self._host = self.own(device.host_buffer(n_bytes))

    def begin(self) -> npt.NDArray[np.uint8]:
        """Return the memory to write to; wait until the device has read what was sent from it."""
        if self._sent:
            self._sent.wait()
        return self._host.array

    def send(self, to: Tensor, n_bytes: int, at: int = 0, start: int = 0) -> None:
        """Enqueue a copy of bytes from `start` on to a tensor, from its byte `at` on."""
        stream, source = self._device.compute.ptr, self._host.address(start)
        C.ggml_backend_tensor_set_async(stream, to, source, at, n_bytes)
        if self._sent:
            C.ggml_backend_event_record(self._sent.ptr, stream)

    def put(self, to: Tensor, values: npt.NDArray[Any], at: int = 0) -> None:
        """Write values to the memory, and enqueue their copy to a tensor from its byte `at` on."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.begin()[: data.nbytes] = data
        self.send(to, data.nbytes, at)
