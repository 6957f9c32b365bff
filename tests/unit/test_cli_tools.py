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
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from helpers.patience import until

from moegraph import __version__
from moegraph.cli import doctor, main, ui
from moegraph.cli.program import COMMANDS, load_command
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
            keys = {"ggml", "llama_commit", "patchset", "cpu_variant", "folder"}
            assert set(report["native"]) == keys
            assert all(text in native["detail"] for text in report["native"].values())
        assert result.exit_code == (0 if native["ok"] else NativeError.exit_code)

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


class TestHelp:
    @pytest.mark.parametrize("args", [(), ("-h",), ("--help",)])
    def test_the_program_alone_shows_examples(self, args: tuple[str, ...]) -> None:
        result = invoke(*args)
        assert result.exit_code == 0
        assert "moegraph run tiny -p" in result.stdout

    @pytest.mark.parametrize("name", sorted(COMMANDS))
    @pytest.mark.parametrize("flag", ["-h", "--help"])
    def test_every_command_has_help_with_examples(self, name: str, flag: str) -> None:
        result = invoke(name, flag)
        assert result.exit_code == 0
        assert re.search(rf"Examples:\n +moegraph {name}", result.stdout)

    @pytest.mark.parametrize("name", sorted(COMMANDS))
    def test_every_option_is_explained(self, name: str) -> None:
        for param in load_command(name).params:
            if param.param_type_name == "option":
                assert param.help, param.name
                assert param.help.endswith("."), param.name


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
            until(lambda: "Loading" in terminal.getvalue())
            bars("load", 10, 10)
            bars("prefill", 1, 4)
            until(lambda: "Reading the prompt" in terminal.getvalue())
        # Hidden while a bar is drawn, and shown again at the end.
        assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")

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
