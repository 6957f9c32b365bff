#!/usr/bin/env python3
"""Time `moegraph run` from the start of its process to its first text, beside llama-completion.

Each sample is a process of its own that reads a prompt of about so many tokens and writes some
text; the time ends with the first byte of it. Both get the same prompt, in turn, and are ended
then. The first sample of each is not counted: it brings the file into the page cache. Where
llama-completion fails, a line says why, and moegraph is measured alone.

    scripts/bench_first.py 35b.gguf --llama-completion bin/llama-completion --vram 7.7 \\
        --theirs "-ngl 99 -ncmoe 30" --prompt 32 512
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

from moegraph.text.tokenizer import Tokenizer

# Tokens of an answer: those of random weights may be no whole character.
_ANSWER = 16


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.bench_parser(__doc__, samples=3)
    p.add_argument("--llama-completion", type=bench.existing, required=True, metavar="FILE")
    p.add_argument("--theirs", default="-ngl 99", metavar="OPTIONS", help="of llama-completion")
    p.add_argument("--prompt", type=bench.positive, nargs="+", default=[32, 512], metavar="TOKENS")
    p.add_argument("--vram", default="auto", help="limit of device memory of moegraph, in GiB")
    return p


def first_text(command: Sequence[str], env: Mapping[str, str]) -> float:
    """Return the seconds from the start of a process to the first byte that it writes."""
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout is not None
        found = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - begin
        process.kill()
        process.wait()
        process.stdout.close()
        if not found:
            raise bench.BenchError(f"{command[0]}: {bench.last_words(errors)}")
    return seconds


def prompt_text(model: Path, n_tokens: int) -> str:
    """Return a text of about n tokens."""
    words = "return the value of each name in this list or range and print it with a str".split()
    many = [words[at * at % len(words)] for at in range(n_tokens)]
    with Tokenizer(model) as tokenizer:
        n = len(tokenizer.encode(" ".join(many)))
    return " ".join(many[: max(1, n_tokens * n_tokens // n)])


def commands(args: argparse.Namespace, prompt: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return the command and the environment of each side."""
    # not -f: llama-completion died there with std::bad_cast, on a machine with another libstdc++
    common = ["-p", prompt, "-n", str(_ANSWER), "--ignore-eos", "--temp", "0"]
    ours = [sys.executable, "-m", "moegraph", "run", str(args.model), *common, "--device",
            args.device, "--vram", args.vram, "--profile", "none"]  # fmt: skip
    theirs = [str(args.llama_completion), "-m", str(args.model), *common, "-no-cnv",
              "--no-display-prompt", "--simple-io", *args.theirs.split()]  # fmt: skip
    return {
        "moegraph": (ours, bench.with_path("PYTHONPATH", bench.ROOT)),
        "upstream": (theirs, bench.with_libraries(args.llama_completion)),
    }


def measure(args: argparse.Namespace) -> None:
    """Take all samples and print a table."""
    gone, rows = set[str](), list[list[str]]()
    for n in args.prompt:
        sides = commands(args, prompt_text(args.model, n))
        found: dict[str, list[float]] = {name: [] for name in sides}
        for at in range(args.samples + 1):
            for name in [name for name in sides if name not in gone]:
                line: bench.Line = {"system": name, "n_prompt": n, "vram": args.vram}
                try:
                    seconds = round(first_text(*sides[name]), 3)
                except bench.BenchError as error:
                    if name == "moegraph":
                        raise
                    gone.add(name)
                    print(error, file=sys.stderr, flush=True)
                    bench.append_line(args.out, {**line, "error": str(error)})
                    continue
                if at:
                    found[name].append(seconds)
                    bench.append_line(args.out, {**line, "seconds": seconds})
        rows += [[str(n), name, bench.spread(x, 2)] for name, x in found.items() if x]
    print(bench.table(["prompt", "system", "s, median (least .. most)"], rows), end="")


if __name__ == "__main__":
    sys.exit(bench.main(parser(), measure))
