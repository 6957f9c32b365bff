#!/usr/bin/env python3
"""A process that keeps one engine loaded and times requests; scripts/bench_*.py start it.

    _bench_worker.py ours             the moegraph package that PYTHONPATH leads to
    _bench_worker.py upstream FOLDER  unpatched llama.cpp, as tests/oracle keeps it

A request is one JSON object on a line of stdin: "do" names the operation, the other fields are its
arguments. The reply is one JSON object on stdout, with "ok" and, if that is false, "error". Both
kinds compute the same token ids from a seed. The worker uses only the public names of moegraph
(`Engine`, `EngineConfig`, `SamplingParams`) and documented methods, except in `counting`, so that
it can serve different versions of the package. Times are seconds; output of libraries goes to
stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
STATUS_FIELDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")


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
    """The common part of both kinds: how passes over token rows are timed.

    A kind defines `load`, `forget` (empty the sequence), `step` (one pass of at most `chunk` rows
    that continues the sequence and copies its result to the host) and `memory`.
    """

    n_vocab = 0
    chunk = 512

    def forget(self) -> None:
        """Empty the sequence."""
        raise NotImplementedError

    def step(self, ids: Ids, logits: bool, all_rows: bool = False) -> None:
        """Run one pass."""
        raise NotImplementedError

    def memory(self) -> dict[str, Any]:
        """Return bytes by name."""
        return host_memory()

    def stats(self) -> Any:
        """Return counters of the expert cache, or None."""
        return None

    def _report(self, before: Any) -> dict[str, Any] | None:
        after = self.stats()
        return after.since(before).report() if after is not None and before is not None else None

    def _fill(self, ids: Ids) -> None:
        if len(ids):
            self.read(ids, False)

    def decode(self, n: int, seed: int, depth: int = 0, logits: bool = False) -> dict[str, Any]:
        """Time n passes of one row from position `depth`."""
        ids = token_ids(seed, depth + n, self.n_vocab)
        self.forget()
        self._fill(ids[:depth])
        before, begin = self.stats(), time.perf_counter()
        for at in range(depth, depth + n):
            self.step(ids[at : at + 1], logits)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "experts": self._report(before)}

    def prompt(
        self, n: int, seed: int, depth: int = 0, logits: bool = True, then: int = 0
    ) -> dict[str, Any]:
        """Time a prompt of n tokens from position `depth`, with `then` single rows after it."""
        ids = token_ids(seed, depth + n + then, self.n_vocab)
        self.forget()
        self._fill(ids[:depth])
        before, begin, end = self.stats(), time.perf_counter(), depth + n
        self.read(ids[depth:end], logits)
        for at in range(end, end + then):
            self.step(ids[at : at + 1], logits)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "experts": self._report(before)}

    def answer(
        self, n: int, seed: int, then: list[int], routing: str | None = None
    ) -> dict[str, Any]:
        """Time a prompt of n tokens, and the single rows after it.

        then: numbers of rows, rising; "then_seconds" has the time of the first so many for each.
        routing: a .npy file, numpy shape [n, n_layer, n_expert_used]; the expert cache counts the
        prompt, of more than 32 tokens, as if its rows had chosen these ids. "experts" counts the
        rows after the prompt.
        """
        ids = token_ids(seed, n + then[-1], self.n_vocab)
        self.forget()
        with self.counting(routing):
            begin = time.perf_counter()
            self.read(ids[:n], False)
            seconds = time.perf_counter() - begin
        before, ends, begin = self.stats(), [], time.perf_counter()
        for at in range(n, len(ids)):
            self.step(ids[at : at + 1], False)
            ends.append(time.perf_counter() - begin)
        return {
            "seconds": seconds, "then_seconds": [ends[count - 1] for count in then],
            "experts": self._report(before),
        }  # fmt: skip

    def counting(self, routing: str | None) -> AbstractContextManager[None]:
        """Count prompts as if their rows had chosen recorded experts, if there is a cache."""
        return nullcontext()

    def read(self, ids: Ids, logits: bool) -> None:
        """Compute a prompt that continues the sequence."""
        for start in range(0, len(ids), self.chunk):
            self.step(ids[start : start + self.chunk], logits)

    def rows(
        self, n: int, seed: int, repeat: int, logits: bool = True, all_rows: bool = False
    ) -> dict[str, Any]:
        """Time `repeat` passes of n rows, each of other ids and from an empty sequence.

        The same ids again would find their experts on the device. all_rows: whether the pass
        returns results of all rows, not only of the last.
        """
        ids = token_ids(seed, n * repeat, self.n_vocab).reshape(repeat, n)
        before, times = self.stats(), []
        for fresh in ids:
            self.forget()
            begin = time.perf_counter()
            self.step(fresh, logits, all_rows)
            times.append(time.perf_counter() - begin)
        return {"times": times, "experts": self._report(before)}


def recorded_touch(policy: Any, recorded: Ids) -> Callable[[Any, Any, int], None]:
    """Return `policy.touch_batch` with the next of the recorded rows instead of those it is given.

    recorded: ids of one layer, numpy [n_rows, n_expert_used].
    """
    touch, at = policy.touch_batch, 0

    def replayed(chosen: npt.NDArray[np.int64], last: object, n_tokens: int) -> None:
        nonlocal at
        rows, n_expert = recorded[at : at + n_tokens], len(chosen)
        at += n_tokens
        newest = np.full(n_expert, -1, dtype=np.int64)
        newest[rows.reshape(-1)] = np.repeat(np.arange(len(rows)), rows.shape[1])
        touch(np.bincount(rows.reshape(-1), minlength=n_expert), newest, n_tokens)

    return replayed


class Ours(Side):
    """An engine of the moegraph package that PYTHONPATH selects."""

    def together(self, n_seqs: int, n: int, seed: int) -> dict[str, Any]:
        """Time n passes of one row for each of n_seqs sequences, all from position 0."""
        ids = token_ids(seed, n * n_seqs, self.n_vocab).reshape(n, n_seqs, 1)
        for seq in range(n_seqs):
            self.engine.reset(seq)
        before, begin = self.stats(), time.perf_counter()
        for rows in ids:
            self.engine.forward(rows, greedy=True)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "experts": self._report(before)}

    def __init__(self) -> None:
        self.engine: Any = None

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
        self.chunk = min(config["n_ubatch"], config["n_ctx"])
        plan = getattr(self.engine, "plan", None)
        n_slots = [int(n) for n in plan.n_slots] if plan else []
        return {"seconds": seconds, "n_slots": n_slots, "mode": self.engine.mode}

    def unload(self) -> dict[str, Any]:
        """Close the engine."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        return {}

    def forget(self) -> None:
        """Empty the sequence; what that costs the device is not part of the next time."""
        self.engine.reset()
        self.engine.device.synchronize()

    def step(self, ids: Ids, logits: bool, all_rows: bool = False) -> None:
        """Run one pass; without logits, only copy the device's argmax to the host."""
        self.engine.forward(ids, all_rows=all_rows, greedy=not logits)

    def read(self, ids: Ids, logits: bool) -> None:
        """Compute a prompt that continues the sequence, as `Engine.generate` does."""
        if hasattr(self.engine, "prefill"):
            self.engine.prefill(ids, greedy=not logits)
        else:  # other versions have only passes
            super().read(ids, logits)

    @contextmanager
    def counting(self, routing: str | None) -> Iterator[None]:
        """Replace what the policies of the layers are told of prompts; see `answer`.

        An engine replays the choice of single rows only.
        """
        told = self.engine.runner.cache.partial if routing else []
        recorded: Ids = np.load(routing) if routing else np.empty(0, np.int32)
        for layer in told:
            layer.policy.touch_batch = recorded_touch(layer.policy, recorded[:, layer.il])
        try:
            yield
        finally:
            for layer in told:
                del layer.policy.touch_batch

    def stats(self) -> Any:
        """Return counters of the expert cache, or None."""
        return self.engine.expert_stats()

    def memory(self) -> dict[str, Any]:
        """Return the engine's figures and those of Linux."""
        return {**host_memory(), **self.engine.memory()}

    def generate(
        self, n: int, n_prompt: int, seed: int, sampling: dict[str, Any], text: bool = True
    ) -> dict[str, Any]:
        """Time tokens 2 to n of `Engine.generate`, as in a user's request."""
        from moegraph import SamplingParams

        ids = token_ids(seed, n_prompt, self.n_vocab)
        before, params = self.stats(), SamplingParams(**sampling)
        begin, times = time.perf_counter(), []
        events = self.engine.generate(ids, params, max_tokens=n, ignore_eos=True, text=text)
        for _ in events:
            times.append(time.perf_counter())
        return {
            "seconds": times[-1] - times[0], "n": len(times) - 1,
            "first_token_s": times[0] - begin, "experts": self._report(before),
        }  # fmt: skip


class Upstream(Side):
    """A model and a context of unpatched llama.cpp."""

    def __init__(self, folder: str) -> None:
        oracle = Path(__file__).resolve().parents[1] / "tests" / "oracle"
        sys.path.insert(0, str(oracle))
        upstream: Any = importlib.import_module("upstream")
        self._module = upstream
        self._server = upstream.Server(upstream.Upstream(Path(folder)))
        self._context: Any = None

    def about(self) -> dict[str, Any]:
        """Return upstream's commit and library files."""
        about: dict[str, Any] = self._server.op_info({})
        return about

    def load(
        self, model: str, config: dict[str, Any], routing: str | None = None
    ) -> dict[str, Any]:
        """Load a model and make a context; config: see tests/oracle/upstream.py."""
        self.unload()
        cfg = self._module.Config.parse(config)
        begin = time.perf_counter()
        loaded = self._server.model(model, cfg)
        self._context = loaded.context(cfg, False)
        seconds = time.perf_counter() - begin
        self.n_vocab, self.chunk = loaded.n_vocab, cfg.n_batch
        self._llama = self._server.up.llama
        self._batch = self._llama.llama_batch_init(cfg.n_batch, 0, 1)
        return {"seconds": seconds}

    def unload(self) -> dict[str, Any]:
        """Free the model."""
        if self._context is not None:
            self._llama.llama_batch_free(self._batch)
            self._context = None
        self._server.op_unload({})
        return {}

    def forget(self) -> None:
        """Empty the sequence."""
        self._llama.llama_synchronize(self._context.handle)
        self._context.clear()

    def step(self, ids: Ids, logits: bool, all_rows: bool = False) -> None:
        """Run one llama_decode, which always copies the logits, of the last row or of all."""
        batch, n, past = self._batch, len(ids), self._context.n_past
        batch.n_tokens = n
        for i, token in enumerate(ids.tolist()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, past + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, all_rows or i == n - 1
        if self._llama.llama_decode(self._context.handle, batch) != 0:
            raise RuntimeError(f"llama_decode failed: {self._server.up.log_tail(3)}")
        self._context.n_past += n
        self._llama.llama_synchronize(self._context.handle)


def answer(side: Any, line: str) -> dict[str, Any]:
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
    try:
        side: Any = Ours() if sys.argv[1] == "ours" else Upstream(sys.argv[2])
        first = {"ok": True, **side.about()}
    except Exception as error:
        first = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(first), file=replies, flush=True)
    for line in sys.stdin if first["ok"] else ():
        print(json.dumps(answer(side, line)), file=replies, flush=True)


if __name__ == "__main__":
    main()
