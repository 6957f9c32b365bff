"""The engine's side of a connection to a worker.

On loopback the engine connects itself. Other machines are reached through a forwarder, a process of
its own that does the TLS (`python -m moegraph.link.connect`): the engine has one end of a
socketpair. The forwarder's job is JSON: the address, the build, and its end. It connects, does the
TLS handshake and the hello, writes one line of JSON to standard output, and then copies bytes until
either side ends. The line is the worker's answer, or a string that says what went wrong.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import MoegraphError, NativeError
from .address import Address
from .hello import HELLO_S, Build, RemoteDevice, answer_of, greet, read_answer
from .tls import relay, tls_context, watch


@dataclass
class Connection:
    """A connection over which RPC can begin.

    sock: its engine's end. devices: of the worker. forwarder: the process that does the TLS.
    """

    sock: socket.socket
    devices: list[RemoteDevice]
    forwarder: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the connection and the forwarder."""
        self.sock.close()
        if self.forwarder:
            self.forwarder.kill()
            self.forwarder.wait()


def connect(address: Address, build: Build) -> Connection:
    """Connect to a worker and say hello."""
    try:
        found = _forwarded(address, build) if address.keys else _direct(address, build)
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, ConnectionResetError) and not address.keys:
            reason += "; a worker with --keys wants ?keys=FOLDER in its address"
        raise NativeError(f"worker {address.worker} cannot be reached: {reason}") from None
    # no single read or write of native code may take longer
    found.sock.setblocking(True)
    span = struct.pack("ll", int(address.timeout_s), int(address.timeout_s % 1 * 1e6))
    found.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
    found.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
    return found


def dial(address: Address) -> socket.socket:
    """Open a TCP connection to a worker."""
    sock = socket.create_connection((address.host, address.port), HELLO_S)
    watch(sock)
    return sock


def _direct(address: Address, build: Build) -> Connection:
    sock = dial(address)
    try:
        return Connection(sock, greet(sock, build, address.worker))
    except BaseException:
        sock.close()
        raise


def _forwarded(address: Address, build: Build) -> Connection:
    """Start a forwarder; it writes what came of the hello to its standard output."""
    ours, theirs = socket.socketpair()
    keys = os.path.abspath(os.path.expanduser(address.keys))
    job = json.dumps([asdict(replace(address, keys=keys)), asdict(build), theirs.fileno()])
    with theirs:
        forwarder = start_python("moegraph.link.connect", job, theirs, stdout=subprocess.PIPE)
    try:
        assert forwarder.stdout
        with forwarder.stdout as output:
            line = output.readline()
        if not line:
            raise NativeError(f"the forwarder to worker {address.worker} ended")
        answer = json.loads(line)
        if isinstance(answer, str):
            raise NativeError(answer)
        return Connection(ours, read_answer(line, address.worker), forwarder)
    except BaseException:
        ours.close()
        forwarder.kill()
        forwarder.wait()
        raise


def start_python(
    module: str, job: str, sock: socket.socket, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Start `python -m module job` in a session of its own; it inherits one socket.

    A session of its own: Ctrl-C on the terminal does not reach it.
    """
    # the same modules as here, also in a checkout that is not installed
    path = os.pathsep.join(os.path.abspath(part) for part in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", module, job],
        pass_fds=(sock.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
        cwd="/",  # Python looks for modules there first
    )


def _reason(error: OSError, worker: str) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"worker {worker} shows a certificate that the keys do not accept"
    if isinstance(error, ssl.SSLError):
        return f"no TLS with worker {worker}: {error.reason or error}; it may not accept these keys"
    return f"worker {worker} cannot be reached: {error.strerror or error}"


def main(job: str) -> int:
    """Run a forwarder; return its exit code."""
    address, build, fd = json.loads(job)
    where, is_served = Address(**address), False
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its engine
    engine = socket.socket(fileno=fd)
    try:
        worker = tls_context(Path(where.keys), is_server=False).wrap_socket(dial(where))
        line = answer_of(greet(worker, Build(**build), where.worker))
        is_served = True
    except MoegraphError as error:
        line = json.dumps(str(error)).encode() + b"\n"
    except OSError as error:
        line = json.dumps(_reason(error, where.worker)).encode() + b"\n"
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
    if is_served:
        relay(worker, engine)
    return 0 if is_served else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
