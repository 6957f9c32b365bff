"""The check scripts fail where nothing was compared."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import _server_tests
import check_accepted
import check_drafts


@pytest.mark.parametrize(
    ("ours", "theirs", "status"),
    [
        ([([1, 2], 9, 5)], [([1, 2], 9, 5)], 0),
        ([([1, 2], 9, 5)], [([1, 2], 9, 2)], 1),
        ([([1, 2], 9, 0)], [([1, 2], 9, 0)], 1),  # nothing was compared
        ([([1, 2], 9, 5)], [([1, 3], 9, 5)], 1),
        ([], [], 1),
    ],
)  # fmt: skip
def test_accepted_tokens_are_compared_in_equal_texts(
    ours: list[check_accepted.Result], theirs: list[check_accepted.Result], status: int
) -> None:
    assert check_accepted.report(ours, theirs, 0.05) == status


def test_texts_with_drafts_are_compared_only_if_something_was_drafted() -> None:
    texts = [[1, 2], [3, 4]]
    assert check_drafts.wrong(texts, [[1, 2], [3, 4]], 5) == 0
    assert check_drafts.wrong(texts, [[1, 2], [3, 5]], 5) == 1
    assert check_drafts.wrong(texts, [[1, 2], [3, 4]], 0) == 2


def test_prompts_that_no_file_is_long_enough_for_end_the_check() -> None:
    engine: Any = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: [*text.encode()]))
    found = check_drafts.prompts_of(engine, 3, 50)
    assert [len(ids) for ids in found] == [50, 50, 50]
    with pytest.raises(SystemExit, match="lower --prompt-tokens"):
        check_drafts.prompts_of(engine, 3, 10**7)


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
