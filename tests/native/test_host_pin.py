"""Host copies of experts: as many layers as leave the host enough memory, the rest from the file.

The CPU device pins nothing and says that it is one; here it passes for a device that pins.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from helpers.fetching_engines import source
from helpers.shared import greedy_tokens, prompt

from moegraph.arch import open_model
from moegraph.arch.tensors import MATRIX_TYPES
from moegraph.errors import ConfigError, NativeError
from moegraph.ggml.device import Device, HostPages
from moegraph.ggml.free_memory import HostMemory
from moegraph.ggml.lib import C, ffi
from moegraph.resident import store as stores
from moegraph.resident.layout import Packing, expert_tensors
from moegraph.resident.store import ExpertStore
from moegraph.units import GiB, MiB

PRESET = "legacy32"


class PinningDevice:
    """The CPU device, for a store that asks whether it can pin; refuses from a layer on.

    registers: whether it can pin memory that the system has given out.
    """

    can = SimpleNamespace(own_memory=True)

    def __init__(self, n_blocks: int = 1000, registers: bool = True) -> None:
        self.real = Device("cpu", 1)
        self._n_left, self._registers = n_blocks, registers
        self.pinned: list[int] = []

    def host_buffer(self, size: int, must_pin: bool = False):
        if must_pin:
            assert not self._registers, "the driver's memory is the slow way"
            self._refuse()
        block = self.real.host_buffer(size)
        block.array[:] = 0xA5
        return block

    def event(self) -> None:
        return None

    def pin(self, memory: HostPages) -> None:
        if not self._registers:
            raise NativeError("memory of the system cannot be pinned")
        if self.pinned:  # the first is to find out whether pinning works at all
            self._refuse()
        self.pinned.append(memory.array.nbytes)

    def _refuse(self) -> None:
        self._n_left -= 1
        if self._n_left < 0:
            raise NativeError("the driver does not")


@pytest.fixture
def pinned(model_path, no_leak, monkeypatch) -> Callable[..., SimpleNamespace]:
    """Return a function that opens a store on a host with some memory and looks at it."""

    def open_store(memory: Callable[[int], HostMemory], pin: str = "auto", **device: int):
        made = PinningDevice(**device)
        with open_model(model_path(PRESET)) as model:
            layers = range(model.hparams.n_layer)
            size = max(
                Packing.of(expert_tensors(model, il)).stride * model.hparams.n_expert
                for il in layers
            )
            monkeypatch.setattr(stores, "host_memory", lambda: memory(size))
            store = ExpertStore(made, model, layers, pin)
            for il in layers:
                for expert in range(model.hparams.n_expert):
                    check_bytes(store, model, il, expert)
            found = SimpleNamespace(
                layers=sorted(store.rows), n_layer=len(layers), note=store.warning, size=size,
                ring=store.ring.n_bytes, n_bytes=store.pinned_bytes,
                in_place=store.in_place,
            )  # fmt: skip
            store.close()
        made.real.close()
        return found

    return open_store


def check_bytes(store: ExpertStore, model, il: int, expert: int) -> None:
    """Compare what is handed out for an expert with the file, part by part."""
    address, packing = source(store, il, expert), store.packing(il)
    if il in store.rows:  # copies and kernels may read up to the next expert
        data = np.frombuffer(ffi.buffer(address, packing.stride), np.uint8)
        assert not data[packing.n_bytes :].any()
    for part, info in expert_tensors(model, il).items():
        at, size = store.packing(il).offsets[part], store.packing(il).sizes[part]
        got = np.frombuffer(ffi.buffer(address + at, size), np.uint8)
        expected = model.map(info)[expert * size : (expert + 1) * size]
        np.testing.assert_array_equal(got, expected)


def test_pinning_stops_while_the_host_has_memory_left(pinned):
    found = pinned(lambda size: HostMemory(16 * GiB, 2 * GiB + 3 * size + size // 2, None))
    assert found.layers == [0, 1] and found.ring > found.size // 2  # the ring needs room too
    assert found.n_bytes == 2 * found.size + found.ring
    assert f"the experts of 2 of {found.n_layer} layers" in found.note
    assert "the others are read from the file" in found.note and "2.00 GiB" in found.note


def test_memory_that_others_take_meanwhile_counts(pinned):
    looks = iter(range(100))

    def shrinking(size: int) -> HostMemory:
        return HostMemory(16 * GiB, 2 * GiB + (14 - 3 * next(looks)) * size, None)

    assert pinned(shrinking).layers == [0, 1, 2]


def test_with_enough_memory_or_where_it_is_not_known_all_layers_are_pinned(pinned):
    for memory in (HostMemory(64 * GiB, 60 * GiB, None), HostMemory(None, None, None)):
        found = pinned(lambda _, memory=memory: memory)
        assert found.layers == list(range(found.n_layer))
        assert found.note == "" and found.ring == 0


@pytest.mark.parametrize("registers", [True, False])
def test_where_the_driver_pins_no_more_the_rest_is_read_from_the_file(pinned, registers):
    found = pinned(lambda _: HostMemory(64 * GiB, 60 * GiB, None), n_blocks=2, registers=registers)
    assert found.layers == [0, 1] and found.note.endswith("from the file: the driver does not")


def test_all_is_refused_before_anything_is_taken(open_engine, monkeypatch, no_leak):
    small = HostMemory(8 * GiB, MiB // 4, 2 * GiB)
    monkeypatch.setattr(stores, "host_memory", lambda: small)
    message = (
        r"host_pin 'all' needs .* of host memory, 256 KiB are available "
        r"\(the control group may use 2\.00 GiB\), and 256 MiB of them stay free; "
        r"use --host-pin auto or none"
    )
    with pytest.raises(ConfigError, match=message):
        open_engine(PRESET, pin_layers=0, cache_slots=20, host_pin="all")


def test_an_engine_reports_what_it_holds_and_says_why_not_all(open_engine, monkeypatch):
    settings = {"pin_layers": 0, "cache_slots": 80, "miss": "stream"}
    plain = open_engine(PRESET, host_pin="none", **settings)
    assert 0 < plain.memory()["host_pinned_bytes"] <= 2 * MiB, "only the ring"
    expected = greedy_tokens(plain, prompt(plain, 20), 16)
    assert open_engine(PRESET).memory()["host_pinned_bytes"] == 0

    whole = open_engine(PRESET, host_pin="all", **settings)
    n_bytes, hp = whole.memory()["host_pinned_bytes"], whole.hparams
    store = whole.stage.store
    strides = sum(store.packing(il).stride for il in range(hp.n_layer))
    assert n_bytes == hp.n_expert * strides and not whole.warnings

    # 'auto', as on a device that pins: half of the layers have room
    memory = HostMemory(16 * GiB, 2 * GiB + n_bytes // 2, None)
    monkeypatch.setattr(stores, "host_memory", lambda: memory)
    real = ExpertStore.__init__
    monkeypatch.setattr(
        ExpertStore,
        "__init__",
        lambda self, device, *args: real(
            self,
            SimpleNamespace(
                can=PinningDevice.can,
                host_buffer=device.host_buffer,
                pin=device.pin,
                event=device.event,
            ),
            *args,
        ),
    )
    half = open_engine(PRESET, host_pin="auto", **settings)
    assert any("of 8 layers" in note for note in half.warnings), half.warnings
    assert 0 < half.memory()["host_pinned_bytes"] < n_bytes
    assert greedy_tokens(half, prompt(half, 20), 16) == expected


def test_the_planner_and_ggml_agree_on_the_size_of_a_block() -> None:
    """Slots are packed by the sizes of the package gguf, and kernels count in ggml's."""
    ours = {kind: GGML_QUANT_SIZES[kind][1] for kind in MATRIX_TYPES}
    assert ours == {kind: C.ggml_type_size(int(kind)) for kind in MATRIX_TYPES}
