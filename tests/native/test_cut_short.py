"""A model file that is cut short in use: an error that names it, in a process that lives on."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.drafters import write_small
from helpers.shared import greedy_tokens, prompt

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import ModelFileError
from moegraph.ggml.handles import live_handles
from moegraph.ggml.mapped import WatchedFiles
from moegraph.gguf import resolve_target

ROOT = Path(__file__).resolve().parents[2]
COLD = {"pin_layers": 0, "cache_slots": 0, "miss": "cpu"}
FEW = {"pin_layers": 0, "cache_slots": 30, "miss": "cpu"}


def config(**settings: object) -> EngineConfig:
    return EngineConfig(device="cpu", n_threads=1, n_ctx=256, n_ubatch=16, **settings)


@pytest.fixture
def copy(tmp_path: Path, model_path) -> Path:
    return Path(shutil.copy(model_path("legacy32"), tmp_path / "cut.gguf"))


def cut(path: Path, tensor: str) -> int:
    """Truncate a model file where a tensor begins; return that offset."""
    with open_model(path) as model:
        offset = model.tensors[tensor].offset
    os.truncate(path, offset)
    return offset


# The last layer's experts lie behind everything that a pass needs before them.
CASES = [
    ({"mode": "whole"}, "blk.0.attn_norm.weight"),
    ({"mode": "layered"}, "blk.3.ffn_gate_exps.weight"),
    (COLD, "blk.7.ffn_gate_exps.weight"),
    (FEW, "output_norm.weight"),
]


@pytest.mark.parametrize(("settings", "tensor"), CASES)
def test_the_engine_refuses_the_model_and_another_one_is_right(copy, model_path, settings, tensor):
    with Engine.load(model_path("legacy32"), config()) as other:
        ids = prompt(other, 20)
        expected = greedy_tokens(other, ids, 40)
        handles = live_handles()
        with Engine.load(copy, config(**settings)) as engine:
            check_cut(engine, copy, tensor, expected)
            assert greedy_tokens(other, ids, 8) == expected[:8]
        gc.collect()
        assert live_handles() == handles
        assert greedy_tokens(other, ids, 8) == expected[:8]


def check_cut(engine: Engine, path: Path, tensor: str, expected: list[int]) -> None:
    """Cut the file in the middle of a generation and check what comes of it."""
    ids = prompt(engine, 20)
    stream = engine.generate(ids, max_tokens=40, text=False)
    tokens = [next(stream).token for _ in range(4)]
    offset = cut(path, tensor)
    with pytest.raises(ModelFileError) as caught:
        tokens.extend(event.token for event in stream)
    line = str(caught.value)
    assert str(path) in line and "\n" not in line and "could not be read" in line
    assert int(re.search(r"byte (\d+)", line)[1]) >= offset - offset % 4096
    assert tokens == expected[: len(tokens)], "a token came out of zeros"
    for _ in range(2):
        with pytest.raises(ModelFileError, match="load the model again"):
            greedy_tokens(engine, ids, 2)


CHILD = (
    ("-t", "1"),
    ("-t", "1", "--pin-layers", "0", "--cache-slots", "64", "--miss", "cpu"),
)


@pytest.mark.parametrize("options", CHILD, ids=["dense", "slots"])
def test_a_run_ends_with_status_3_and_one_line(tmp_path: Path, options: tuple[str, ...]) -> None:
    path = Path(shutil.copy(resolve_target("tiny"), tmp_path / "cut.gguf"))
    child = subprocess.Popen(
        [sys.executable, "-m", "moegraph", "run", path, "-p", "def f", "-n", "100000", "-c", "0",
         "--ignore-eos", "--temp", "0", "--device", "cpu", "--quiet", *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout.read(8), child.stderr.read()
        tensor = "blk.7.ffn_gate_exps.weight" if "cpu" in options[-1] else "blk.0.attn_norm.weight"
        cut(path, tensor)
        _, said = child.communicate(timeout=120)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 3, said
    (line,) = said.decode().splitlines()
    # the second if a check of the file's size comes before the next read
    assert str(path) in line and ("could not be read" in line or "the file shrank" in line)


@pytest.mark.parametrize("kind", ["dflash", "safetensors"])
def test_a_drafter_that_is_cut_short_in_use_is_an_error(
    tmp_path: Path, model_path: Callable[[str], Path], kind: str
) -> None:
    """A drafter with embeddings of its own reads them where its file is mapped."""
    path = write_small(tmp_path, kind, has_embedding=True)
    settings = {"spec": "dflash", "draft": str(path), "cpu_reference": True}
    with Engine.load(model_path("legacy32"), config(**settings)) as engine:
        ids = prompt(engine, 20)
        expected = greedy_tokens(engine, ids, 40)
        stream = engine.generate(ids, max_tokens=40, text=False)
        tokens = [next(stream).token for _ in range(4)]
        os.truncate(path, 4096)
        with pytest.raises(ModelFileError, match=f"{re.escape(str(path))}: byte .* could not be"):
            tokens.extend(event.token for event in stream)
        assert tokens == expected[: len(tokens)]
        with pytest.raises(ModelFileError, match="load the model again"):
            greedy_tokens(engine, ids, 2)


def test_a_cut_while_loading_is_an_error_too(copy, monkeypatch):
    real = WatchedFiles.__init__

    def cut_first(self, parts):
        real(self, parts)
        os.truncate(copy, os.path.getsize(copy) // 2)

    monkeypatch.setattr(WatchedFiles, "__init__", cut_first)
    handles = live_handles()
    with pytest.raises(ModelFileError, match=re.escape(str(copy))):
        Engine.load(copy, config())
    assert live_handles() == handles


def overwrite(path: Path, tensor: str) -> None:
    """Write another byte over the first of a tensor: the file keeps its size."""
    before = path.stat().st_mtime_ns
    with open_model(path) as model, open(path, "r+b", buffering=0) as file:
        while path.stat().st_mtime_ns == before:  # its clock ticks every few milliseconds
            file.seek(model.tensors[tensor].offset)
            file.write(b"x")


@pytest.mark.parametrize("settings", [{"mode": "whole"}, COLD])
def test_a_file_that_is_written_to_is_refused_at_the_next_request(copy, settings):
    with Engine.load(copy, config(**settings)) as engine:
        ids = prompt(engine, 5)
        expected = greedy_tokens(engine, ids, 4)
        assert greedy_tokens(engine, ids, 4) == expected
        overwrite(copy, "blk.7.ffn_down_exps.weight")
        for _ in range(2):
            with pytest.raises(ModelFileError, match="written to while .* load the model again"):
                greedy_tokens(engine, ids, 2)


def test_a_file_that_is_replaced_or_removed_stays_as_it_was(copy, model_path, tmp_path):
    with Engine.load(copy, config(**COLD)) as engine:
        ids = prompt(engine, 5)
        expected = greedy_tokens(engine, ids, 4)
        shutil.copy(model_path("kquant40"), tmp_path / "other.gguf")
        os.replace(tmp_path / "other.gguf", copy)
        assert greedy_tokens(engine, ids, 4) == expected
        copy.unlink()
        assert greedy_tokens(engine, ids, 4) == expected


def test_a_file_that_somebody_still_writes_is_not_loaded(copy, monkeypatch):
    real = WatchedFiles.__init__

    def write_first(self, parts):
        real(self, parts)
        overwrite(copy, "output_norm.weight")

    monkeypatch.setattr(WatchedFiles, "__init__", write_first)
    handles = live_handles()
    with pytest.raises(ModelFileError, match=f"{re.escape(str(copy))}: the file was written to"):
        Engine.load(copy, config())
    assert live_handles() == handles


def mapped(path: Path, n_pages: int) -> np.ndarray:
    path.write_bytes(os.urandom(4096 * n_pages))
    return np.memmap(path, np.uint8, "r")


def test_what_is_still_in_the_file_is_read_as_it_was(tmp_path):
    data = mapped(tmp_path / "a", 64)
    before = data.tobytes()
    with_watch = WatchedFiles([(tmp_path / "a", data)])
    os.truncate(tmp_path / "a", 4096 * 10)
    threads = [threading.Thread(target=data.sum) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert data[: 4096 * 10].tobytes() == before[: 4096 * 10] and not data[4096 * 10 :].any()
    with pytest.raises(ModelFileError, match="byte 40960 could not be read"):
        with_watch.check()
    with_watch.close()


FOREIGN = """
import faulthandler, os, sys
import numpy as np
from moegraph.ggml.mapped import WatchedFiles
path = sys.argv[1]
open(path, "wb").write(b"x" * 8192)
data, watched = (np.memmap(path, np.uint8, "r") for _ in range(2))
watch = WatchedFiles([(path, watched)])
if sys.argv[2] == "closed":
    watch.close()
if sys.argv[2] == "sent":
    os.kill(os.getpid(), 7)
os.truncate(path, 0)
print((watched if sys.argv[2] == "closed" else data)[5000])
"""


@pytest.mark.parametrize("how", ["unwatched", "closed", "sent"])
def test_any_other_bus_error_ends_the_process_as_before(tmp_path, how):
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN, tmp_path / "f", how], cwd=ROOT, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGBUS and done.stdout == b"", done.stderr
