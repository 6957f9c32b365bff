"""run --prompt-cache: a prompt that is read from a folder need not be computed again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moegraph.cli import main

TEXT = "".join(f"def add_{i}(a, b):\n    return a + b + {i}\n\n\n" for i in range(12))
COMMAND = ["--device", "cpu", "-t", "1", "-n", "12", "--temp", "0", "-c", "1024", "--cpu-reference"]


def run(text: str, *args: object) -> Any:
    command = ["run", "tiny", "-p", text, *COMMAND, *map(str, args)]
    return CliRunner().invoke(main, command)


def report(text: str, *args: object) -> dict[str, Any]:
    done = run(text, "--json", *args)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_later_run_goes_on_from_the_folder_and_keeps_its_own_prompt(tmp_path: Path) -> None:
    path, longer = tmp_path / "cache", TEXT + TEXT.replace("add", "sum") + "def "
    plain, plain_longer = report(TEXT), report(longer)
    n, n_longer = plain["n_computed"], plain_longer["n_computed"]
    first, again = (report(TEXT, "--prompt-cache", path) for _ in range(2))
    assert (first["n_computed"], again["n_computed"]) == (n, 1)
    assert plain["tokens"] == first["tokens"] == again["tokens"]
    grown, last = (report(longer, "--prompt-cache", path) for _ in range(2))
    assert (grown["n_computed"], last["n_computed"]) == (n_longer - n + 1, 1)
    assert plain_longer["tokens"] == grown["tokens"] == last["tokens"]
    other = report("import os\n", "--prompt-cache", path)  # too short to be kept
    assert other["n_computed"] == other["n_prompt"]
    assert report(longer, "--prompt-cache", path)["n_computed"] == 1


@pytest.mark.parametrize("how", ["settings", "cut", "bit"])
def test_what_does_not_fit_is_not_used_and_a_line_says_so(tmp_path: Path, how: str) -> None:
    plain = report(TEXT, "--prompt-cache", tmp_path)
    for path in tmp_path.iterdir():
        data = bytearray(path.read_bytes())
        if how == "bit":
            data[len(data) // 2] ^= 1
        path.write_bytes(data[:-1] if how == "cut" else data)
    more = ["-ctk", "q8_0"] if how == "settings" else []
    done = run(TEXT, "--json", "--prompt-cache", tmp_path, *more)
    found = json.loads(done.stdout)
    assert found["n_computed"] == plain["n_prompt"]
    assert more or found["tokens"] == plain["tokens"]
    assert ("other settings" if more else "the file is not used") in done.stderr


def test_logits_of_all_rows_need_all_rows(tmp_path: Path) -> None:
    done = run(TEXT, "--prompt-cache", tmp_path, "--logits-out", tmp_path / "x.npy")
    assert done.exit_code == 2 and "--logits-out needs all rows" in done.stderr
