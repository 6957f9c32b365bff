"""A server that listens on a port of this machine, for clients that need one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from .patience import until


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Serve an application from a thread; yield its address, such as http://127.0.0.1:1234."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [free]}, daemon=True)
        thread.start()
        until(lambda: server.started or not thread.is_alive())
        assert server.started, "the server did not start"
        try:
            yield f"http://127.0.0.1:{free.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
