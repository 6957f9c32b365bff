"""One model for a command: TARGET, -m or -hf."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from moegraph.cli import program

if TYPE_CHECKING:
    from conftest import Cli

# What each command needs besides a model.
COMMANDS = {
    "run": ("-p", "x"),
    "chat": ("-p", "x"),
    "bench": (),
    "trace": ("-p", "x", "-o", "t"),
    "perplexity": ("-f", "x"),
    "inspect": (),
    "plan": (),
    "serve": (),
    "daemon": (),
}


def test_every_command_that_takes_a_target_takes_hf() -> None:
    taking = {
        name
        for name in program.COMMANDS
        if any("-hf" in param.opts for param in program.load_command(name).params)
    }
    assert taking == set(COMMANDS)


@pytest.mark.parametrize("flag", ["-hf", "-hfr", "--hf-repo"])
def test_hf_names_the_model(cli: Cli, flag: str) -> None:
    assert cli("run", flag, "a/b:Q8_0", "-p", "x").exit_code == 0
    assert cli.loaded == ["hf:a/b:Q8_0"]


@pytest.mark.parametrize("name", COMMANDS)
def test_there_is_one_model(cli: Cli, name: str) -> None:
    rest = COMMANDS[name]
    if name != "plan":  # which then is about the machine
        assert "no model; give a GGUF file, a shipped model's name, or -hf" in cli.refused(
            name, *rest
        )
    if name == "run":  # further arguments are token ids
        both = cli.refused(name, "-m", "m", "-hf", "a/b", *rest)
    else:
        both = cli.refused(name, "m", "-hf", "a/b", *rest)
    assert "give one model, not" in both and "hf:a/b" in both


@pytest.mark.parametrize("text", ["", "a", "a/b/c", "https://huggingface.co/a/b"])
def test_a_name_that_is_none(cli: Cli, text: str) -> None:
    line = cli.refused("run", "-hf", text, "-p", "x")
    assert "names no model on a hub; write OWNER/REPO" in line and cli.loaded == []
