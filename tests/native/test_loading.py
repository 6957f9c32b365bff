"""Reading weights with several threads: the bytes, failures at any piece, and what stays behind.

The CPU device uses weights where they are mapped; here it passes for a device with memory of its
own, to which they are copied.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from helpers.shared import greedy_tokens, prompt

from moegraph.arch import ModelFile, open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import ModelFileError
from moegraph.ggml import device as device_module
from moegraph.ggml.handles import live_handles
from moegraph.ggml.lib import C, cpu_converter, ffi
from moegraph.resident import weights

PRESET = "legacy32"
WHOLE = {"mode": "whole"}
PAGES = {"cache_slots": 80, "pin_layers": 1, "miss": "stream", "host_pin": "all"}
RING = {"cache_slots": 80, "pin_layers": 1, "miss": "stream", "host_pin": "none"}
MODES = pytest.mark.parametrize("settings", [WHOLE, PAGES, RING], ids=["whole", "pages", "ring"])


def copy_on_the_cpu(patch: pytest.MonkeyPatch, piece: int = 20_000) -> None:
    """Have the CPU copy its weights, in pieces so small that every block is used many times."""
    real = device_module.Capabilities.of

    def of(dev: Any) -> device_module.Capabilities:
        return dataclasses.replace(real(dev), own_memory=True)

    patch.setattr(device_module.Capabilities, "of", of)
    # there is no driver that could pin
    host_buffer = device_module.Device.host_buffer
    patch.setattr(device_module.Device, "pin", lambda self, memory: None)
    patch.setattr(
        device_module.Device,
        "host_buffer",
        lambda self, size, must_pin=False: host_buffer(self, size),
    )
    patch.setattr(weights, "PIECE_BYTES", piece)


def config(settings: dict[str, Any]) -> EngineConfig:
    return EngineConfig(device="cpu", n_threads=1, n_ctx=256, n_ubatch=32, **settings)


def readers() -> list[str]:
    """Return the threads that read model files."""
    return [t.name for t in threading.enumerate() if t.name.startswith("moegraph-read")]


@MODES
def test_copied_weights_have_the_bits_of_mapped_ones(open_engine, monkeypatch, settings) -> None:
    expected = open_engine(**settings)
    ids = prompt(expected, 40)
    logits = expected.forward_logits(ids)
    expected.reset()
    tokens = greedy_tokens(expected, ids, 12)

    copy_on_the_cpu(monkeypatch)
    real, rng = ModelFile.read, random.Random(1)

    def uneven(*args: Any) -> None:
        time.sleep(rng.choice((0, 0, 0, 0.001)))
        real(*args)

    monkeypatch.setattr(ModelFile, "read", uneven)
    copied = open_engine(**settings)
    assert readers() == []
    np.testing.assert_array_equal(copied.forward_logits(ids), logits)
    copied.reset()
    assert greedy_tokens(copied, ids, 12) == tokens


def fail_at(patch: pytest.MonkeyPatch, at: int, error: BaseException) -> list[int]:
    """Have the at-th read fail; return the list that counts them."""
    real, calls = ModelFile.read, []

    def read(*args: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            raise error
        real(*args)

    patch.setattr(ModelFile, "read", read)
    return calls


@MODES
def test_a_read_that_fails_is_the_error_and_nothing_stays(model_path, monkeypatch, settings):
    path, before = model_path(PRESET), live_handles()
    copy_on_the_cpu(monkeypatch)
    at, n_failed = 0, 0
    while True:
        at = at + 1 if at < 3 else 2 * at
        with monkeypatch.context() as patch:
            calls = fail_at(patch, at, ModelFileError("the disk fails"))
            try:
                Engine.load(path, config(settings)).close()
            except ModelFileError as error:
                assert str(error) == "the disk fails"
                n_failed += 1
        assert live_handles() == before, f"read {at}"
        assert readers() == [], f"read {at}"
        if len(calls) < at:
            break
    assert n_failed > 3


@MODES
def test_an_interrupt_while_loading_ends_the_threads(model_path, monkeypatch, settings) -> None:
    path, before = model_path(PRESET), live_handles()
    copy_on_the_cpu(monkeypatch)
    n_reports: list[int] = []
    Engine.load(path, config(settings), lambda *_: n_reports.append(1)).close()
    n = len(n_reports)
    assert n > 40
    for at in (1, n // 2, n - 2, n):
        left = at

        def progress(*_: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Engine.load(path, config(settings), progress)
        assert live_handles() == before
        assert readers() == []


def test_a_context_by_memory_is_longer_where_there_is_more(model_path) -> None:
    found = []
    for vram in ("256MiB", "auto"):
        config = EngineConfig(device="cpu", n_threads=1, n_ctx=-1, vram=vram)
        model = open_model(model_path("mini35b"))
        model.hparams = dataclasses.replace(model.hparams, n_ctx_train=1 << 16)
        with Engine(model, config, None, None) as engine:
            assert engine.config.n_ctx == engine.n_ctx
            found.append(engine.n_ctx)
    assert 4096 <= found[0] < found[1] <= 1 << 16


def test_the_cpu_backend_converts_every_number_as_ggmls_base_library() -> None:
    """Embeddings in F16 go through it."""
    halves, kind = np.arange(1 << 16, dtype=np.uint16), int(GGMLQuantizationType.F16)
    found, expected = (np.empty(halves.size, dtype=np.float32) for _ in range(2))
    slow = C.ggml_get_type_traits(kind).to_float
    for convert, out in ((cpu_converter("ggml_cpu_fp16_to_fp32"), found), (slow, expected)):
        convert(ffi.from_buffer(halves), ffi.cast("float *", ffi.from_buffer(out)), halves.size)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    assert np.isnan(found).any() and np.isinf(found).any()
