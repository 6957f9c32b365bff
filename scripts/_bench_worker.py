#!/usr/bin/env python3
"""A process that keeps one engine loaded and times requests; scripts/bench_*.py start it.

A request is one JSON object on a line of stdin: "do" names a method of `Side`, the other fields are
its arguments. The reply is one JSON object on stdout, with "ok" and, if that is false, "error". The
worker runs the moegraph package that PYTHONPATH leads to, and uses only its public names (`Engine`,
`EngineConfig`, `SamplingParams`) and documented methods, so that it can serve different versions.
The same seed gives the same token ids in all of them. Times are seconds; output of libraries goes
to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
STATUS_FIELDS = ("VmHWM", "VmRSS", "VmSwap", "RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")


def token_ids(seed: int, n: int, n_vocab: int) -> Ids:
    """Return n random token ids; the same seed gives the same ids in every system."""
    return np.random.default_rng(seed).integers(0, n_vocab, n).astype(np.int32)


def host_memory() -> dict[str, int]:
    """Return Linux's figures for this process's memory, in bytes; VmHWM is the resident peak."""
    found = {}
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in STATUS_FIELDS:
                found[name] = int(rest.split()[0]) * 1024
    return found


class Side:
    """An engine, and how passes over token rows are timed."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.n_vocab = 0

    def about(self) -> dict[str, Any]:
        """Return the package's folder and the patch set of its libraries."""
        import moegraph

        package = Path(moegraph.__file__).resolve().parent
        try:
            from moegraph.ggml.lib import versions

            return {"package": str(package), **versions()}
        except ImportError:  # other versions have other names
            return {"package": str(package), "patchset": "unknown"}

    def load(
        self, model: str, config: dict[str, Any], routing: str | None = None
    ) -> dict[str, Any]:
        """Load an engine and close the one before. routing: a .npy file of recorded ids."""
        from moegraph import Engine, EngineConfig

        self.unload()
        recorded = np.load(routing) if routing else None
        begin = time.perf_counter()
        self.engine = Engine.load(model, EngineConfig(**config), routing=recorded)
        seconds = time.perf_counter() - begin
        self.n_vocab = self.engine.hparams.n_vocab
        plan = getattr(self.engine, "plan", None)
        n_slots = [int(n) for n in plan.n_slots] if plan else []
        return {"seconds": seconds, "n_slots": n_slots, "mode": self.engine.mode}

    def unload(self) -> dict[str, Any]:
        """Close the engine."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        return {}

    def memory(self) -> dict[str, Any]:
        """Return the engine's figures and those of Linux."""
        return {**host_memory(), **self.engine.memory()}

    def forget(self) -> None:
        """Empty the sequence; what that costs the device is not part of the next time."""
        self.engine.reset()
        self.engine.device.synchronize()

    def step(self, ids: Ids, logits: bool) -> object:
        """Run one pass; without logits, only copy the device's argmax to the host."""
        return self.engine.forward(ids, greedy=not logits)

    def _steps(self, ids: Ids, logits: bool) -> None:
        """Run a pass of each id. Results are not kept: each would fill 1 MB of new memory."""
        for one in ids.reshape(-1, 1):
            self.step(one, logits)

    def _report(self, before: Any) -> dict[str, Any] | None:
        after = self.engine.expert_stats()
        return after.since(before).report() if after is not None and before is not None else None

    def _begin(self, seed: int, depth: int, n: int) -> Ids:
        """Empty the sequence and read `depth` tokens; return the n ids after them."""
        ids = token_ids(seed, depth + n, self.n_vocab)
        self.forget()
        if depth:
            self.engine.prefill(ids[:depth], greedy=True)
        return ids[depth:]

    def _timed(self, work: Callable[[], object]) -> dict[str, Any]:
        before, begin = self.engine.expert_stats(), time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "experts": self._report(before)}

    def decode(
        self, n: int, seed: int, depth: int = 0, logits: bool = False, profiled: bool = False
    ) -> dict[str, Any]:
        """Time n passes of one row from position `depth`; profiled: a profiler is to see them."""
        ids = self._begin(seed, depth, n)
        if profiled and (code := ctypes.CDLL("libcuda.so.1").cuProfilerStart()):
            raise RuntimeError(f"cuProfilerStart returned {code}")
        return self._timed(lambda: self._steps(ids, logits))

    def prompt(self, n: int, seed: int, depth: int = 0, logits: bool = True) -> dict[str, Any]:
        """Time a prompt of n tokens from position `depth`."""
        ids = self._begin(seed, depth, n)
        return self._timed(lambda: self.engine.prefill(ids, greedy=not logits))

    def turn(self, at: int, n_prompt: int, n: int) -> dict[str, Any]:
        """Time a prompt and n passes of one row, of the ids of a turn of llama-batched-bench.

        It takes ids from rand() of the C library: 16 to warm up, then those of turn 0, 1, ...
        """
        libc, each = ctypes.CDLL(None), n_prompt + n
        libc.srand(1)
        drawn = [libc.rand() % self.n_vocab for _ in range(16 + (at + 1) * each)]
        ids = np.array(drawn[-each:], np.int32)
        self.forget()
        return {
            "prompt": self._timed(lambda: self.engine.prefill(ids[:n_prompt])),
            "decode": self._timed(lambda: self._steps(ids[n_prompt:], True)),
        }

    def rows(self, n: int, seed: int, repeat: int, logits: bool = True) -> dict[str, Any]:
        """Time `repeat` passes of n rows, each of other ids and from an empty sequence.

        The same ids again would find their experts on the device; so those of other widths differ.
        """
        ids = token_ids(64 * seed + n, n * repeat, self.n_vocab).reshape(repeat, n)
        before, times = self.engine.expert_stats(), []
        for fresh in ids:
            self.forget()
            begin = time.perf_counter()
            self.step(fresh, logits)
            times.append(time.perf_counter() - begin)
        return {"times": times, "experts": self._report(before)}

    def together(self, n_seqs: int, n: int, seed: int) -> dict[str, Any]:
        """Time n passes of one row for each of n_seqs sequences, all from position 0."""
        ids = token_ids(seed, n * n_seqs, self.n_vocab).reshape(n, n_seqs, 1)
        for seq in range(n_seqs):
            self.engine.reset(seq)
        return self._timed(lambda: [self.engine.forward(rows, greedy=True) for rows in ids])

    def generate(
        self, n: int, n_prompt: int, seed: int, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        """Time tokens 2 to n of `Engine.generate`, as in a user's request."""
        from moegraph import SamplingParams

        ids = token_ids(seed, n_prompt, self.n_vocab)
        before, params = self.engine.expert_stats(), SamplingParams(**sampling)
        begin, times = time.perf_counter(), []
        for _ in self.engine.generate(ids, params, max_tokens=n, ignore_eos=True):
            times.append(time.perf_counter())
        return {
            "seconds": times[-1] - times[0], "n": len(times) - 1,
            "first_token_s": times[0] - begin, "experts": self._report(before),
        }  # fmt: skip


def answer(side: Side, line: str) -> dict[str, Any]:
    """Return the reply to one request."""
    request = json.loads(line)
    try:
        return {"ok": True, **getattr(side, request.pop("do"))(**request)}
    except Exception as error:  # the parent process shows it
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serve until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = Side()
    first = answer(side, '{"do": "about"}')
    print(json.dumps(first), file=replies, flush=True)
    for line in sys.stdin if first["ok"] else ():
        print(json.dumps(answer(side, line)), file=replies, flush=True)


if __name__ == "__main__":
    main()
