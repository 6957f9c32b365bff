#!/usr/bin/env python3
"""Stands in for llama-bench: takes its options and prints rows of its shape, computing nothing.

With -npp it is llama-batched-bench. Turn after turn gets quicker. With -lm none, prompts are
quicker and decoding is slower.

What llama-bench prints was noted from commit 0c1e57098 with `-o jsonl`. `-m` must be a file.
FAKE_LLAMA_BENCH=fail ends with an error.
"""

from __future__ import annotations

import itertools
import json
import os
import sys


def options(arguments: list[str]) -> dict[str, list[str]]:
    """Return the values of each option, in order."""
    found: dict[str, list[str]] = {}
    at = 0
    while at < len(arguments):
        if arguments[at] == "--no-warmup":
            at += 1
            continue
        found.setdefault(arguments[at], []).append(arguments[at + 1])
        at += 2
    return found


def numbers(given: dict[str, list[str]], name: str, default: str) -> list[int]:
    """Return the whole numbers of an option that takes a list."""
    return [int(x) for text in given.get(name, [default]) for x in text.split(",")]


def tests(given: dict[str, list[str]]) -> list[tuple[int, int]]:
    """Return (n_prompt, n_gen) of the tests asked for."""
    found = [(n, 0) for n in numbers(given, "-p", "512") if n]
    found += [(0, n) for n in numbers(given, "-n", "128") if n]
    pairs = (text.split(",") for text in given.get("-pg", []))
    return found + [(int(prompt), int(gen)) for prompt, gen in pairs]


def main() -> int:
    """Print one row for each test."""
    given = options(sys.argv[1:])
    if os.environ.get("FAKE_LLAMA_BENCH") == "fail" or not os.path.isfile(given["-m"][0]):
        print("error: failed to load model", file=sys.stderr)
        return 1
    if "-npp" in given:
        (gen,), (threads,) = numbers(given, "-ntg", ""), numbers(given, "-t", "4")
        for at, prompt in enumerate(numbers(given, "-npp", "")):
            row = {"pp": prompt, "tg": gen, "n_threads": threads, "speed_pp": 500.0 + at}
            print("no row\n" + json.dumps({**row, "speed_tg": 10.0 * threads + at}), flush=True)
        return 0
    n_samples = numbers(given, "-r", "5")[0]
    axes = [numbers(given, name, default) for name, default in (("-d", "0"), ("-t", "4"))]
    modes = given.get("-lm", ["auto"])[0].split(",")
    for mode, depth, threads, (prompt, gen) in itertools.product(modes, *axes, tests(given)):
        tps = 10.0 * threads if gen else 1000.0
        if mode == "none":
            tps *= 0.5 if gen else 2.0
        samples = [tps / 2, *(tps + at for at in range(n_samples - 1))]
        print(json.dumps({
            "build_commit": "0c1e570", "n_ubatch": numbers(given, "-ub", "512")[0],
            "n_threads": threads, "n_cpu_moe": numbers(given, "-ncmoe", "0")[0],
            "load_mode": mode, "n_prompt": prompt, "n_gen": gen, "n_depth": depth, "avg_ts": tps,
            "samples_ts": samples[:n_samples], "model_filename": given["-m"][0],
        }), flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
