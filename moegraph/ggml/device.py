"""A device: compute and upload streams, memory, events, and capabilities.

Callers make the same calls in the same order on every device. Without streams, each is finished
when it returns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Cancelled, ConfigError, NativeError, OutOfDeviceMemory
from ..link import REMOTE
from ..threads import Threads, default_threads, waiting
from ..units import MiB, format_bytes, round_up
from .cuda import is_unusable, unused_card
from .free_memory import host_memory
from .handles import Buffer, Event, Handle, Owner
from .lib import C, cuda_lack, devices, ffi, last_error
from .nvml import cuda_driver, gpu_used_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from . import _native
    from .ops import Tensor
    from .remote import RemoteLink

_HUGE_PAGE = 2 * MiB


@dataclass(frozen=True)
class Capabilities:
    """What a device can do; code asks for these, not for the kind of device.

    streams: a launch returns before its work is done; uploads have a stream of their own, and
        events order the two.
    own_memory: its memory is not the host's. Weights are copied there, through pinned memory;
        otherwise they stay where the file is mapped.
    host_access: graphs can read and write memory of this host. Without it no expert may be missing,
        and one graph computes a pass.
    exact_sums: its results equal llama.cpp's bit for bit if sums have llama.cpp's order.
    cpu_threads: graphs run on CPU threads. Their number and their way of waiting can change between
        two graphs, and a flag stops them between two nodes.
    """

    streams: bool
    own_memory: bool
    host_access: bool
    exact_sums: bool
    cpu_threads: bool

    @classmethod
    def of(cls, dev: _native.ggml_backend_device_ptr) -> Capabilities:
        """Return what ggml says of a device."""
        props = ffi.new("struct ggml_backend_dev_props *")
        C.ggml_backend_dev_get_props(dev, props)
        is_cpu = props.type == C.GGML_BACKEND_DEVICE_TYPE_CPU
        return cls(
            streams=bool(getattr(props.caps, "async")) and bool(props.caps.events),
            own_memory=not props.caps.buffer_from_host_ptr,
            host_access=True,
            exact_sums=is_cpu,
            cpu_threads=is_cpu,
        )


class Backend(Handle["_native.ggml_backend_ptr"]):
    """One stream of work on a device."""

    def __init__(self, dev: _native.ggml_backend_device_ptr) -> None:
        super().__init__(C.ggml_backend_dev_init(dev, ffi.NULL), C.ggml_backend_free)


class ThreadPool(Handle["_native.ggml_threadpool_ptr"]):
    """CPU threads: the caller's and n - 1 more; `Threads` says how they wait."""

    def __init__(self, threads: Threads) -> None:
        params = ffi.new(
            "struct ggml_threadpool_params *", C.ggml_threadpool_params_default(threads.n)
        )
        params.poll = threads.poll
        super().__init__(C.ggml_threadpool_new(params), C.ggml_threadpool_free)


class HostBuffer(Buffer):
    """Host memory, pinned if the device can pin; `array` is its bytes, uint8 [size]."""

    def __init__(self, ptr: _native.ggml_backend_buffer_ptr, size: int, *parents: object) -> None:
        super().__init__(ptr, *parents)
        self._first = ffi.cast("char *", C.ggml_backend_buffer_get_base(ptr))
        self.array = np.frombuffer(ffi.buffer(self._first, size), dtype=np.uint8)

    def address(self, offset: int = 0) -> Any:
        """Return a pointer to the byte at `offset`."""
        _ = self.ptr  # it is open
        return self._first + offset


class _Pages(Handle["_native.Address"]):
    """Address space for host memory, which a forked child does not get.

    If the system follows the advice of huge pages, filling takes a fifth of the time, and pinning
    needs far fewer steps.
    """

    def __init__(self, size: int) -> None:
        n_bytes = size + _HUGE_PAGE
        kind = C.MAP_PRIVATE | C.MAP_ANONYMOUS
        ptr = C.mmap(ffi.NULL, n_bytes, C.PROT_READ | C.PROT_WRITE, kind, -1, 0)
        if ptr == ffi.cast("void *", -1):
            raise NativeError(f"the system refuses {format_bytes(size)} of host memory")
        super().__init__(ptr, lambda ptr: C.munmap(ptr, n_bytes))
        self.data = ffi.cast("void *", round_up(int(ffi.cast("uintptr_t", ptr)), _HUGE_PAGE))
        C.madvise(self.data, size, C.MADV_HUGEPAGE)
        C.madvise(ptr, n_bytes, C.MADV_DONTFORK)


class HostPages(HostBuffer):
    """Host memory in huge pages, for large blocks that threads fill and `Device.pin` then pins.

    It reads as zeros, and takes memory only as it is written.
    """

    def __init__(self, size: int) -> None:
        """Reserve address space."""
        self._pages, self._pins = _Pages(size), list[Handle[Any]]()
        buffer = C.ggml_backend_cpu_buffer_from_ptr(self._pages.data, size)
        super().__init__(buffer, size, self._pages)

    def pin(self, stream: _native.ggml_backend_ptr) -> bool:
        """Pin the memory for the device of a stream; return whether it is pinned."""
        if not self._pins and C.mg_pin(stream, self._pages.data, self.array.nbytes):
            self._pins.append(Handle(self._pages.data, C.mg_unpin, self._pages))
        return bool(self._pins)

    def close(self) -> None:
        """Unpin and free the memory; a second call does nothing."""
        super().close()
        for part in (*self._pins, self._pages):
            part.close()


def _host_free(reported: int) -> int:
    """Return free host memory in bytes; ggml reports all of the machine's memory as free."""
    available = host_memory().available
    return reported if available is None else min(reported, available)


def _cannot_pin(size: int) -> str:
    """Say why the CUDA driver did not pin: its limit is free memory, not `ulimit -l`."""
    if "GGML_CUDA_NO_PINNED" in os.environ:
        return f"cannot pin {format_bytes(size)} of host memory: unset GGML_CUDA_NO_PINNED"
    return (
        f"the CUDA driver did not pin {format_bytes(size)} of host memory; the limit is free "
        "memory or, in WSL and virtual machines, what the host system allows (not ulimit -l)"
    )


def list_devices() -> list[dict[str, Any]]:
    """Return spelling, kind ('cpu', 'cuda', 'other'), names and memory (bytes) of each device.

    This opens a context on every GPU, because CUDA tells free memory only then.
    """
    return [_describe(*found) for found in _find_devices()]


def gpu_names() -> list[str]:
    """Return the spellings of all CUDA devices that can be used; this opens no context."""
    return [spelling for spelling, kind, *_ in _find_devices() if kind == "cuda"]


def _find_devices(
    name: str = "",
) -> Iterator[tuple[str, str, str, _native.ggml_backend_device_ptr]]:
    """Yield the spelling, kind, ggml's name and handle of each device; this opens no context.

    Cards that are too old are left out. name: the device that is wanted; cpu needs no CUDA.
    """
    n_gpu = 0
    for dev in devices(name != "cpu"):
        name = ffi.string(C.ggml_backend_dev_name(dev)).decode()
        if C.ggml_backend_dev_type(dev) == C.GGML_BACKEND_DEVICE_TYPE_CPU:
            yield "cpu", "cpu", name, dev
        elif name.startswith("CUDA"):
            if not is_unusable(n_gpu):
                yield f"cuda:{n_gpu}", "cuda", name, dev
            n_gpu += 1
        else:
            yield name.lower(), "other", name, dev


def _describe(
    spelling: str, kind: str, name: str, dev: _native.ggml_backend_device_ptr
) -> dict[str, Any]:
    props = ffi.new("struct ggml_backend_dev_props *")
    C.ggml_backend_dev_get_props(dev, props)
    free = props.memory_free
    return {
        "device": spelling,
        "kind": kind,
        "name": name,
        "description": ffi.string(props.description).decode(),
        "address": ffi.string(props.device_id).decode() if props.device_id else "",
        "memory_free": _host_free(free) if kind == "cpu" else free,
        "memory_total": props.memory_total,
        "handle": dev,
    }


def _select(name: str) -> dict[str, Any]:
    if name.startswith(REMOTE):
        return _select_remote(name)
    found = list(_find_devices(name))
    cards = [spelling for spelling, kind, *_ in found if kind == "cuda"]
    lacks = cuda_lack() if not cards and name.startswith(("auto", "cuda")) else ""
    wanted = "cuda:0" if name == "cuda" else name
    if name == "auto":
        wanted = cards[0] if cards else "cpu"
        # a card that is hidden is not wanted; without a driver there is none, and a warning says so
        lacks = "" if "CUDA_VISIBLE_DEVICES" in os.environ or not cuda_driver() else lacks
    if lacks:
        raise NativeError(f"CUDA cannot be used: {lacks}; without it: --device cpu")
    for device in found:
        if device[0] == wanted:
            return _describe(*device)
    none = unused_card() or "there is no CUDA device (see moegraph doctor)"
    listed = ", ".join(["cpu", *cards]) + ("" if cards else f"; {none}")
    raise ConfigError(f"no device {name!r}; available: {listed}")


def _select_remote(name: str) -> dict[str, Any]:
    from .remote import open_link

    link, number = open_link(name)
    device = link.devices[number]
    return {
        "device": name.partition("?")[0],
        "kind": device.kind,
        "description": f"{device.description} of worker {link.worker}",
        "address": "",
        "handle": link.device(number),
        "link": link,
    }


# Bytes of this process's CUDA contexts by PCI address. A context stays open until the process ends.
_contexts: dict[str, int] = {}


def _context_bytes(address: str, before: dict[str, int]) -> int:
    """Return the bytes of this process's context on a GPU; 0 if the driver does not tell."""
    if address and address not in _contexts:
        grown = gpu_used_bytes().get(address, 0) - before.get(address, 0)
        _contexts[address] = max(0, grown) if address in before else 0
    return _contexts.get(address, 0)


# What `wake` has begun, by the spelling of the device: bytes in use on each GPU before it.
_woken: dict[str, Future[dict[str, int]]] = {}


def wake(name: str) -> None:
    """Begin to open the driver and a context on a device; the next `Device` of that name waits.

    Both take some tenths of a second, in which a caller can read the header of the model file.
    """
    if name != "cpu" and not name.startswith(REMOTE) and name not in _woken:
        pool = ThreadPoolExecutor(1, thread_name_prefix="moegraph-device")
        _woken[name] = pool.submit(_wake, name)
        pool.shutdown(wait=False)  # the thread ends with its work


def _wake(name: str) -> dict[str, int]:
    before = gpu_used_bytes()
    _select(name)  # asking a device for its free memory opens a context
    return before


def _used_before(name: str) -> dict[str, int]:
    """Return the bytes in use on each GPU before this process opened a context."""
    if name == "cpu" or name.startswith(REMOTE):
        return {}
    begun = _woken.pop(name, None)
    return begun.result() if begun else gpu_used_bytes()


class Device(Owner):
    """One device, with a stream for graphs and one for uploads.

    With streams each is a backend instance with a stream of its own; otherwise both are one
    instance. is_invariant: a row's results depend neither on the rows beside it nor on
    where experts are; not on the CPU, which has `reference` for that.
    """

    def __init__(
        self,
        name: str = "auto",
        n_threads: int | None = 1,
        reference: bool = False,
        invariant: bool = False,
    ) -> None:
        """Open a device by its spelling: auto, cpu, cuda, cuda:N, or as in link/address.py.

        n_threads: CPU threads until `use_threads`; None for one per core. Results are those of
            this number of threads, also after `use_threads`.
        reference: on the CPU, use kernels whose results do not depend on width or threads.
        invariant: on CUDA, give each of up to 32 rows of a pass the bits that it gets alone.
        """
        before = _used_before(name)
        chosen = _select(name)
        self.name: str = chosen["device"]
        self.description: str = chosen["description"]
        self._dev: _native.ggml_backend_device_ptr = chosen["handle"]
        # to the worker that has the device
        self.link: RemoteLink | None = self.own(chosen.get("link"))
        self.can = Capabilities.of(self._dev)
        if self.link:  # what of that holds from here
            exact = chosen["kind"] == "cpu"
            self.can = replace(self.can, host_access=False, exact_sums=exact)
        self.is_invariant = invariant and not self.can.exact_sums
        self._pools: dict[Threads, ThreadPool] = {}  # the last is in use
        try:
            self._open(n_threads, reference)
        except (ConfigError, NativeError):
            super().close()
            raise
        self._free_at_start = self.memory()[0]
        self.context_bytes = _context_bytes(chosen["address"], before)
        self.peak_bytes = 0

    def _open(self, n_threads: int | None, reference: bool) -> None:
        if reference and not self.can.cpu_threads:
            raise ConfigError(f"cpu_reference needs the CPU device, got {self.name}")
        self.compute = self.own(Backend(self._dev))
        # weights and experts are uploaded on this stream
        self.upload = self.own(Backend(self._dev)) if self.can.streams else self.compute
        self.buft = C.ggml_backend_dev_buffer_type(self._dev)
        self.alignment: int = C.ggml_backend_buft_get_alignment(self.buft)
        self.n_threads = n_threads or default_threads()
        # attention over a long context is summed in parts: one per thread, as in llama.cpp
        self.n_attention_parts = self.n_threads if self.can.exact_sums else 0
        if self.can.cpu_threads:
            self.use_threads(Threads(self.n_threads, waiting(self.n_threads)))
            C.ggml_backend_cpu_set_use_ref(self.compute.ptr, reference)
        self.check_alive()

    def check_alive(self) -> None:
        """Check that the worker of the device, if it is on another machine, has not been lost.

        Call it when results have been read: those of a lost worker are zeros.
        """
        if self.link:
            self.link.require_alive()

    def use_threads(self, threads: Threads) -> None:
        """Compute with these CPU threads from the next graph on; no result depends on it.

        The device keeps two pools, so that prompts and tokens can alternate.
        """
        if self._pools and threads == next(reversed(self._pools)):
            return
        pool = self._pools.pop(threads, None) or ThreadPool(threads)
        self._pools[threads] = pool
        # this also pauses the threads of the previous pool
        C.ggml_backend_cpu_set_threadpool(self.compute.ptr, pool.ptr)
        C.ggml_backend_cpu_set_n_threads(self.compute.ptr, threads.n)
        if len(self._pools) > 2:
            self._pools.pop(next(iter(self._pools))).close()

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes as the driver reports them."""
        free, total = ffi.new("size_t *"), ffi.new("size_t *")
        C.ggml_backend_dev_memory(self._dev, free, total)
        return free[0], total[0]

    def note_peak(self) -> int:
        """Measure the device memory taken since the device was opened; return the peak, in bytes.

        This includes CUDA's context if the driver tells its size.
        """
        taken = self._free_at_start - self.memory()[0] + self.context_bytes
        self.peak_bytes = max(self.peak_bytes, taken)
        return self.peak_bytes

    def buffer(self, size: int, what: str, remedy: str) -> Buffer:
        """Allocate `size` bytes of device memory; what and remedy are for the message."""
        # Linux grants memory that it does not have and kills the process when it is used.
        is_there = size > 0 and (self.can.own_memory or size <= _host_free(size))
        ptr = C.ggml_backend_buft_alloc_buffer(self.buft, size) if is_there else ffi.NULL
        if ptr != ffi.NULL:
            return Buffer(ptr, self.compute)
        self.check_alive()
        last_error()
        free = self.memory()[0]
        free = free if self.can.own_memory else _host_free(free)
        raise OutOfDeviceMemory(
            f"{self.name} cannot allocate {format_bytes(size)} for {what}: "
            f"{format_bytes(free)} free; {remedy}"
        )

    def host_buffer(self, size: int, must_pin: bool = False) -> HostBuffer:
        """Allocate `size` bytes of host memory for transfers: pinned if the driver can pin it."""
        buft = C.ggml_backend_dev_host_buffer_type(self._dev)
        if buft == ffi.NULL:
            buft = C.ggml_backend_cpu_buffer_type()
        ptr = C.ggml_backend_buft_alloc_buffer(buft, size)
        if ptr == ffi.NULL:
            raise NativeError(f"cannot allocate {format_bytes(size)} of host memory for transfers")
        host = HostBuffer(ptr, size, self.compute)
        # ggml silently falls back to ordinary memory; only the buffer type shows it
        name = ffi.string(C.ggml_backend_buft_name(C.ggml_backend_buffer_get_type(ptr)))
        if must_pin and self._needs_pins and not name.endswith(b"_Host"):
            host.close()
            raise NativeError(_cannot_pin(size))
        return host

    def transfer_memory(self, size: int) -> HostBuffer:
        """Allocate a large block for transfers, fast: pinned if the driver can pin it."""
        memory = HostPages(size)
        try:
            self.pin(memory)
        except NativeError:
            memory.close()
            return self.host_buffer(size)
        return memory

    def pin(self, memory: HostPages) -> None:
        """Pin memory, so that the device can read it; only CUDA devices need that.

        Any thread may call it.
        """
        if self._needs_pins and not memory.pin(self.compute.ptr):
            raise NativeError(_cannot_pin(memory.array.nbytes))

    @property
    def _needs_pins(self) -> bool:
        """Whether graphs can read host memory only if it is pinned."""
        return self.can.own_memory and self.can.host_access

    def event(self) -> Event | None:
        """Return a new event, or None without streams, where nothing is asynchronous."""
        if not self.can.streams:
            return None
        return Event(C.ggml_backend_event_new(self._dev), self.compute)

    def can_wait_for(self, other: Device) -> bool:
        """Return whether this device's stream can wait for an event of another device's."""
        kinds = {device.name.partition(":")[0] for device in (self, other)}
        return self.can.streams and other.can.streams and kinds == {"cuda"}

    def bind_cancel(self, flag: npt.NDArray[np.int32] | None) -> None:
        """Let a nonzero I32 word stop CPU threads between two nodes; None unbinds.

        It has no effect on other devices. The caller keeps the array alive until it unbinds it.
        """
        if self.can.cpu_threads:
            word = ffi.NULL if flag is None else ffi.cast("int32_t *", flag.ctypes.data)
            C.mg_cancel_bind(self.compute.ptr, word)

    def send(self, tensor: Tensor, host: HostBuffer, offset: int, size: int) -> None:
        """Enqueue a copy of `size` host bytes from `offset` to a tensor, on the compute stream."""
        C.ggml_backend_tensor_set_async(self.compute.ptr, tensor, host.address(offset), 0, size)

    def finish(self) -> None:
        """Wait for the stream of graphs, whose results are used now."""
        C.ggml_backend_synchronize(self.compute.ptr)
        self.check_alive()

    def synchronize(self) -> None:
        """Wait until all streams are idle; return at once if the device is closed."""
        if self.compute.is_closed:
            return
        for stream in (self.compute, self.upload):
            C.ggml_backend_synchronize(stream.ptr)

    def check(self, status: int, what: str) -> None:
        """Turn a graph status into an exception."""
        if status == C.GGML_STATUS_SUCCESS:
            return
        if status == C.GGML_STATUS_ABORTED:
            raise Cancelled("cancelled")
        self.check_alive()
        detail = last_error() or f"status {status}"
        if status == C.GGML_STATUS_ALLOC_FAILED:
            raise OutOfDeviceMemory(f"{what}: out of memory on {self.name}: {detail}")
        raise NativeError(f"{what} failed on {self.name}: {detail}")

    def close(self) -> None:
        """Wait for the device, then free its streams and thread pools."""
        self.synchronize()
        super().close()
        self.link = None
        for pool in self._pools.values():
            pool.close()
