#!/usr/bin/env python3
"""Time the first token of a question about a picture, alone and beside answers under way.

moegraph serve encodes on the CPU and on a device; llama-server, if given, likewise. Each picture is
new noise, and the encoder has random weights in the shape of Qwen3.5's, unless --mmproj names one.

    scripts/bench_picture.py 35b.gguf --device cuda:0 --llama-server bin/llama-server --out p.jsonl
    scripts/bench_picture.py mini35b.gguf --tower SMALL --on cpu --pictures 64x64 --tokens 100
"""

from __future__ import annotations

import argparse
import base64
import struct
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
from bench_server import Stream, free_port, gaps, ms, served
from modelgen import mmproj

from moegraph.arch import open_model

Side = tuple[str, list[str], dict[str, str]]


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.bench_parser(__doc__, samples=3)
    p.add_argument("--mmproj", type=bench.existing, metavar="FILE")
    p.add_argument("--tower", choices=["TRUE", "SMALL"], default="TRUE", help="without --mmproj")
    p.add_argument("--llama-server", type=bench.existing, metavar="FILE")
    p.add_argument("--on", nargs="+", default=["cpu", "cuda:0"], help="where the encoder is")
    p.add_argument("--pictures", nargs="+", default=["640x480", "1280x960"], metavar="WxH")
    p.add_argument("--beside", type=int, nargs="+", default=[0, 8], help="answers under way")
    p.add_argument("--tokens", type=int, default=1500, help="of each of them, at most")
    return p


def picture(size: str, seed: int) -> str:
    """Return a BMP of noise, as a data URI; rows of width times 3 bytes are multiples of 4."""
    width, height = map(int, size.split("x"))
    pixels = np.random.default_rng(seed).bytes(3 * width * height)
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    data = b"BM" + struct.pack("<IHHI", 54 + len(pixels), 0, 0, 54) + head + pixels
    return "data:image/bmp;base64," + base64.b64encode(data).decode()


def ask(port: int, size: str, n_beside: int, n_tokens: int, seed: int) -> bench.Line:
    """Return the time to the first token, and what is between tokens of the others meanwhile."""
    body = {"max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, "timings_per_token": True}
    texts = [f"def f{seed + at}(x):" for at in range(n_beside)]  # llama-server refuses ids here
    others = [Stream(port, "/v1/completions", {**body, "prompt": one}).send() for one in texts]
    parts = [{"type": "image_url", "image_url": {"url": picture(size, seed)}},
             {"type": "text", "text": "What is this?"}]  # fmt: skip
    question = {**body, "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    while any(len(one.times) < 20 and one.is_alive() for one in others):
        time.sleep(0.01)
    asked = Stream(port, "/v1/chat/completions", question).send().done()
    is_beside = all(one.is_alive() for one in others)
    for one in others:
        one.leave()
    if not is_beside:
        why = [one.error for one in others if one.error] or ["raise --tokens"]
        raise bench.BenchError(f"answers ended before the picture was read: {why[0]}")
    between = gaps(others, asked.begun, asked.times[0])
    return {"first_s": round(asked.times[0] - asked.begun, 3),
            "n_prompt": asked.usage.get("prompt_tokens"),
            "beside_p50_ms": ms(between, 0.5), "beside_p99_ms": ms(between, 0.99)}  # fmt: skip


def commands(args: argparse.Namespace, port: int, on: str, file: Path) -> list[Side]:
    """Return name, command and environment of each server."""
    common = ["-m", str(args.model), "--mmproj", str(file), "--port", str(port), "-c", "32768",
              "-np", str(max(args.beside) + 1)]  # fmt: skip
    ours = [sys.executable, "-m", "moegraph", "serve", "--log-format", "off", "--device",
            args.device, "--mmproj-device", on]  # fmt: skip
    found = [("moegraph", [*ours, *common], bench.with_path("PYTHONPATH", bench.ROOT))]
    if args.llama_server:
        theirs = [str(args.llama_server), "--kv-unified", "-fa", "on", "-ngl", "99", *common]
        theirs += ["--no-mmproj-offload"] * (on == "cpu")
        found.append(("llama-server", theirs, bench.with_libraries(args.llama_server)))
    return found


def measure(args: argparse.Namespace) -> None:
    """Measure each server with each place of the encoder; an error of one is a line."""
    port, found = free_port(), dict[tuple[str, ...], list[float]]()
    with tempfile.TemporaryDirectory() as folder, open_model(args.model) as model:
        tower, path = getattr(mmproj, args.tower), Path(folder) / "mmproj.gguf"
        file = args.mmproj or mmproj.write_mmproj(path, model.hparams.n_embd, 0, tower)
        for on in args.on:
            for name, command, env in commands(args, port, on, file):
                works = product(args.pictures, args.beside, range(args.samples + 1))
                try:
                    with served(command, port, env):
                        for seed, (size, n, at) in enumerate(works):
                            line = ask(port, size, n, args.tokens, 100 * seed)
                            key = {"server": name, "encoder": on, "picture": size, "beside": n}
                            if at:
                                bench.note(args.out, {**key, **line})
                                times = found.setdefault(tuple(map(str, key.values())), [])
                                times.append(line["first_s"])
                except (RuntimeError, OSError, bench.BenchError) as error:
                    bench.note(args.out, {"server": name, "encoder": on, "error": str(error)})
    head = ["server", "encoder", "picture", "beside", "first token, s"]
    print(bench.table(head, [[*key, bench.spread(x, 3)] for key, x in found.items()]), end="")


if __name__ == "__main__":
    sys.exit(bench.main(parser(), measure))
