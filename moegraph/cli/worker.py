"""`moegraph worker`: lend this machine's devices to an engine on another one."""

from __future__ import annotations

import atexit
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from ..errors import Cancelled, ConfigError
from ..threads import MAX_THREADS
from ..units import format_bytes
from . import ui
from .options import Command

if TYPE_CHECKING:
    from ..worker.service import Child

_PORT = 50052
# Seconds after a signal to end until it comes again; ending a child takes up to 5.
_AGAIN_S = 6.0


def _split(listen: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, HOST or :PORT; IPv6 with a port has brackets."""
    host, colon, port = listen.rpartition(":")
    if not colon or listen.endswith("]") or (":" in host and not host.endswith("]")):
        host, port = listen, str(_PORT)
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--listen {listen}: expected HOST:PORT, such as 127.0.0.1:{_PORT}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _make_keys(folder: Path) -> None:
    try:
        from ..link.keys import CLIENT, DAYS, WORKER, new_keys
    except ImportError:
        raise ConfigError(
            "--new-keys needs the package cryptography; install it with: "
            f"{sys.executable} -m pip install 'cryptography>=42'"
        ) from None
    made = new_keys(folder)
    ui.note(f"{made[WORKER]}: for the worker, moegraph worker --keys {made[WORKER]}")
    ui.note(f"{made[CLIENT]}: for its clients, --device rpc://HOST:PORT?keys={made[CLIENT]}")
    ui.note(f"valid for {DAYS} days; who has a folder can use the other side, so copy it safely")


def _stop(number: int, frame: FrameType | None) -> None:
    # Python drops what a handler raises while an object is finalized, so this comes once more
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # ending may take longer
    raise SystemExit(0)


@click.command("worker", cls=Command)
@click.option(
    "--device", "devices", default="auto", metavar="NAME,...",
    help="Devices to lend, with commas: auto, cpu, cuda or cuda:N.",
)  # fmt: skip
@click.option(
    "--listen", default=f"127.0.0.1:{_PORT}", metavar="HOST:PORT",
    help="Address to listen on; port 0 takes a free one. Any other than loopback needs --keys.",
)  # fmt: skip
@click.option(
    "--keys", type=click.Path(path_type=Path), metavar="DIR",
    help="The worker's folder of keys: only clients with keys made together with them are served.",
)  # fmt: skip
@click.option(
    "--new-keys", type=click.Path(path_type=Path), metavar="DIR",
    help="Make keys for a worker and its clients in a new folder, and end.",
)  # fmt: skip
@click.option(
    "--cache-dir", type=click.Path(path_type=Path), metavar="DIR",
    help="Keep weights in this folder, so that they cross the network once. It grows by the size "
    "of what is loaded. Default: keep none.",
)  # fmt: skip
@click.option(
    "-t", "--threads", "n_threads", type=click.IntRange(1, MAX_THREADS), metavar="N",
    help="CPU threads of a CPU device. Default: the physical cores that other programs leave free "
    "when a client comes.",
)  # fmt: skip
def worker(
    devices: str, listen: str, keys: Path | None, new_keys: Path | None,
    cache_dir: Path | None, n_threads: int | None,
) -> None:  # fmt: skip
    """Lend this machine's devices to an engine on another machine, one client at a time.

    The engine names them with --device, for example `moegraph run --device
    cuda:0,rpc://127.0.0.1:50052`. A client that has been let in can do with this process what it
    likes: lend devices to nobody who may not run programs here.

    \b
    Examples:
      moegraph worker
      moegraph worker --new-keys keys
      moegraph worker --device cuda:0 --listen 0.0.0.0:50052 --keys keys/worker
    """
    if new_keys:
        _make_keys(new_keys)
        return
    from ..link.address import Address, listen_on
    from ..link.tls import tls_context
    from ..passes.prefixfile import private_folder
    from ..worker.service import Worker, WorkerSettings

    host, port = _split(listen)
    context = tls_context(keys, is_server=True) if keys else None
    if cache_dir:
        private_folder(cache_dir)
    names = tuple(name.strip() for name in devices.split(","))
    settings = WorkerSettings(names, n_threads, cache_dir)
    with listen_on(host, port, has_keys=context is not None) as listening:
        signal.signal(signal.SIGTERM, _stop)

        def ready(child: Child) -> None:
            for device, free in zip(child.devices, child.free):
                ui.note(f"{device.device}: {device.description}, {format_bytes(free)} free")
            how = "with TLS" if context else "without TLS"
            shown = Address(host, listening.getsockname()[1]).worker
            ui.note(f"worker: listening on {shown}, {how}")

        try:
            Worker(settings, listening, context, lambda line: ui.note(f"worker: {line}")).run(ready)
        except KeyboardInterrupt:
            raise Cancelled from None
