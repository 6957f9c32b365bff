"""The process between an engine and another machine: `python -m moegraph.link.forward`.

Its job is JSON: the address, the build, and its end of a socketpair. It connects, does the TLS
handshake and the hello, writes one line of JSON to standard output, and then copies bytes until
either side ends. The line is the worker's answer, or a string that says what went wrong.
"""

from __future__ import annotations

import json
import signal
import socket
import ssl
import sys
from pathlib import Path

from ..errors import MoegraphError
from .address import Address
from .connect import dial
from .hello import Build, answer_of, greet
from .tls import relay, tls_context


def _open(address: Address, build: Build) -> tuple[ssl.SSLSocket, bytes]:
    """Connect; return the connection and the line for the engine."""
    context = tls_context(Path(address.keys), is_server=False)
    sock = context.wrap_socket(dial(address))
    return sock, answer_of(greet(sock, build, address.worker))


def _reason(error: OSError, worker: str) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"worker {worker} shows a certificate that the keys do not accept"
    if isinstance(error, ssl.SSLError):
        return f"no TLS with worker {worker}: {error.reason or error}; it may not accept these keys"
    return f"worker {worker} cannot be reached: {error.strerror or error}"


def main(job: str) -> int:
    """Run a forwarder; return its exit code."""
    address, build, fd = json.loads(job)
    where = Address(**address)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its engine
    engine = socket.socket(fileno=fd)
    try:
        worker, line = _open(where, Build(**build))
    except MoegraphError as error:
        line = json.dumps(str(error)).encode() + b"\n"
    except OSError as error:
        line = json.dumps(_reason(error, where.worker)).encode() + b"\n"
    else:
        _say(line)
        relay(worker, engine)
        return 0
    _say(line)
    return 1


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
