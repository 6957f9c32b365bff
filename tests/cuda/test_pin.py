"""Memory of the system that is pinned for a device, and what an engine does where that fails."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.ggml.device import HostPages
from moegraph.ggml.handles import Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.memory import place
from moegraph.ggml.ops import F32
from moegraph.resident import store as stores
from moegraph.resident.layout import expert_tensors

MIB = 1 << 20
SETTINGS = {"device": "cuda", "n_ctx": 256, "n_ubatch": 16, "pin_layers": 0, "cache_slots": 80}


def device_address(address: int) -> int | None:
    """Return where the device sees host memory; None if it does not."""
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    status = driver.cuMemHostGetDevicePointer_v2(
        ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0)
    )
    return found.value if status == 0 else None


def test_pinned_pages_are_seen_by_the_device_until_they_are_freed(device) -> None:
    with HostPages(5 * MIB) as pages:
        address = pages.base
        assert device_address(address) is None
        pages.array[:] = np.arange(5 * MIB, dtype=np.uint32).view(np.uint8)[: 5 * MIB]
        done: list[BaseException | None] = []
        thread = threading.Thread(target=lambda: done.append(device.pin(pages)))
        thread.start()
        thread.join()
        assert done == [None], "another thread may pin"
        assert device_address(address) == address
        with Context(1) as context, device.buffer(5 * MIB, "a test", "") as buffer:
            tensor = C.ggml_new_tensor_1d(context.ptr, F32, 5 * MIB // 4)
            place(buffer, tensor, 0)
            C.ggml_backend_tensor_set_async(device.upload.ptr, tensor, pages.address(), 0, 5 * MIB)
            device.synchronize()
            back = np.empty(5 * MIB, np.uint8)
            C.ggml_backend_tensor_get(tensor, ffi.from_buffer(back), 0, 5 * MIB)
        np.testing.assert_array_equal(back, pages.array)
        device.pin(pages)
    assert device_address(address) is None


def check_blocks(engine: Engine) -> None:
    """Compare the experts in host memory with the file."""
    store = engine.stages[0].store
    assert store.layers == list(range(engine.hparams.n_layer)) == list(store._pinned)
    for il, block in store._pinned.items():
        packing = store.packing(il)
        rows = block.array.reshape(-1, packing.stride)
        for part, info in expert_tensors(engine.file, il).items():
            at, size = packing.offsets[part], packing.sizes[part]
            np.testing.assert_array_equal(
                rows[:, at : at + size], engine.file.map(info).reshape(-1, size)
            )


def test_an_engine_keeps_experts_in_pages_that_the_device_reads(model_file, monkeypatch) -> None:
    # missing experts go the same way, from memory that the driver allocates
    path = model_file("legacy32")
    config = EngineConfig(**SETTINGS, host_pin="all", miss="stream", deterministic=True)
    with monkeypatch.context() as patch:
        patch.setattr(stores, "_registers", lambda device: False)
        with Engine.load(path, config) as engine:
            blocks = engine.stages[0].store._pinned
            assert not any(isinstance(block, HostPages) for block in blocks.values())
            check_blocks(engine)
            expected = engine.forward_logits(np.arange(9))
    with Engine.load(path, config) as engine:
        blocks = engine.stages[0].store._pinned
        for block in blocks.values():
            assert isinstance(block, HostPages)
            assert device_address(block.base) == block.base
        check_blocks(engine)
        np.testing.assert_array_equal(engine.forward_logits(np.arange(9)), expected)
        addresses = [block.base for block in blocks.values()]
    assert [device_address(address) for address in addresses] == [None] * len(addresses)
