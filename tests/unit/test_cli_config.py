"""Tests of moegraph.toml and MOEGRAPH_*: which value holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from moegraph.cli import main
from moegraph.cli.given import settable, spellings
from moegraph.cli.program import COMMANDS, load_command
from moegraph.sources import Source, environment


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a folder of the user and a project's, without files."""
    (tmp_path / "user" / "moegraph").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path / "project")


def write(text: str, user: str = "") -> None:
    Path("moegraph.toml").write_text(text)
    Path("../user/moegraph/moegraph.toml").write_text(user)


def start(*args: str) -> Result:
    return CliRunner().invoke(main, args, prog_name="moegraph")


def shown(command: str = "serve") -> dict[str, tuple[Any, str]]:
    """Return value and source of each option of a command."""
    done = start("config", command, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["settings"]
    return {row["key"]: (row["value"], row["source"]) for row in rows}


def test_the_nearest_place_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command line > environment > project > user > default."""
    assert shown()["ctx-size"] == (-1, "default")
    write("", user="ctx-size = 512\ntemp = 0.5\nport = 1")
    assert shown()["temperature"][0] == 0.5
    write("max_ctx = 1024\n[serve]\nport = 2\n[run]\nseed = 3", user="ctx-size = 512\nport = 1")
    found = shown()
    assert found["ctx-size"] == (1024, "moegraph.toml: max_ctx")
    assert found["port"] == (2, "moegraph.toml: [serve]: port")
    monkeypatch.setenv("MOEGRAPH_CTX_SIZE", "2048")
    assert shown()["ctx-size"] == (2048, "environment: MOEGRAPH_CTX_SIZE")
    assert shown("bench")["max-ctx"][0] == [2048]


def test_a_command_takes_them_and_its_line_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    @click.command()
    @click.option("--ctx-size", "n_ctx", type=int, default=7)
    @click.option("--json", "as_json", is_flag=True)
    @click.option("--stop", multiple=True)
    @click.option("-m", "--model")
    def probe(**given: Any) -> None:
        seen.append(given)

    monkeypatch.setitem(COMMANDS, "plan", ("x.y", ""))
    real = load_command
    found = lambda name: probe if name == "plan" else real(name)  # noqa: E731
    monkeypatch.setattr("moegraph.cli.program.load_command", found)
    write('json = true\nstop = ["a b", "c"]\nctx-size = 4\nmodel = "tiny"\nport = 9')
    for args in ((), ("--ctx-size", "5", "--stop", "x")):
        assert start("plan", *args).exit_code == 0
    common = {"as_json": True, "model": "tiny"}
    assert seen == [
        {**common, "n_ctx": 4, "stop": ("a b", "c")}, {**common, "n_ctx": 5, "stop": ("x",)},
    ]  # fmt: skip


def test_a_model_on_the_command_line_replaces_the_default() -> None:
    write('model = "first.gguf"')
    assert "first.gguf" in start("inspect").output
    for args in (("second.gguf",), ("-m", "second.gguf")):
        found = start("inspect", *args)
        assert "second.gguf" in found.output and found.exit_code == 3


@pytest.mark.parametrize(
    "text, told",
    [
        ("ctx-size = [", "moegraph.toml: Invalid value"),
        ('ctx-size = "many"', "moegraph.toml: ctx-size: 'many' is not a valid integer"),
        ("ctx-size = 1.5", "moegraph.toml: ctx-size: '1.5' is not a valid integer"),
        ("ctx-size = -9", "moegraph.toml: ctx-size: n_ctx is -9"),
        ("ctx-size = true", "moegraph.toml: ctx-size: True is neither"),
        ("ctx-size = [1, 2]", "moegraph.toml: ctx-size: [1, 2] is neither"),
        ('miss = "gpu"', "moegraph.toml: miss: 'gpu' is not one of"),
        ('hf-repo = "x"', "moegraph.toml: hf-repo: 'x' names no model"),
        ("top_p = 2", "moegraph.toml: top_p: top_p is 2.0"),
        ("ctx_sise = 1", "moegraph.toml: ctx_sise: there is no such option"),
        ("[run]\nport = 1", "moegraph.toml: [run]: port: there is no such option"),
        ("[sreve]\nport = 1", "moegraph.toml: [sreve]: there is no such option"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_key(text: str, told: str) -> None:
    write(text)
    done = start("run", "tiny", "-p", "x")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1, done.output
    assert f"error: {told}" in done.stderr
    assert start("run", "--help").exit_code == 0  # help is there all the same


def test_what_another_command_takes_is_passed_over() -> None:
    write("port = 1\nnot-here = 2")
    assert "not-here: there is no such option" in start("inspect", "no.gguf").stderr
    write("port = 1")
    assert start("inspect", "no.gguf").exit_code == 3


def test_config_shows_what_is_unknown_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGRAPH_COLOUR", "1")
    monkeypatch.setenv("MOEGRAPH_API_KEY", "hidden")
    write("bad = 1\nport = 80")
    done = start("config")
    assert "# bad: unknown" not in done.stdout and "# moegraph.toml: bad: unknown" in done.stdout
    assert "# environment: MOEGRAPH_COLOUR: unknown" in done.stdout
    assert "hidden" not in done.output and 'api-key = "(secret)"' in done.stdout
    assert "\nport = 80  # moegraph.toml: port\n" in done.stdout
    assert done.exit_code == 2 and "there is no such option" in done.stderr


def test_every_option_of_every_command_has_a_variable() -> None:
    """No list by hand: what a command takes, the environment can say."""
    for name in COMMANDS:
        for option in settable(load_command(name)):
            for spelling in spellings(option):
                key = "MOEGRAPH_" + spelling.upper().replace("-", "_")
                if spelling not in ("debug", "history"):
                    assert environment({key: "1"}).find(spellings(option), name) is not None


def test_a_files_lines_make_the_same_file() -> None:
    write("ctx-size = 100\nport = 7\n[serve]\nqueue = 3")
    Path("moegraph.toml").write_text(start("config").stdout)
    assert {k: v for k, (v, _) in shown().items() if k in ("ctx-size", "port", "queue")} == {
        "ctx-size": 100, "port": 7, "queue": 3,
    }  # fmt: skip
    assert Source.of("x", {"a_b": 1}).values["a-b"].key == "a_b"
