"""scripts/check_server_tests: what it starts, and what it knows of llama.cpp's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import _server_tests


def test_the_shim_serves_the_small_model_as_llama_server_was_asked_to() -> None:
    given = "--port 1 --temp 0.8 --hf-repo a/b --ctx-size 512 --parallel 2 --no-slots --alias x"
    found = _server_tests.command(given.split())
    assert found[3:5] == ["serve", "tiny"] and "a/b" not in found and "--no-slots" not in found
    options = dict(zip(found[5::2], found[6::2]))
    assert options["-c"] == "256" and options["-np"] == "2" and options["--alias"] == "x"
    whole = _server_tests.command([*given.split(), "--kv-unified"])
    assert whole[-2:] == ["-c", "512"]


def test_what_is_known_of_a_test_is_found_by_its_name_or_its_file() -> None:
    assert _server_tests.known("test_rerank::test_any[1]") is _server_tests.KNOWN["test_rerank"]
    name = "test_completion::test_n_probs"
    assert _server_tests.known(f"{name}[a]") is _server_tests.KNOWN[name]
    assert _server_tests.known("test_basic::test_server_start_simple") is None
    kinds = {_server_tests.ABSENT, _server_tests.OTHER}
    assert all(one.kind in kinds and one.why for one in _server_tests.KNOWN.values())
