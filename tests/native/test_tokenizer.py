"""The tokenizer on the patched library, with the shipped model's vocabulary."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from helpers.shared import PRESETS, write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from moegraph.arch import open_model
from moegraph.errors import InternalError, ModelFileError, RequestError
from moegraph.ggml import lib
from moegraph.gguf import resolve_target
from moegraph.text import tokenizer as tokenizer_module
from moegraph.text.tokenizer import MAX_PROMPT_BYTES, Tokenizer

TINY = resolve_target("tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    with Tokenizer(TINY) as opened:
        yield opened


def test_the_vocabulary_is_that_of_the_file(tokenizer: Tokenizer) -> None:
    with open_model(TINY) as model:
        tokens = model.kv["tokenizer.ggml.tokens"]
        assert tokenizer.n_vocab == len(tokens) == model.hparams.n_vocab
        assert tokenizer.eos == model.kv["tokenizer.ggml.eos_token_id"]
        special = tokens[tokenizer.eos]
    assert tokenizer.eos in tokenizer.eog_ids
    assert tokenizer.piece(tokenizer.eos) == b""
    assert tokenizer.piece(tokenizer.eos, special=True).decode() == special
    assert tokenizer.encode(special) == [tokenizer.eos]
    assert len(tokenizer.encode(special, parse_special=False)) > 1


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_text_comes_back(text: str) -> None:
    opened = shared()
    ids = opened.encode(text, add_special=False, parse_special=False)
    assert opened.decode(ids) == text
    assert b"".join(opened.piece(token) for token in ids) == text.encode()


@cache
def shared() -> Tokenizer:
    return Tokenizer(TINY)


def test_ids_that_do_not_exist(tokenizer: Tokenizer) -> None:
    for token in (-1, tokenizer.n_vocab, 2**31):
        with pytest.raises(RequestError, match=f"token id {token}"):
            tokenizer.piece(token)
        with pytest.raises(RequestError, match=f"token id {token}"):
            tokenizer.is_special(token)


def test_text_that_is_too_long_or_no_text(tokenizer: Tokenizer) -> None:
    for text in ("x" * (MAX_PROMPT_BYTES + 1), "\u00e9" * (MAX_PROMPT_BYTES // 2 + 1)):
        with pytest.raises(RequestError, match="at most 16"):
            tokenizer.encode(text)
    with pytest.raises(RequestError, match=r"lone surrogate \(character 2\)"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(RequestError, match=r"byte 0xff is not UTF-8 \(character 1\)"):
        tokenizer.encode(b"a\xff".decode(errors="surrogateescape"))


@pytest.mark.parametrize("data", [b"", b"GGUF", b"not a model at all"])
def test_a_file_that_llama_cpp_refuses(
    tmp_path: Path, data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelFileError, match="cannot read the vocabulary") as error:
        Tokenizer(tmp_path / "m.gguf")
    assert "no reason given" not in str(error.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("way", ["replaced", "removed"])
def test_the_file_that_was_checked_is_the_one_that_is_read(tmp_path: Path, way: str) -> None:
    """llama.cpp ends the process on vocabularies that the check refuses: no other file will do."""
    path = Path(shutil.copy(TINY, tmp_path / "m.gguf"))
    with open_model(path) as model:
        if way == "replaced":
            (tmp_path / "other").write_bytes(b"GGUF, but not the one that was checked")
            os.replace(tmp_path / "other", path)
        else:
            path.unlink()
        with Tokenizer(model) as opened:
            assert opened.path == path and opened.n_vocab == model.hparams.n_vocab
            text = "def f(x): return x"
            ids = opened.encode(text)
            model.close()  # the vocabulary is in memory
            assert opened.decode(ids) == text and ids == shared().encode(text)
    with pytest.raises(InternalError, match="the model file is closed"):
        Tokenizer(model)


def test_a_file_that_was_written_to_since_is_refused(tmp_path: Path) -> None:
    path = Path(shutil.copy(TINY, tmp_path / "m.gguf"))
    with open_model(path) as model:
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - 1)
        with pytest.raises(ModelFileError, match="was written to while the model was in use"):
            Tokenizer(model)


@pytest.mark.parametrize("n_parts", [1, 2])
def test_a_model_in_parts_has_a_vocabulary(tmp_path: Path, n_parts: int) -> None:
    preset = PRESETS["legacy32"]
    first = write_model(tmp_path / "m.gguf", preset.shape, preset.mix, n_splits=n_parts)[0]
    with open_model(first) as model:
        for path in model.paths:
            path.unlink()
        with Tokenizer(model) as opened:
            assert len(model.paths) == n_parts and opened.n_vocab == model.hparams.n_vocab
            assert opened.decode(opened.encode("x y")) == "x y"


@pytest.mark.parametrize("before", [None, "/somewhere/else"])
def test_the_environment_stays_as_it_was(before: str | None) -> None:
    """Child processes of the caller may have a llama.cpp of their own."""
    code = (
        "import os\n"
        "from moegraph.text.tokenizer import Tokenizer\n"
        f"Tokenizer({str(TINY)!r}).close()\n"
        "print(os.environ.get('LLAMA_CPP_LIB_PATH'))"
    )
    env = {**os.environ, "LLAMA_CPP_LIB_PATH": before or ""}
    if before is None:
        del env["LLAMA_CPP_LIB_PATH"]
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == (str(before), "")


def test_one_ggml_in_the_process() -> None:
    tokenizer_module.load_llama()
    mapped = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libggml" in line or "libllama" in line
    }
    assert {Path(name).parent for name in mapped} == {lib.library_dir()}


def test_an_error_of_another_thread_is_kept_while_a_vocabulary_is_read() -> None:
    """llama.cpp has one log callback for all threads."""
    base = ctypes.CDLL(str(lib.library_dir() / "libggml-base.so"))
    callback, user_data = ctypes.c_void_p(), ctypes.c_void_p()
    llama = tokenizer_module.load_llama()
    lib.last_error()
    with tokenizer_module._captured_log(llama) as lines:
        base.ggml_log_get(ctypes.byref(callback), ctypes.byref(user_data))
        log = tokenizer_module._LOG(callback.value or 0)

        def fail() -> None:
            log(tokenizer_module._ERROR_LEVEL, b"no memory for a graph\n", user_data)

        other = threading.Thread(target=fail)
        other.start()
        other.join()
        log(tokenizer_module._ERROR_LEVEL, b"a wrong vocabulary\n", user_data)
    assert lines == ["a wrong vocabulary"]
    assert lib.last_error() == "no memory for a graph"
