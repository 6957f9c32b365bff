"""`moegraph plan` for several cards: what they hold together, and each alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.smallest import smallest

from moegraph.cli import main

ModelPath = Callable[[str], Path]


def plan(path: Path, *more: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["plan", str(path), "-c", "512", "-ub", "64", *more])
    return done.exit_code, done.output


def budgets(path: Path, *more: str) -> list[dict[str, Any]]:
    code, text = plan(path, "--json", *more)
    assert code == 0, text
    found: list[dict[str, Any]] = json.loads(text)["budgets"]
    return found


def test_two_cards_hold_more_than_one_and_all_layers(model_path: ModelPath) -> None:
    path = model_path("legacy32")
    mib = smallest(lambda n: plan(path, "--vram", f"{n}MiB")[0] == 0)
    one, two = budgets(path, "--vram", f"{mib}MiB", "--vram", f"{mib}MiB,{mib - 2}MiB")
    assert one["cards"] == [] and len(two["cards"]) == 2
    assert two["budget_bytes"] == (2 * mib - 2) << 20
    assert two["plan"]["resident_share"] > one["plan"]["resident_share"]
    (a, b) = (card["layers"] for card in two["cards"])
    assert a[0] == 0 and a[1] == b[0] and b[1] == 8
    assert sum(two["plan"]["bytes"].values()) == two["budget_bytes"]
    assert two["predicted"]["hit_rate"] >= one["predicted"]["hit_rate"]


def test_a_split_and_a_card_that_is_too_small(model_path: ModelPath) -> None:
    path = model_path("legacy32")
    (found,) = budgets(path, "--vram", "2,2", "--split", "3,1")
    assert [card["layers"] for card in found["cards"]] == [[0, 6], [6, 8]]
    code, text = plan(path, "--vram", "2,2")
    assert code == 0 and "2.00 GiB + 2.00 GiB" in text and "1: 2.00 GiB" in text
    code, text = plan(path, "--vram", "2,2,2", "--split", "3,1")
    assert code == 2 and "--split has 2 entries for 3 cards" in text
    mib = smallest(lambda n: plan(path, "--vram", f"1,{n}MiB")[0] == 0)
    code, text = plan(path, "--vram", f"1,{mib - 1}MiB")
    assert code == 4 and text.count("\n") == 1
    assert re.search(r"--vram of card 2 allows \d[\d.]* MiB", text)


def test_inspect_says_what_several_cards_hold(model_path: ModelPath) -> None:
    path = str(model_path("legacy32"))
    done = CliRunner().invoke(main, ["inspect", path, "--vram", "2,2", "-c", "512"])
    assert done.exit_code == 0, done.output
    assert "In 2.00 GiB + 2.00 GiB, 512 positions: all experts resident" in done.output
    assert "1: 2.00 GiB" in done.output and "2: 2.00 GiB" in done.output


@pytest.mark.parametrize("size", ["8,", ",8", "8,x"])
def test_what_is_no_list_of_sizes_is_refused(model_path: ModelPath, size: str) -> None:
    code, text = plan(model_path("legacy32"), "--vram", size)
    assert code == 2 and "not a size" in text
