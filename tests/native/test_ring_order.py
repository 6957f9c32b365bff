"""No slot of a prompt's ring is overwritten before its readers, whatever the order of streams.

The CPU device computes at once, but here it says that it has streams, and every stream and the host
note what they know to have happened: operations of a stream in order, and what an event or a wait
brings. An upload must know of all that read its slots, and a reader of the upload.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.fetching_engines import check_sound
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.errors import Cancelled
from moegraph.events import CancelToken
from moegraph.experts.crossing import Group
from moegraph.ggml.device import Capabilities
from moegraph.ggml.lib import C, ffi
from moegraph.runner.stage_sweep import MissingExperts
from moegraph.runner.sweep_batch import SweepBatch
from moegraph.runner.sweeps import Sweeps

Known = dict[int, int]  # stream -> how many of its operations are known to be done
Operation = tuple[int, int]  # stream, and its number there


def number(pointer: Any) -> int:
    return int(ffi.cast("intptr_t", pointer))


def learn(mine: Known, others: Known) -> None:
    for stream, n in others.items():
        mine[stream] = max(mine.get(stream, 0), n)


class Streams:
    """In place of the native module: computes as that does, and notes who knows what."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._events: dict[int, Known] = {}
        self._host: Known = {}
        self._n_events = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(C, name)

    def of(self, stream: Any) -> Known:
        """Return what a stream knows: what is enqueued knows all that the host does."""
        known = self._known.setdefault(number(stream), {})
        learn(known, self._host)
        return known

    def enqueue(self, stream: Any) -> Operation:
        known, at = self.of(stream), number(stream)
        known[at] = known.get(at, 0) + 1
        return at, known[at]

    def knows(self, stream: Any, operation: Operation) -> bool:
        return self.of(stream).get(operation[0], 0) >= operation[1]

    def ggml_backend_event_new(self, _device: object) -> object:
        self._n_events += 1
        return ffi.cast("void *", self._n_events)

    def ggml_backend_event_free(self, event: object) -> None:
        pass

    def ggml_backend_event_record(self, event: object, stream: object) -> None:
        self.enqueue(stream)
        self._events[number(event)] = dict(self.of(stream))

    def ggml_backend_event_wait(self, stream: object, event: object) -> None:
        learn(self.of(stream), self._events.get(number(event), {}))

    def ggml_backend_event_synchronize(self, event: object) -> None:
        learn(self._host, self._events.get(number(event), {}))

    def ggml_backend_synchronize(self, stream: Any) -> None:
        C.ggml_backend_synchronize(stream)
        learn(self._host, self.of(stream))

    def mg_upload_launch(self, compute: Any, upload: Any, *rest: Any) -> int:
        *before, free, uploaded, graph = rest
        if uploaded != ffi.NULL:
            self.ggml_backend_event_record(uploaded, upload)
            self.ggml_backend_event_wait(compute, uploaded)
        status: int = C.mg_upload_launch(compute, upload, *before, ffi.NULL, ffi.NULL, graph)
        if free != ffi.NULL:
            self.ggml_backend_event_record(free, compute)
        return status


class Watched:
    """Checks what happens to the slots of rings. n_copied: groups of which experts were kept."""

    def __init__(self, streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams, self.n_copied = streams, 0
        self._written: dict[tuple[int, int], tuple[Operation, int]] = {}
        self._readers: dict[tuple[int, int], list[Operation]] = {}
        for owner, name, watched in (
            (Sweeps, "send", self._send), (Sweeps, "vacate", self._vacate),
            (MissingExperts, "compute", self._compute),
        ):  # fmt: skip
            real = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *a, w=watched, real=real: w(real, *a))

    def _send(
        self, real: Callable[..., None], sweeps: Sweeps, il: int, group: int,
        pairs: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        upload = sweeps.device.upload.ptr
        for _, slot in pairs:
            for reader in self._readers.pop((group, slot), []):
                assert self.streams.knows(upload, reader), f"layer {il}: group {group} is in use"
        real(sweeps, il, group, pairs)
        written = self.streams.enqueue(upload)
        self._written.update({(group, slot): (written, il) for _, slot in pairs})

    def _compute(
        self, real: Callable[..., None], missing: MissingExperts, il: int, group: Group, *rest: Any
    ) -> None:
        real(missing, il, group, *rest)
        self._read(missing._s, il, group.index, range(len(group.experts)))

    def _vacate(
        self, real: Callable[..., None], sweeps: Sweeps, group: Group, slot_of: Mapping[int, int]
    ) -> None:
        real(sweeps, group, slot_of)
        kept = [slot for slot, expert in enumerate(group.experts) if expert in slot_of]
        self._read(sweeps, group.il, group.index, kept)
        self.n_copied += bool(kept)

    def _read(self, sweeps: Sweeps, il: int, group: int, slots: Any) -> None:
        compute = sweeps.device.compute.ptr
        reader = self.streams.enqueue(compute)
        for slot in slots:
            written, of = self._written[group, slot]
            assert of == il and self.streams.knows(compute, written), f"layer {il}: not there yet"
            self._readers.setdefault((group, slot), []).append(reader)


@pytest.mark.parametrize("n_groups", [1, 2, 4])
@pytest.mark.parametrize("also", ["alone", "decode", "cancel"])
@pytest.mark.parametrize(("slots", "pinned"), [(60, 0), (30, 2), (0, 0)])
def test_uploads_wait_for_readers_and_readers_for_uploads(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, n_groups: int, also: str,
    slots: int, pinned: int,
) -> None:  # fmt: skip
    plain = open_engine("mini35b", n_seq=2)
    real, streams = Capabilities.of.__func__, Streams()
    of = classmethod(lambda cls, dev: replace(real(cls, dev), streams=True))
    monkeypatch.setattr(Capabilities, "of", of)
    for name, module in list(sys.modules.items()):
        if name.startswith("moegraph.") and getattr(module, "C", None) is C:
            monkeypatch.setattr(module, "C", streams)
    begin = Sweeps.__init__
    monkeypatch.setattr(Sweeps, "__init__", lambda self, *a: begin(self, *a[:9], n_groups))
    watched, rng = Watched(streams, monkeypatch), np.random.default_rng(n_groups)
    missing = {"cache_slots": slots, "pin_layers": pinned, "miss": "stream"}
    engine = open_engine("mini35b", n_seq=2, **missing)
    for seed, length in enumerate([40, 200, 33, 300]):
        ids, stop = prompt(plain, length, seed=seed), CancelToken()
        for one in (engine, plain):
            one.reset(0)
        sweep = engine.passes.begin_prompts([SweepBatch(ids, 0)])
        left = int(rng.integers(1, 60)) if also == "cancel" else -1
        try:
            while engine.passes.step_prompt(sweep, stop):
                left -= 1
                if left == 0:
                    stop.set()
                if also == "decode" and rng.random() < 0.3:
                    engine.forward(ids[:1], 1)
        except Cancelled:
            check_sound(engine)
            continue
        check_sound(engine)
        output = sweep.prompts[0].output
        assert output is not None
        expected = plain.prefill(ids).require_logits()
        np.testing.assert_array_equal(output.require_logits(), expected)
    assert watched.n_copied or also != "alone" or not slots
