"""A connection to a worker through a process between them, which can be long, and can be cut."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress


class Cable:
    """One connection to an address; `url` leads through it.

    delay_s: how long bytes take from now on, each way.
    """

    def __init__(self, address: tuple[str, int], stack: ExitStack) -> None:
        self._address, self.delay_s = address, 0.0
        self._listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._connect)]
        self._threads[0].start()
        stack.callback(self._close)
        self.url = f"rpc://127.0.0.1:{self._listening.getsockname()[1]}"

    def _connect(self) -> None:
        near, _ = self._listening.accept()
        far = socket.create_connection(self._address)
        self._ends = [near, far]
        for source, sink in ((near, far), (far, near)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            for target, end in ((self._take, source), (self._bring, sink)):
                self._threads.append(threading.Thread(target=target, args=(end, under_way)))
                self._threads[-1].start()

    def _take(
        self, source: socket.socket, under_way: queue.SimpleQueue[tuple[float, bytes]]
    ) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(1 << 18)
            except OSError:
                data = b""
            under_way.put((time.monotonic() + self.delay_s, data))

    def _bring(
        self, sink: socket.socket, under_way: queue.SimpleQueue[tuple[float, bytes]]
    ) -> None:
        with suppress(OSError):
            while True:
                when, data = under_way.get()
                if not data:
                    break
                time.sleep(max(0.0, when - time.monotonic()))
                sink.sendall(data)
        self.cut()

    def cut(self) -> None:
        """End the connection on both sides, as a machine between them does that restarts."""
        for end in self._ends:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)

    def _close(self) -> None:
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()
