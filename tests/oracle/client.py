"""Talking to the oracle process from the tests."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Nodes = dict[tuple[str, int], Array]

CHECKOUT = Path(__file__).resolve().parents[2]
# The longest single request: 2,000 rows of the largest test model on a busy 2-core machine.
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Step:
    """One llama_decode: its tokens, which logits to return, which named nodes to keep.

    embd: rows of a picture in place of tokens, with axes [3, n] and n_positions; only the logits of
    the last one are returned.
    """

    tokens: Sequence[int] = ()
    rows: str = "all"
    nodes: Sequence[str] = ()
    embd: Array | None = None
    axes: Array | None = None
    n_positions: int = 0


@dataclass
class StepResult:
    """What one step gave: logits [rows, n_vocab] and nodes by (name, il)."""

    logits: npt.NDArray[np.float32] | None = None
    nodes: Nodes = field(default_factory=dict)
    seconds: float = 0.0


class OracleError(RuntimeError):
    """The oracle refused a request or died."""


def oracle_folder() -> Path | None:
    """Return the folder of unpatched upstream: MOEGRAPH_ORACLE, else .oracle in the checkout."""
    named = os.environ.get("MOEGRAPH_ORACLE")
    folder = Path(named) if named else CHECKOUT / ".oracle"
    return folder if folder.is_dir() else None


def _without(variable: str, *patterns: str) -> str:
    """Return a search path less the folders that hold a match of one of the patterns."""
    folders = os.environ.get(variable, "").split(os.pathsep)
    kept = [f for f in folders if f and not any(any(Path(f).glob(p)) for p in patterns)]
    return os.pathsep.join(kept)


def _environment() -> dict[str, str]:
    """Return an environment in which nothing of this project can be found or steers ggml."""
    private = ("MOEGRAPH", "LLAMA_", "GGML_", "LD_PRELOAD")
    env = {k: v for k, v in os.environ.items() if not k.startswith(private)}
    env["PYTHONPATH"] = _without("PYTHONPATH", "moegraph", "llama_cpp")
    env["LD_LIBRARY_PATH"] = _without("LD_LIBRARY_PATH", "libggml*", "libllama*")
    return env


class Oracle:
    """A persistent upstream process. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._scratch = Path(tempfile.mkdtemp(prefix="oracle-"))
        self._stderr = open(self._scratch / "stderr", "w+b")
        script = Path(__file__).with_name("upstream.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(folder.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_environment(),
            cwd=self._scratch,
        )
        self._receive()

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and remove its files."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def has_ended(self) -> bool:
        """Return whether the process is gone."""
        return self._process.poll() is not None

    def _receive(self) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], TIMEOUT_S)
        line = out.readline() if ready else b""
        if not line:
            self._stderr.seek(0)
            tail = self._stderr.read().decode(errors="replace")[-2000:]
            why = "no answer" if not ready else f"exit code {self._process.wait()}"
            raise OracleError(f"oracle in {self.folder}: {why}\n{tail}")
        reply: dict[str, Any] = json.loads(line)
        if not reply["ok"]:
            raise OracleError(reply["error"])
        return reply

    def request(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send one request and return its reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
        self._process.stdin.flush()
        return self._receive()

    def info(self) -> dict[str, Any]:
        """Return versions and the library files in use."""
        return self.request("info")

    def run(self, model: Path, steps: Sequence[Step], **cfg: Any) -> list[StepResult]:
        """Run a fresh sequence, a llama_decode a step. cfg: see upstream.Config."""
        out = self._scratch / "out.npz"
        raw: list[dict[str, Any]] = [
            {"tokens": [int(t) for t in s.tokens], "rows": s.rows, "nodes": list(s.nodes)}
            for s in steps
        ]
        for i, step in enumerate(steps):
            if step.embd is not None and step.axes is not None:
                np.save(self._scratch / f"embd{i}.npy", step.embd)
                raw[i] |= {"embd": str(self._scratch / f"embd{i}.npy"), "axes": step.axes.tolist()}
                raw[i]["n_positions"] = step.n_positions
        reply = self.request("run", model=str(model), cfg=cfg, steps=raw, out=str(out))
        results = [StepResult(seconds=s) for s in reply["seconds"]]
        with np.load(out) as arrays:
            for key in arrays.files:
                if key.startswith("logits"):
                    results[int(key[len("logits") :])].logits = arrays[key]
                else:
                    _, i, name, il = key.split("/")
                    results[int(i)].nodes[name, int(il)] = arrays[key]
        out.unlink()
        return results

    def logits(self, model: Path, tokens: Sequence[int], **cfg: Any) -> npt.NDArray[np.float32]:
        """Return the logits of every token of one prompt, [n_tokens, n_vocab]."""
        result = self.run(model, [Step(tokens)], **cfg)[0].logits
        assert result is not None
        return result

    def greedy(
        self, model: Path, prompts: Sequence[Sequence[int]], n: int, **cfg: Any
    ) -> tuple[list[list[int]], list[float]]:
        """Return n argmax tokens after each prompt, and the smallest top-two margin of each."""
        raw = [[int(t) for t in p] for p in prompts]
        reply = self.request("greedy", model=str(model), cfg=cfg, prompts=raw, n=n)
        return reply["ids"], reply["margins"]

    def draft(
        self, model: Path, parts: Sequence[Sequence[int]], n: int, **cfg: Any
    ) -> list[npt.NDArray[np.float32]]:
        """Have model and MTP block read a text in parts, and draft n tokens after each of them.

        Return the logits after each part, [n + 1, n_vocab], the model's of the last row first.
        """
        out = self._scratch / "out.npz"
        raw = [[int(t) for t in part] for part in parts]
        self.request("draft", model=str(model), cfg=cfg, parts=raw, n=n, out=str(out))
        with np.load(out) as arrays:
            found = [arrays[f"logits{i}"] for i in range(len(parts))]
        out.unlink()
        return found

    def block(
        self, model: Path, drafter: Path, features: npt.NDArray[np.float32], anchor: int, mask: int,
        n: int, causal: bool = False, **cfg: Any,
    ) -> npt.NDArray[np.float32]:  # fmt: skip
        """Fill in a block of n rows with a DFlash drafter; return its logits [n, n_vocab].

        features: of the positions before, [n_past, n_layers * n_embd].
        """
        out, given = self._scratch / "out.npz", self._scratch / "features.npy"
        np.save(given, features)
        fields = {"drafter": str(drafter), "features": str(given), "out": str(out)}
        more = {"anchor": anchor, "mask": mask, "n": n, "causal": causal}
        self.request("block", model=str(model), cfg=cfg, **fields, **more)
        with np.load(out) as arrays:
            logits: npt.NDArray[np.float32] = arrays["logits"]
        out.unlink()
        return logits

    def pictures(
        self, model: Path, mmproj: Path, text: str, files: Sequence[Path], n: int, **cfg: Any
    ) -> tuple[npt.NDArray[np.float32], list[Array]] | None:
        """Read a text with pictures, then n greedy tokens; None without a libmtmd.

        Return their logits, and the rows of each picture.
        """
        folders = (self.folder / "llama_cpp/lib", CHECKOUT / "build/upstream/llama_cpp/lib")
        found = [path for folder in folders for path in folder.glob("libmtmd.so*")]
        if not found:
            return None
        link, out = self._scratch / "libmtmd.so", self._scratch / "out.npz"
        if not link.is_symlink():
            link.symlink_to(found[0])
            for backend in found[0].parent.glob("libggml-cuda.so*"):  # what it was linked to
                (self._scratch / backend.name).symlink_to(backend)
        self.request(
            "pictures", model=str(model), mmproj=str(mmproj), mtmd=str(self._scratch), text=text,
            files=[str(file) for file in files], n=n, out=str(out), cfg=cfg,
        )  # fmt: skip
        with np.load(out) as arrays:
            rows = [arrays[f"embd{i}"] for i in range(len(files))]
            logits: npt.NDArray[np.float32] = arrays["logits"]
        out.unlink()
        return logits, rows

    def tokenize(self, model: Path, text: str) -> list[int]:
        """Return the token ids of a text, no special tokens added or parsed."""
        ids: list[int] = self.request("tokenize", model=str(model), text=text)["ids"]
        return ids
