"""Copies rows from one stage's device to the next one's, in the order of both streams."""

from __future__ import annotations

from contextlib import ExitStack, closing

from ..ggml.device import Device
from ..ggml.lib import C
from ..ggml.ops import Tensor

# Bytes of a piece of a long copy; one goes to the second device while the next leaves the first.
_PIECE = 4 << 20
_N_PIECES = 2


class Boundary:
    """Copies from one device to another through host memory, pinned if a driver can pin it.

    If each device can wait for the other's events, the host waits for neither. Otherwise it waits
    until the first device has computed what is copied.
    """

    def __init__(self, source: Device, to: Device) -> None:
        """Allocate the host memory.

        Raises:
            NativeError: there is none.
        """
        self._source, self._to = source, to
        self._follows = to.can_wait_for(source)
        with ExitStack() as stack:
            own = stack.enter_context
            owner = to if to.can.own_memory else source
            self._host = own(closing(owner.host_buffer(_N_PIECES * _PIECE)))
            self._left = [source.event() for _ in range(_N_PIECES)]
            self._arrived = [to.event() for _ in range(_N_PIECES)]
            for event in (*self._left, *self._arrived):
                if event:
                    own(closing(event))
            self._opened = stack.pop_all()
        self._turn = 0

    def copy(
        self, source: Tensor, to: Tensor, n_bytes: int, source_at: int = 0, to_at: int = 0
    ) -> None:
        """Enqueue the copy of n_bytes of a tensor, after what its device computes now.

        source_at, to_at: the first byte in each tensor.
        """
        for at in range(0, n_bytes, _PIECE):
            n = min(_PIECE, n_bytes - at)
            self._copy(source, source_at + at, to, to_at + at, n)

    def _copy(self, source: Tensor, source_at: int, to: Tensor, to_at: int, n: int) -> None:
        turn, self._turn = self._turn, (self._turn + 1) % _N_PIECES
        first, second = self._source.compute.ptr, self._to.compute.ptr
        host, left, arrived = (
            self._host.address(turn * _PIECE),
            self._left[turn],
            self._arrived[turn],
        )
        if arrived and self._follows:
            C.ggml_backend_event_wait(first, arrived.ptr)
        elif arrived:
            arrived.wait()
        C.ggml_backend_tensor_get_async(first, source, host, source_at, n)
        if left and self._follows:
            C.ggml_backend_event_record(left.ptr, first)
            C.ggml_backend_event_wait(second, left.ptr)
        else:
            C.ggml_backend_synchronize(first)
            self._source.check_alive()
        C.ggml_backend_tensor_set_async(second, to, host, to_at, n)
        if arrived:
            C.ggml_backend_event_record(arrived.ptr, second)

    def close(self) -> None:
        """Wait for both devices, then free the memory."""
        self._source.synchronize()
        self._to.synchronize()
        self._opened.close()
