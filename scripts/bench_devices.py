"""Measure several devices against one: decode, prompts, and passes over several sequences.

    scripts/bench_devices.py MODEL cuda:0 cuda:0,cuda:1 --share 0.6 --share 1

Every entry of DEVICES gets the same number of expert slots in all: a share of all experts. So two
cards with a share of 0.6 hold 30 % of all expert bytes each, which are 60 % of those of their own
layers. Entries are measured in turn, and the turns repeated, so that a slow moment hits all.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.kinds import Kind
from moegraph.modelfile import open_model

ROOT = Path(__file__).resolve().parents[1]
Ids = npt.NDArray[np.int32]


def text_ids(engine: Engine, n: int) -> Ids:
    """Return n tokens of this project's own pages."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs").glob("*.md")))
    ids = engine.tokenizer.encode(text)
    while len(ids) < n:
        ids = [*ids, *ids]
    return np.array(ids[:n], np.int32)


def decode(engine: Engine, ids: Ids, n: int) -> float:
    """Return tokens a second of an answer, the first 16 tokens left out."""
    times = []
    for event in engine.generate(ids, max_tokens=n, text=False, ignore_eos=True):
        times.append((event.n_generated, event.decode_s))
    (first, start), (last, end) = times[min(16, len(times) - 2)], times[-1]
    return (last - first) / (end - start)


def prompt(engine: Engine, ids: Ids) -> float:
    """Return tokens a second of a prompt."""
    engine.reset()
    start = time.perf_counter()
    engine.prefill(ids, greedy=True)
    return len(ids) / (time.perf_counter() - start)


def together(engine: Engine, ids: Ids, n_seq: int, n: int) -> float:
    """Return tokens a second of n passes of one row for each of n_seq sequences.

    Each sequence has a text of its own before it, and goes on greedily.
    """
    rows = np.zeros(n_seq, np.int32)
    for seq in range(n_seq):
        engine.reset(seq)
        own = ids[seq * 131 :][:128]
        rows[seq] = engine.prefill(own, seq, greedy=True).argmax[-1]  # type: ignore[index]
    passes, start = engine.passes, 0.0
    for at in range(n):
        if at == n // 4:
            start = time.perf_counter()
        passes.submit(rows[:, None], range(n_seq), False, True, None, Kind.DECODE)
        rows = passes.collect().argmax  # type: ignore[assignment]
    return (n - n // 4) * n_seq / (time.perf_counter() - start)


def settings_of(model: Path, share: float) -> dict[str, Any]:
    """Return the settings that give all devices together a share of the experts."""
    if share >= 1:
        return {}
    with open_model(model) as file:
        hp = file.hparams
    return {"pin_layers": 0, "cache_slots": round(share * hp.n_layer * hp.n_expert)}


def measure(args: argparse.Namespace, device: str, share: float, say: Callable[..., None]) -> None:
    """Measure one entry."""
    base = {**settings_of(args.model, share), "device": device, "profile": "none"}
    longest = max(args.prompts) + 1024
    with Engine.load(args.model, EngineConfig(n_ctx=longest, **base)) as engine:
        ids = text_ids(engine, longest)
        layers = [[s.layers.start, s.layers.stop] for s in engine.stages]
        say(what="layers", value=layers)
        for n in args.prompts:
            speeds = [prompt(engine, ids[:n]) for _ in range(args.repeat + 1)][1:]
            say(what=f"prompt {n}", value=round(float(np.median(speeds)), 1), unit="tok/s")
        speeds = [decode(engine, ids[:512], args.tokens) for _ in range(args.repeat)]
        say(
            what="decode",
            value=round(max(speeds), 2),
            unit="tok/s",
            all=np.round(speeds, 2).tolist(),
        )
        stats = engine.expert_stats()
        say(what="hit rate", value=round(stats.cache.hit_rate, 4) if stats else 1.0)
        say(
            what="device peak",
            value=round(engine.memory()["device_peak_bytes"] / 2**30, 2),
            unit="GiB",
        )
    for n_seq in args.sequences:
        config = EngineConfig(n_ctx=1024, n_seq=n_seq, **base)
        with Engine.load(args.model, config) as engine:
            ids = text_ids(engine, 131 * n_seq + 256)
            speed = max(together(engine, ids, n_seq, args.passes) for _ in range(2))
            say(what=f"{n_seq} sequences", value=round(speed, 1), unit="tok/s")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("devices", nargs="+")
    parser.add_argument("--share", type=float, action="append", default=None)
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 8192])
    parser.add_argument("--sequences", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--passes", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    for share in args.share or [0.6, 1.0]:
        for device in args.devices:

            def say(device: str = device, share: float = share, **line: Any) -> None:
                print(f"{share:5.0%}  {device:24} {line['what']:14} {line['value']}", flush=True)
                if args.out:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"device": device, "share": share, **line}) + "\n")

            measure(args, device, share, say)


if __name__ == "__main__":
    main()
