"""`moegraph doctor`, `--version`, help, and the drawing of it all."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers.patience import PATIENCE_S, until

from moegraph import __version__
from moegraph.cli import doctor, main, ui
from moegraph.errors import NativeError

ROOT = Path(__file__).resolve().parents[2]


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert "\x1b" not in result.output
    assert "Traceback" not in result.output
    return result


def copy_without_native(folder: Path) -> Path:
    """Copy the package as it is before anything was built."""
    shutil.copytree(
        ROOT / "moegraph", folder / "moegraph",
        ignore=shutil.ignore_patterns("*.so", "lib", "models", "__pycache__"),
    )  # fmt: skip
    return folder


class TestDoctor:
    def test_json(self) -> None:
        result = invoke("doctor", "--json")
        report = json.loads(result.stdout)
        assert report["moegraph"] == __version__
        assert report["packages"]["numpy"]
        assert report["cpu"]["logical"] == os.cpu_count()
        assert report["memory"]["total_bytes"] > 0
        assert {check["name"] for check in report["checks"]} == {
            "native libraries", "tokenizer", "CUDA",
        }  # fmt: skip
        native = next(c for c in report["checks"] if c["name"] == "native libraries")
        if native["ok"]:
            assert set(report["native"]) == {"ggml", "llama_commit", "patchset", "folder"}
            assert all(text in native["detail"] for text in report["native"].values())
            tried = report["threads"]["tried"]
            assert all(way["tokens_per_s"] > 0 for way in tried)
            assert report["threads"]["threads_chosen"] == ("measured" if tried else "given")
        assert result.exit_code == (0 if native["ok"] else NativeError.exit_code)

    def test_devices_tell_their_memory_in_bytes(self) -> None:
        found = doctor._device({
            "device": "cuda:0", "kind": "cuda", "name": "CUDA0", "description": "a card",
            "address": "", "handle": object(), "memory_free": 5, "memory_total": 7,
        })  # fmt: skip
        assert json.loads(json.dumps(found))["free_bytes"] == 5 and found["total_bytes"] == 7
        assert "memory_free" not in found

    @pytest.mark.parametrize(
        ("threads", "line"),
        [
            (None, "unknown; the shipped model does not run"),
            ({"n_threads": 1, "poll": 50, "tried": []}, "1; nothing else to try"),
            (
                {"n_threads": 2, "poll": 0, "cpus_taken": None, "tried": [
                    {"n_threads": 2, "poll": 50, "tokens_per_s": 1810.4},
                    {"n_threads": 1, "poll": 50, "tokens_per_s": 1525.0},
                    {"n_threads": 2, "poll": 0, "tokens_per_s": 87.2},
                ]},
                "2 sleeping for the shipped model now "
                "(2 spinning: 1,810 tok/s, 1: 1,525 tok/s, 2 sleeping: 87 tok/s)",
            ),
            (
                {"n_threads": 1, "poll": 50, "cpus_taken": 1.0, "tried": [
                    {"n_threads": 1, "poll": 50, "tokens_per_s": 1388.0},
                ]},
                "1 for the shipped model now (1: 1,388 tok/s); other programs take 1.0 CPUs",
            ),
        ],
    )  # fmt: skip
    def test_threads_are_told_in_one_line(self, threads: dict[str, Any] | None, line: str) -> None:
        assert doctor._threads_line(threads) == line

    @pytest.mark.parametrize("version", [None, "0.2.0"])
    def test_another_tokenizer_is_named_with_the_remedy(
        self, monkeypatch: pytest.MonkeyPatch, version: str | None
    ) -> None:
        monkeypatch.setattr(doctor, "_version", lambda package: version)
        found = doctor._tokenizer()
        pinned = json.loads((ROOT / "vendor" / "pin.json").read_text())["version"]
        assert not found.ok
        assert f"pip install llama-cpp-python=={pinned}" in found.detail

    def test_it_works_before_anything_is_built(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "moegraph", "doctor"],
            cwd=copy_without_native(tmp_path), capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == NativeError.exit_code
        assert "no  native libraries: the native libraries are not built" in done.stdout
        assert "numpy" in done.stdout
        assert len(done.stderr.splitlines()) == 1
        assert "scripts/build" in done.stderr

    def test_the_version_works_before_anything_is_built(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "moegraph", "--version"],
            cwd=copy_without_native(tmp_path), capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (
            0, f"moegraph {__version__} (native libraries not built)\n",
        )  # fmt: skip


class TestHelp:
    @pytest.mark.parametrize("args", [(), ("-h",), ("--help",)])
    def test_the_program_alone_shows_examples(self, args: tuple[str, ...]) -> None:
        result = invoke(*args)
        assert result.exit_code == 0
        assert "moegraph run tiny -p" in result.stdout

    @pytest.mark.parametrize("name", sorted(main.commands))
    @pytest.mark.parametrize("flag", ["-h", "--help"])
    def test_every_command_has_help_with_examples(self, name: str, flag: str) -> None:
        result = invoke(name, flag)
        assert result.exit_code == 0
        assert re.search(rf"Examples:\n +moegraph {name}", result.stdout)

    @pytest.mark.parametrize("name", sorted(main.commands))
    def test_every_option_is_explained(self, name: str) -> None:
        for param in main.commands[name].params:
            if param.param_type_name == "option":
                assert param.help, param.name
                assert param.help.endswith("."), param.name

    def test_an_unknown_command(self) -> None:
        result = invoke("dance")
        assert result.exit_code == 2
        assert "No such command 'dance'" in result.stderr


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestDrawing:
    @pytest.fixture
    def terminal(self, monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        stream = FakeTerminal()
        # Not sys itself: pytest puts its own streams there between set-up and call.
        monkeypatch.setattr(ui, "sys", SimpleNamespace(stderr=stream, stdout=io.StringIO()))
        return stream

    def test_colour_only_on_a_terminal(self, terminal: FakeTerminal) -> None:
        ui.error("bad")
        assert terminal.getvalue().startswith("\x1b[")
        assert ui.styled("x", "error", io.StringIO()) == "x"

    @pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
    def test_no_colour_where_none_is_wanted(
        self, terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        monkeypatch.setenv(name, value)
        ui.error("bad")
        ui.note("so so")
        assert terminal.getvalue() == "error: bad\nso so\n"

    def test_a_terminal_does_not_obey_the_model(self, terminal: FakeTerminal) -> None:
        ui.write_text("a\tb\r\n\x1b[2J\x07\x9b", stream=terminal)
        assert terminal.getvalue() == "a\tb\n\\x1b[2J\\x07\\x9b"

    def test_messages_are_one_line(self, terminal: FakeTerminal) -> None:
        ui.error("two\nlines\x1b[0m")
        assert terminal.getvalue().count("\n") == 1

    def test_a_bar_appears_for_long_work_and_goes_away(
        self, terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ui, "_BAR_DELAY_S", 0.0)
        with ui.Bars() as bars:
            bars("load", 1, 10)
            assert "Loading" in terminal.getvalue()
            bars("load", 10, 10)
            bars("prefill", 1, 4)
            assert "Reading the prompt" in terminal.getvalue()
        # Hidden while a bar is drawn, and shown again at the end.
        assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")

    def test_no_bar_for_work_that_is_quickly_done(
        self, terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ui, "_BAR_DELAY_S", PATIENCE_S)
        now = iter(1000.0 + i * ui._BAR_DELAY_S / 11 for i in range(11))
        monkeypatch.setattr(ui, "time", SimpleNamespace(monotonic=lambda: next(now)))
        with ui.Bars() as bars:
            for done in range(10):
                bars("load", done, 10)
        assert terminal.getvalue() == ""

    @pytest.mark.parametrize(
        ("begin", "shown"),
        [
            (lambda bars: bars.expect("prefill", 512), "Reading the prompt"),
            (lambda bars: bars("threads", 0, 1), "Measuring CPU threads"),
        ],
    )
    def test_a_bar_appears_though_no_report_follows(
        self, terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch,
        begin: Callable[[ui.Bars], None], shown: str,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(ui, "_BAR_DELAY_S", 0.01)
        with ui.Bars() as bars:
            begin(bars)
            until(lambda: shown in terminal.getvalue())
        assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")

    def test_no_bar_after_work_that_was_expected_and_quick(
        self, terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ui, "_BAR_DELAY_S", PATIENCE_S)
        with ui.Bars() as bars:
            bars.expect("prefill", 512)
            timer = bars._timer
            bars.clear()
            assert timer is not None and timer.finished.is_set()
            timer.function(*timer.args)  # it was on its way already
        assert terminal.getvalue() == ""

    def test_nothing_is_drawn_into_a_pipe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pipe = io.StringIO()
        monkeypatch.setattr(ui, "sys", SimpleNamespace(stderr=pipe))
        monkeypatch.setattr(ui, "_BAR_DELAY_S", 0.0)
        with ui.Bars() as bars:
            bars("load", 1, 10)
            time.sleep(0.01)
            bars("load", 2, 10)
        assert pipe.getvalue() == ""

    def test_tables_align_and_hide_control_characters(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ui.table([("a\x1b", 5), ("bbb", 1234)], ("name", "n"))
        assert capsys.readouterr().out == "  name      n\n  a\\x1b     5\n  bbb    1234\n"
        ui.table([])
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize(
        ("column", "is_right"),
        [(("1", "12.5 MiB"), True), (("1", "-"), True), (("16.2 %", ""), True),
         (("1,234", "-5"), True), (("35 to 126", "9"), True), (("-", "-"), True),
         (("35B.gguf", "7"), False), (("2569 of 10240 (25 %)", "7"), False), (("", ""), False),
         (("[256, 32]", "7"), False)],
    )  # fmt: skip
    def test_a_column_goes_right_by_what_it_holds(
        self, capsys: pytest.CaptureFixture[str], column: tuple[str, str], is_right: bool
    ) -> None:
        ui.table([(cell, "x") for cell in column], (20 * "h", "x"))
        rows = capsys.readouterr().out.splitlines()[1:]
        for cell, row in zip(column, rows, strict=True):
            padded = cell.rjust(20) if is_right else cell.ljust(20)
            assert row == f"  {padded}  x"

    def test_an_empty_row_is_an_empty_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        ui.table([("a", 1), (), ("b", 22)])
        assert capsys.readouterr().out == "  a   1\n\n  b  22\n"
