"""Options: those of llama.cpp that are not here, letters run together, headings, completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from moegraph.cli import main, program
from moegraph.cli.foreign import NO_COMMANDS, NOT_HERE
from moegraph.cli.options import group_of
from moegraph.config import GROUPS

if TYPE_CHECKING:
    from conftest import Cli

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("run", "chat", "bench", "trace")


def options_of(name: str) -> list[click.Option]:
    return [p for p in program.load_command(name).params if isinstance(p, click.Option)]


class TestRefused:
    @pytest.mark.parametrize("name", COMMANDS)
    def test_options_of_llama_cpp_say_why_they_are_not_here(self, cli: Cli, name: str) -> None:
        own = {flag for p in options_of(name) for flag in (*p.opts, *p.secondary_opts)}
        for flag in NOT_HERE.keys() - own:
            for typed in ((flag, "x"), (f"{flag}=x",), (flag,)):
                assert f"there is no {flag}: {NOT_HERE[flag]}" in cli.refused(name, "m", *typed)

    def test_what_an_option_takes_is_none_of_them(self, cli: Cli) -> None:
        assert cli("run", "m", "-p", "-ngl", "-n", "1").exit_code == 0
        assert cli.engine.calls[0].prompt == "-ngl"

    def test_what_they_name_instead_is_there(self) -> None:
        there = {flag for name in program.COMMANDS for p in options_of(name) for flag in p.opts}
        for reason in NOT_HERE.values():
            for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", reason):
                assert flag in there or f"moegraph{flag}" in reason, reason

    def test_commands_of_other_programs_say_what_does_it_here(self, cli: Cli) -> None:
        for name, hint in NO_COMMANDS.items():
            assert name not in program.COMMANDS
            assert f"there is no command {name!r}: {hint}" in cli.refused(name)
            for shown in re.findall(r"`(?:moegraph )?(\w+)", hint):
                assert shown in program.COMMANDS
        assert "did you mean simulate?" in cli.refused("simulat", "x.trace")

    @pytest.mark.parametrize(
        ("args", "line"),
        [
            (["run", "m", "-pg"], "No such option: -pg; for -p, write -p g (see moegraph run -h)"),
            (["chat", "m", "-xy"], "No such option: -xy (see moegraph chat -h)"),
            (["run", "m", "-hx"], "No such option: -hx (see"),
            (["run", "m", "-eq"], "No such option: -eq (see"),
            (["run", "m", "-n=5"], "No such option: -n; for -n, write -n 5 (see"),
            (["run", "m", "-temp", "1"], "No such option: -temp; did you mean --temp? (see"),
            (["bench", "m", "-oe"], "No such option: -oe; for -o, write -o e (see moegraph bench"),
            (["inspect", "m", "-cq"], "No such option: -cq; for -c, write -c q (see"),
        ],
    )
    def test_letters_run_together(self, cli: Cli, args: list[str], line: str) -> None:
        assert line in cli.refused(*args)

    @pytest.mark.parametrize(
        ("args", "line"),
        [
            (["tiny"], "a command comes before the model, as in moegraph chat tiny"),
            (["dir/x.gguf", "-p", "x"], "as in moegraph chat dir/x.gguf (see moegraph -h)"),
            (["hf:owner/repo"], "as in moegraph chat hf:owner/repo"),
            (["-m", "x.gguf"], "'-m'. A command comes first, as in moegraph run TARGET -p TEXT."),
            (["run", "m", "--stop"], "requires an argument. (see moegraph run -h)"),
        ],
    )
    def test_a_command_line_of_another_program(self, cli: Cli, args: list[str], line: str) -> None:
        assert line in cli.refused(*args)

    def test_a_number_may_follow_its_letter(self, cli: Cli) -> None:
        assert cli("run", "m", "-p", "-xy", "-n5", "-s-1", "-t2").exit_code == 0
        call = cli.engine.calls[0]
        assert (call.prompt, call.max_tokens, cli.engine.config.n_threads) == ("-xy", 5, 2)
        assert cli("run", "-p", "x", "--", "-xy").exit_code == 0


class TestHelp:
    @pytest.mark.parametrize("name", COMMANDS)
    def test_options_stand_under_headings_in_order(self, name: str) -> None:
        lines = CliRunner().invoke(main, [name, "-h"]).stdout.splitlines()
        heads = [line.removesuffix(" options:") for line in lines if line.endswith(" options:")]
        assert heads == [g for g in GROUPS if any(group_of(p) == g for p in options_of(name))]
        shown = "\n".join(lines)
        assert all(p.opts[0] in shown for p in options_of(name) if not p.hidden)
        assert not any(reason[:40] in shown for reason in NOT_HERE.values())


def complete(line: str) -> list[tuple[str, str]]:
    """Return what the shell is told about a line whose last word is being typed."""
    *args, incomplete = line.split(" ")[1:]
    found = BashComplete(main, {}, "moegraph", "_X").get_completions(args, incomplete)
    return [(item.type, item.value) for item in found]


class TestCompletion:
    @pytest.mark.parametrize("command", ["run", "chat", "bench", "trace", "inspect", "plan"])
    def test_shipped_names_and_files_are_models(self, command: str) -> None:
        assert complete(f"moegraph {command} ti") == [("plain", "tiny"), ("plain", "tiny-oss")]
        assert complete(f"moegraph {command} ./my") == [("file", "./my")]

    def test_options_and_choices(self) -> None:
        assert ("plain", "--max-tokens") in complete("moegraph chat m --max")
        assert complete("moegraph run m --miss s") == [("plain", "stream")]
        # Options that only say that they do not exist are not offered.
        assert complete("moegraph run m --mloc") == []

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_the_script_asks_this_program(self, shell: str) -> None:
        result = CliRunner().invoke(main, ["completion", shell])
        assert result.exit_code == 0
        assert f"_MOEGRAPH_COMPLETE={shell}_complete" in result.stdout

    def test_bash_completes_with_it(self, tmp_path: Path) -> None:
        """The script in a real bash: a command, a shipped name, and files where nothing fits."""
        (tmp_path / "moegraph").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m moegraph "$@"\n')
        (tmp_path / "moegraph").chmod(0o755)
        script = """
        eval "$(moegraph completion bash)"
        complete -p moegraph
        ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
                _moegraph_completion moegraph; echo "${COMPREPLY[@]}"; }
        compopt() { echo "compopt $2"; }
        ask moegraph simu; ask moegraph run ti; ask moegraph run ./m
        """
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["bash", "--norc", "-c", script], capture_output=True, text=True, env=env, check=False
        )
        assert done.stderr == ""
        # `complete` writes its options in an order of its own, with default among them.
        first, *rest = done.stdout.splitlines()
        assert "-o default" in first and first.endswith("-F _moegraph_completion moegraph")
        assert rest == ["simulate", "tiny tiny-oss", "compopt default", ""]
