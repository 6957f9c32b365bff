"""Native handles: one owner, one free, no copies."""

from __future__ import annotations

import gc

import pytest

from moegraph.errors import InternalError
from moegraph.ggml.device import Device, list_devices
from moegraph.ggml.handles import Context, live_handles


def test_close_frees_once_and_use_after_close_is_an_error():
    before = live_handles()
    context = Context(4)
    context.close()
    context.close()
    assert live_handles() == before
    with pytest.raises(InternalError, match="closed Context"):
        _ = context.ptr


def test_a_forgotten_handle_is_freed_by_the_collector():
    gc.collect()  # what other tests have forgotten
    before = live_handles()
    context = Context(4)
    assert live_handles() != before
    del context
    gc.collect()
    assert live_handles() == before


def test_a_device_closes_twice_and_frees_its_buffers():
    before = live_handles()
    device = Device("cpu", n_threads=1)
    buffer = device.buffer(4096, "a test", "nothing")
    host = device.host_buffer(128)
    host.array[:] = 7
    assert buffer.size >= 4096 and host.array.sum() == 7 * 128
    for handle in (host, buffer, device, device):
        handle.close()
    assert live_handles() == before


def test_the_cpu_is_always_listed():
    assert [d["device"] for d in list_devices() if d["kind"] == "cpu"] == ["cpu"]
