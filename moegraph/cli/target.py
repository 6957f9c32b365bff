"""The model of a command line: TARGET, -m or -hf, and how it becomes a file on this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..gguf.hubnames import parse_hub_name
from ..gguf.resolve import resolve_target
from . import ui
from .completion import MODEL_TARGET

Command = TypeVar("Command", bound=Callable[..., Any])


def _named(_: click.Context, __: click.Parameter, text: str | None) -> str | None:
    """Return the TARGET that -hf stands for."""
    return None if text is None else str(parse_hub_name(text))


def hf_option(command: Command) -> Command:
    """Add -hf, which names a model on a hub as llama.cpp's does; its value is a TARGET."""
    return click.option(
        "-hf", "-hfr", "--hf-repo", "hf_repo", metavar="OWNER/REPO[:QUANT]", callback=_named,
        help="The model, instead of TARGET: a GGUF file of this repository on Hugging Face, "
        "downloaded at first use (default quantization: Q4_K_M). The same as TARGET hf:OWNER/REPO.",
    )(command)  # fmt: skip


def model_options(command: Command) -> Command:
    """Add -m and -hf, in the place of the first argument."""
    return click.option(
        "-m", "--model", type=MODEL_TARGET, metavar="TARGET",
        help="The model, instead of the first argument.",
    )(hf_option(command))  # fmt: skip


def target_argument(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument TARGET, -m and -hf to a command, which gets one model as `target`."""

    @functools.wraps(command)
    def run(target: str | None, model: str | None, hf_repo: str | None, **given: Any) -> None:
        command(target=require_target(target, model, hf_repo), **given)

    argument = click.argument("target", required=False, type=MODEL_TARGET, metavar="TARGET")
    return argument(model_options(run))


def only_target(*given: str | None) -> str | None:
    """Return the model that was given in one of several ways; None: in no way."""
    found = [target for target in given if target]
    if len(found) > 1:
        raise click.UsageError(f"give one model, not {' and '.join(found)}")
    return found[0] if found else None


def require_target(*given: str | None) -> str:
    """Return the model that was given in one of several ways."""
    found = only_target(*given)
    if found is None:
        raise click.UsageError(
            "no model; give a GGUF file, a shipped model's name, or -hf OWNER/REPO"
        )
    return found


def local_path(target: str | Path) -> Path:
    """Return the path of a model; one on a hub is downloaded first, with a bar on a terminal."""
    with ui.Bars() as bars:

        def say(line: str) -> None:
            bars.clear()
            ui.note(line)

        return resolve_target(target, bars, say)
