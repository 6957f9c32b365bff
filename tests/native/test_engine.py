"""The engine on the CPU device: exactness between its own ways of computing, life of requests."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from helpers.shared import greedy_tokens, prompt

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import (
    ConfigError,
    ContextOverflow,
    MoegraphError,
    NativeError,
    OutOfDeviceMemory,
    RequestError,
)
from moegraph.events import CancelToken
from moegraph.ggml.free_memory import HostMemory
from moegraph.sampling import SamplingParams

PRESETS = ["legacy32", "kquant40", "iq64", "mxfp256", "float32", "mini35b"]


@pytest.mark.parametrize(
    ("preset", "type_kv"), [*((preset, "f16") for preset in PRESETS), ("legacy32", "q8_0")]
)
def test_layered_equals_whole_bit_for_bit(open_engine, preset, type_kv):
    logits = []
    for mode in ("whole", "layered"):
        engine = open_engine(preset, mode=mode, type_k=type_kv, type_v=type_kv)
        ids = prompt(engine, 41)
        rows = [engine.forward_logits(ids[:33]), engine.forward_logits(ids[33:40], 33)]
        rows.append(engine.forward_logits(ids[40:], 40))
        logits.append(np.concatenate(rows))
    assert np.isfinite(logits[0]).all() and logits[0].std() > 0.1
    np.testing.assert_array_equal(logits[0], logits[1])


@pytest.mark.parametrize(("preset", "mode"), [("legacy32", "layered"), ("iq64", "whole")])
def test_sequences_in_one_pass_equal_sequences_alone(open_engine, preset, mode):
    together = open_engine(preset, mode=mode, cpu_reference=True, n_seq=3)
    alone = open_engine(preset, mode=mode, cpu_reference=True)
    ids = prompt(together, 3 * 24).reshape(3, 24)
    together.forward(ids[:, :9], seq=0)
    batch = np.concatenate([
        together.forward(ids[1:, 9:23], seq=1, all_rows=True).logits.reshape(2, 14, -1),
        together.forward(ids[1:, 23:], seq=1).logits[:, None, :],
    ], axis=1)  # fmt: skip
    for row, seq in enumerate((1, 2)):
        alone.reset()
        alone.forward(ids[seq, :9])
        single = alone.forward(ids[seq, 9:], all_rows=True).logits
        np.testing.assert_array_equal(batch[row], single)


def test_generation_stops_at_the_end_of_the_context(open_engine):
    engine = open_engine(n_ctx=256)
    events = list(engine.generate(prompt(engine, 250), text=False))
    assert len(events) == 7 and events[-1].finish_reason == "length"


def test_kept_logits_have_a_row_for_every_position_fed(open_engine):
    engine = open_engine()
    ids = prompt(engine, 70)  # two chunks
    events = list(engine.generate(ids, max_tokens=5, text=False, keep_logits=True))
    rows = np.concatenate([e.logits for e in events])
    assert rows.shape == (70 + 5 - 1, engine.hparams.n_vocab)
    np.testing.assert_array_equal(rows[69:].argmax(axis=1), [e.token for e in events])


def test_sampling_is_repeatable_with_a_seed(open_engine):
    engine = open_engine()
    ids, sampling = prompt(engine, 12), SamplingParams(temperature=1.0, seed=3)
    runs = [
        [e.token for e in engine.generate(ids, sampling, max_tokens=24, text=False)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    other = SamplingParams(temperature=1.0, seed=4)
    assert [e.token for e in engine.generate(ids, other, max_tokens=24, text=False)] != runs[0]


@pytest.mark.parametrize("mode", ["whole", "layered"])
def test_cancel_ends_a_request_and_the_next_one_is_right(open_engine, mode):
    engine = open_engine(mode=mode)
    ids = prompt(engine, 60)
    expected = greedy_tokens(engine, ids, 12)
    token = CancelToken()
    events = []
    for event in engine.generate(ids, max_tokens=400, text=False, cancel=token, ignore_eos=True):
        events.append(event)
        if len(events) == 5:
            token.set()
    assert events[-1].finish_reason == "cancelled" and 5 <= len(events) <= 8
    drawn = [event.token for event in events if event.token is not None]
    assert len(drawn) == events[-1].n_generated and drawn == expected[: len(drawn)]
    assert greedy_tokens(engine, ids, 12) == expected


def test_cancel_from_another_thread_stops_inside_a_pass(open_engine):
    engine = open_engine("kquant40", n_ctx=4096, n_ubatch=4096)
    seconds = []
    for _ in range(3):  # the machine may be busy at one of them
        token = CancelToken()
        threading.Timer(0.2, token.set).start()
        events = list(engine.generate(prompt(engine, 4000), max_tokens=1, text=False, cancel=token))
        assert [e.finish_reason for e in events] == ["cancelled"]
        seconds.append(events[0].prefill_s)
        if seconds[-1] < 3.0:
            return
    raise AssertionError(f"the passes went on for {seconds} s")


def test_nan_in_a_weight_is_an_error_that_names_the_layer(tmp_path, model_path):
    source = model_path("legacy32")
    with open_model(source) as model:
        info = model.tensors["blk.3.ffn_down_shexp.weight"]
    raw = bytearray(source.read_bytes())
    raw[info.offset : info.offset + 2] = b"\xff\xff"  # the F16 scale of the first block
    damaged = tmp_path / "nan.gguf"
    damaged.write_bytes(raw)
    for mode in ("whole", "layered"):
        config = EngineConfig(device="cpu", n_threads=1, n_ctx=256, n_ubatch=64, mode=mode)
        with Engine.load(damaged, config) as engine:
            message = r"not finite after 9 positions, first in the output of layer 3"
            with pytest.raises(NativeError, match=message):
                list(engine.generate(prompt(engine, 9), max_tokens=4, text=False))
            assert engine.state.n_past == [0]


@pytest.mark.parametrize(
    ("mode", "scale", "row"),
    [("whole", 0x7E00, 0), ("layered", 0x7C00, 77), ("whole", 0xFC00, -1), ("layered", 0x7E00, -1)],
    ids=["nan", "inf", "-inf", "layered nan"],
)
def test_one_bad_row_of_the_output_matrix_is_an_error_however_tokens_are_picked(
    tmp_path, model_path, mode, scale, row
):
    """The argmax would pass over it, and the text go on without its token."""
    source = model_path("legacy32")
    with open_model(source) as model:
        info = model.tensors["output.weight"]
    assert info.type.name == "Q8_0"
    raw = bytearray(source.read_bytes())
    n_row = info.nbytes // info.ne[1]
    at = info.offset + row % info.ne[1] * n_row
    raw[at : at + 2] = scale.to_bytes(2, "little")
    damaged = tmp_path / "nan.gguf"
    damaged.write_bytes(raw)
    config = EngineConfig(device="cpu", n_threads=1, n_ctx=256, n_ubatch=64, mode=mode)
    with Engine.load(damaged, config) as engine:
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(temperature=temperature, seed=1)
            events = engine.generate(prompt(engine, 9), sampling, max_tokens=4, text=False)
            with pytest.raises(NativeError, match="after 9 positions, first in the output head"):
                list(events)
            assert engine.held(0) == []
        with pytest.raises(NativeError, match="first in the output head"):
            engine.forward(prompt(engine, 9), all_rows=True, greedy=True)


def test_memory_that_does_not_suffice_is_refused_with_a_remedy(model_path, no_leak):
    with pytest.raises(OutOfDeviceMemory, match=r"cannot allocate .* free; lower -c"):
        Engine.load(
            model_path("legacy32"),
            EngineConfig(device="cpu", n_ctx=1 << 22, n_seq=256, n_threads=1),
        )


def test_host_memory_is_not_promised_twice(model_path, no_leak, monkeypatch):
    """Linux would grant the cache, and end the process when it is cleared."""
    monkeypatch.setattr(
        "moegraph.ggml.device.host_memory", lambda: HostMemory(8 << 30, 1 << 20, None)
    )
    with pytest.raises(OutOfDeviceMemory, match=r"for the KV cache .*: 1\.00 MiB free; lower -c"):
        Engine.load(model_path("legacy32"), EngineConfig(device="cpu", n_ctx=65536, n_threads=1))


def test_a_shipped_model_has_a_name():
    with Engine.load("tiny", EngineConfig(device="cpu", n_ctx=256)) as engine:
        assert engine.tokenizer.decode(engine.tokenizer.encode("def f(x):")) == "def f(x):"


def test_a_missing_device_is_named_and_nothing_leaks(model_path, no_leak):
    with pytest.raises(ConfigError, match=r"no device 'cuda:77'; available: cpu"):
        Engine.load(model_path("legacy32"), EngineConfig(device="cuda:77"))


def test_requests_are_checked_before_anything_is_computed(open_engine):
    engine = open_engine(n_ctx=256)
    n_vocab = engine.hparams.n_vocab
    for ids, kind, words in (
        ([], RequestError, "empty"),
        ([0, -1], RequestError, "token id -1 at position 1"),
        ([n_vocab], RequestError, f"token id {n_vocab} at position 0"),
        ([1] * 257, ContextOverflow, "257 tokens, the context holds 256"),
        ([2**40], RequestError, "out of range"),
    ):
        with pytest.raises(kind, match=words):
            list(engine.generate(ids, text=False))
    assert engine.state.n_past == [0]
    with pytest.raises(RequestError, match="65 rows in a pass"):
        engine.forward(np.zeros(65, dtype=np.int32))
    with pytest.raises(MoegraphError, match="sequences 0 to 1"):
        engine.forward(np.zeros((2, 1), dtype=np.int32))
