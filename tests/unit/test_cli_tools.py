"""`moegraph inspect`, `bench`, `doctor`, `--version`, help, and the drawing of it all."""

from __future__ import annotations

import csv
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
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from ggufbytes import Shape, T, edit, kv, model_file, model_pairs, vocab_pairs

from moegraph import __version__
from moegraph.cli import bench, doctor, main, ui
from moegraph.errors import NativeError

if TYPE_CHECKING:
    from conftest import Cli

ROOT = Path(__file__).resolve().parents[2]


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert "\x1b" not in result.output
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_file().build())
    return path


class TestInspect:
    def test_json_describes_the_model(self, model: Path) -> None:
        report = json.loads(invoke("inspect", model, "--json").stdout)
        assert report["paths"] == [str(model)]
        assert report["n_bytes"] == model.stat().st_size
        assert report["metadata"]["general.architecture"] == "qwen35moe"
        layers = report["layers"]
        assert len(layers) == report["hparams"]["n_layer"]
        assert sum(layer["expert_bytes"] for layer in layers) == report["expert_bytes"]
        assert {layer["recurrent"] for layer in layers} == {True, False}
        assert "tensors" not in report
        assert report["fits"] == []

    def test_check_looks_at_the_weights(self, model: Path) -> None:
        assert "no NaN and no infinity" in invoke("inspect", model, "--check").stdout
        assert "Check" not in invoke("inspect", model).stdout

    def test_check_names_what_is_damaged(self, tmp_path: Path) -> None:
        path, name = tmp_path / "m.gguf", "output_norm.weight"
        (info,) = (t for t in model_file().tensors if t.name == name)
        values = np.ones(info.ne[0], np.float32)
        values[3:5] = np.nan
        path.write_bytes(model_file(tensors=edit(name, data=values.tobytes())).build())
        for extra in ([], ["--json"]):
            result = invoke("inspect", path, "--check", *extra)
            assert result.exit_code == 3
            assert f"the first is {name}; the file is damaged" in result.stderr
        assert json.loads(result.stdout)["nonfinite"] == [
            {"name": name, "type": "F32", "n_bad": 2, "n_blocks": len(values), "first": 3}
        ]

    def test_tensors_are_listed_on_request(self, model: Path) -> None:
        tensors = json.loads(invoke("inspect", model, "--json", "--tensors").stdout)["tensors"]
        by_name = {tensor["name"]: tensor for tensor in tensors}
        embedding = by_name["token_embd.weight"]
        assert embedding["ne"] == [Shape().n_embd, Shape().n_vocab]
        assert embedding["type"] in ("F32", "F16", "Q8_0")

    def test_what_fits(self, model: Path) -> None:
        args = ("inspect", model, "--json", "-c", 1000, "--vram")
        small, large = json.loads(invoke(*args, "100MiB", "--vram", "2").stdout)["fits"]
        assert (small["budget_bytes"], large["budget_bytes"]) == (100 << 20, 2 << 30)
        assert small["shortfall_bytes"] > 0
        assert small["n_slots"] == 0
        assert large["everything_fits"]
        assert large["n_ctx"] == 1024

    def test_for_people(self, model: Path) -> None:
        result = invoke("inspect", model, "--tensors", "--vram", "2")
        assert result.stderr == ""
        for part in ("Metadata", "general.architecture", "DeltaNet", "one expert", "In 2.00 GiB",
                     "everything", "blk.0.ffn_gate_inp.weight"):  # fmt: skip
            assert part in result.stdout

    def test_hostile_metadata_cannot_reach_the_terminal(self, tmp_path: Path) -> None:
        pairs = {**model_pairs(Shape()), **vocab_pairs(Shape().n_vocab)}
        pairs["general.name"] = kv("general.name", T.STRING, "\x1b[2J\x07evil\nname")
        pairs["general.odd"] = kv("general.odd", T.FLOAT32, float("nan"))
        path = tmp_path / "m.gguf"
        path.write_bytes(model_file(pairs=pairs).build())
        assert "evil" in invoke("inspect", path).stdout
        report = json.loads(invoke("inspect", path, "--json").stdout)
        assert report["metadata"]["general.odd"] == "nan"

    @pytest.mark.parametrize(
        ("args", "line"),
        [
            (("--vram", "lots"), "not a size: 'lots'"),
            (("-c", "-1"), "n_ctx is -1"),
            (("-c", "x"), "'x' is not a valid integer"),
            (("-ctk", "q5"), "'q5' is not one of"),
        ],
    )
    def test_wrong_options(self, model: Path, args: tuple[str, ...], line: str) -> None:
        result = invoke("inspect", model, *args)
        assert result.exit_code == 2
        assert line in result.stderr

    def test_files_that_are_no_model(self, tmp_path: Path) -> None:
        (tmp_path / "x.gguf").write_bytes(b"not a model")
        for target in (tmp_path / "x.gguf", tmp_path / "none.gguf", tmp_path):
            result = invoke("inspect", target)
            assert result.exit_code == 3
            assert result.stdout == ""
            assert len(result.stderr.splitlines()) == 1


RECORDS = [
    {
        "model_type": "qwen35moe 33M Q4_K", "model_size": 23 << 20, "model_n_params": 33_000_000,
        "backends": "CPU", "n_threads": 2, "mode": "whole", "n_ubatch": 512, "type_k": "f16",
        "type_v": "f16", "test": test, "avg_ts": 123.456, "stddev_ts": 1.5, "samples_ns": [1, 2],
        "samples_ts": [1.0, 2.0],
    }
    for test in ("pp512", "tg128 @ d4096")
]  # fmt: skip


class TestBench:
    def out(self, style: str, capsys: pytest.CaptureFixture[str]) -> str:
        getattr(bench, f"_print_{style}")(iter(RECORDS))
        return capsys.readouterr().out

    def test_markdown_is_a_table_like_llama_bench_prints(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = self.out("markdown", capsys).splitlines()
        assert len({len(line) for line in lines}) == 1
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert cells[0] == [
            "model", "size", "params", "backend", "threads", "mode", "test", "t/s",
        ]  # fmt: skip
        assert cells[2][-2:] == ["pp512", "123.46 \u00b1 1.50"]
        assert cells[3][-2] == "tg128 @ d4096"

    def test_unusual_settings_get_a_column(self, capsys: pytest.CaptureFixture[str]) -> None:
        record = {**RECORDS[0], "n_ubatch": 64, "type_v": "q8_0"}
        bench._print_markdown(iter([record]))
        header = capsys.readouterr().out.splitlines()[0]
        assert "n_ubatch" in header
        assert "type_v" in header
        assert "type_k" not in header

    def test_json_and_csv_hold_the_same_rows(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert json.loads(self.out("json", capsys)) == RECORDS
        rows = list(csv.DictReader(io.StringIO(self.out("csv", capsys))))
        assert [row["test"] for row in rows] == ["pp512", "tg128 @ d4096"]
        assert "samples_ns" not in rows[0]

    @pytest.mark.parametrize(
        ("text", "lengths"),
        [
            ("512", (512,)), ("0", (0,)), ("1,2,8", (1, 2, 8)), ("1-4", (1, 2, 3, 4)),
            ("0-512+256", (0, 256, 512)), ("1-16*4", (1, 4, 16)), ("2,4-5", (2, 4, 5)),
        ],
    )  # fmt: skip
    def test_lists_and_ranges_as_in_llama_bench(self, text: str, lengths: tuple[int, ...]) -> None:
        assert bench._lengths(None, None, text) == lengths

    @pytest.mark.parametrize(
        "text", ["", "x", "1,", "-5", "4-1", "1-", "1-9+0", "1-9*1", "0-9*2", "1-9+", "99999999",
                 "0-1000000"],
    )  # fmt: skip
    def test_lengths_that_make_no_sense(self, text: str) -> None:
        result = invoke("bench", "m", "-p", text)
        assert result.exit_code == 2
        assert "Invalid value for '-p'" in result.stderr

    def test_nothing_to_measure(self) -> None:
        result = invoke("bench", "m", "-p", "0", "-n", "0")
        assert (result.exit_code, result.stderr) == (
            2, "error: nothing to measure; -p and -n are both 0\n",
        )  # fmt: skip

    def test_the_context_is_as_large_as_the_tests_need(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[Any] = []
        fake = SimpleNamespace(
            BenchSpec=lambda *args: args, run_bench=lambda engine, spec: seen.append(spec) or []
        )
        monkeypatch.setitem(sys.modules, "moegraph.bench", fake)
        monkeypatch.setattr(bench, "_facts", lambda engine: {})
        cli("bench", "m", "-p", "100,300", "-n", "8", "-d", "0,1000", "-r", "2", "-o", "json")
        assert cli.engine.config.n_ctx == 1536
        assert seen == [((100, 300), (8,), (0, 1000), 2)]
        cli("bench", "m", "-c", "2048")
        assert cli.engine.config.n_ctx == 2048


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

    def test_no_bar_for_work_that_is_quickly_done(self, terminal: FakeTerminal) -> None:
        with ui.Bars() as bars:
            for done in range(10):
                bars("load", done, 10)
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
