"""The process that serves one client of a worker: `python -m moegraph.worker.child`.

What a client sends goes to native code, so it may end this process, and only this one. The job is
JSON: the devices, CPU threads, the folder of the cache, and a socket to the worker. The child opens
the devices, says so in one line, receives the client's socket, serves it, and ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from ..cpuload import LOAD, LOOK_S
from ..errors import MoegraphError
from ..ggml.device import Device
from ..ggml.remote import serve, this_build
from ..link.hello import RemoteDevice
from ..threads import Threads, waiting

_PR_SET_PDEATHSIG = 1


def _report(devices: list[Device]) -> dict[str, object]:
    found = [
        RemoteDevice(d.name, "cpu" if d.can.exact_sums else "other", d.description) for d in devices
    ]
    free = [d.memory()[0] for d in devices]
    return {"build": asdict(this_build()), "devices": [asdict(d) for d in found], "free": free}


def leave_busy_cpus(devices: Sequence[Device]) -> None:
    """Let CPU devices use as many threads as there are CPUs that other programs leave free now.

    Threads that wait for one that shares its CPU make a token many times as long. That changes no
    bit: the graph says into how many parts attention is divided.
    """
    LOAD.taken()  # of the time since the last client; what counts is the load now
    time.sleep(2 * LOOK_S)
    free = LOAD.free()
    for device in devices:
        if device.can.cpu_threads and free is not None and free < device.n_threads:
            device.use_threads(Threads(free, waiting(free)))


def main(job: str) -> int:
    """Serve one client; return the exit code."""
    names, n_threads, cache_dir, fd = json.loads(job)
    # end with the worker, however it ends
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    worker = socket.socket(fileno=fd)
    try:
        devices = [Device(name, n_threads) for name in names]
        worker.sendall(json.dumps(_report(devices)).encode() + b"\n")
    except MoegraphError as error:
        failure = {"error": str(error), "code": error.exit_code}
        worker.sendall(json.dumps(failure).encode() + b"\n")
        return error.exit_code
    word, fds, _, _ = socket.recv_fds(worker, 1, 1)
    if not word or not fds:
        return 0
    if n_threads is None:
        leave_busy_cpus(devices)
    serve(socket.socket(fileno=fds[0]), cache_dir, [device.compute.ptr for device in devices])
    os._exit(0)  # the system frees memory faster


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
