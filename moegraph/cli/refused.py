"""Helpful refusals: options of llama.cpp that do not exist here, and letters run together."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import click

_PLACED = "moegraph places experts automatically; --vram SIZE limits its device memory"
_ONE_GPU = "moegraph uses one device; --device cuda:N chooses it"
_DOWNLOAD = "moegraph does not download models; download the file and give its path"
_FREE_TEXT = "moegraph cannot constrain an answer to a grammar or a schema"
_CHAIN = "the order of the samplers is fixed"
_CHAT = "use moegraph chat for a conversation, moegraph chat -p TEXT for one question"
# Options of llama.cpp that people try, by the reason why they do not exist here. Without this
# list, click would read -ngl 99 as -n gl, and -hf as -h -f.
NOT_HERE: dict[tuple[str, ...], str] = {
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): f"{_PLACED}, --device cpu uses no GPU",
    ("-ncmoe", "--n-cpu-moe"): _PLACED,
    ("-cmoe", "--cpu-moe"): f"{_PLACED}, --cache-slots 0 keeps no experts there",
    ("-ot", "--override-tensor"): _PLACED,
    ("-fa", "--flash-attn"): "flash attention is always on",
    ("-b", "--batch-size"): "-ub N sets the number of prompt tokens in one pass",
    ("-tb", "--threads-batch"): "-t N sets the threads for prompts and for decode",
    ("--mlock",): "--host-pin all keeps the experts in memory",
    (
        "-nommap",
        "--no-mmap",
    ): "the file is always mapped; moegraph copies what the device needs when it loads",
    (
        "--keep",
    ): "when the context is full, run stops, and chat forgets the oldest turns but keeps the "
    "system prompt",
    ("--samplers", "--sampling-seq", "--sampler-seq"): _CHAIN,
    ("--mirostat", "--mirostat-lr", "--mirostat-ent"): "there is no Mirostat; see --temp, --top-p",
    ("--grammar", "--grammar-file"): _FREE_TEXT,
    (
        "-j",
        "--json-schema",
        "--json-schema-file",
    ): f"{_FREE_TEXT}; --json sets the format of the report",
    ("-hf", "-hfr", "--hf-repo"): _DOWNLOAD,
    ("-hff", "--hf-file"): _DOWNLOAD,
    ("-mu", "--model-url"): _DOWNLOAD,
    (
        "--prompt-cache",
        "--prompt-cache-all",
        "--prompt-cache-ro",
    ): "moegraph does not save prompts to disk",
    ("-cram", "--cache-ram"): "only moegraph chat goes on from earlier prompts",
    ("-mg", "--main-gpu"): _ONE_GPU,
    ("-sm", "--split-mode"): _ONE_GPU,
    ("-ts", "--tensor-split"): _ONE_GPU,
    ("-dev",): "write --device cpu, cuda or cuda:N",
    ("-nkvo", "--no-kv-offload"): "the KV cache is always on the device",
    ("-md", "--model-draft", "--draft"): "only run, chat and bench draft",
    ("--draft-min", "--spec-draft-n-min"): "--draft-p-min ends drafts early; short ones are used",
    ("--spec-type",): "--spec chooses what drafts",
    (
        "-ngld",
        "--gpu-layers-draft",
        "--n-gpu-layers-draft",
        "--spec-draft-ngl",
    ): "the drafter is on the device of the model",
    ("-st", "--single-turn"): _CHAT,
    ("-cnv", "--conversation"): _CHAT,
    ("-no-cnv", "--no-conversation"): "moegraph run never uses a chat template",
    ("-i", "--interactive"): _CHAT,
    ("--jinja", "--no-jinja"): "chat templates are always Jinja",
    ("--chat-template",): "--chat-template-file FILE replaces the template of the model",
    ("-lv", "--verbosity"): "MOEGRAPH_DEBUG=1 shows tracebacks of errors, 2 also native logs",
}
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?", re.I | re.A)
# An option is suggested if its similarity to the unknown one, without dashes, is at least this.
_ALIKE = 0.75


def refused_options(taken: Collection[str]) -> list[Callable[[Any], Any]]:
    """Return hidden options that only say why the option does not exist.

    taken: spellings that the command uses for its own options.
    """
    return [
        _refused_option(flags, reason)
        for flags, reason in NOT_HERE.items()
        if not set(flags) & set(taken)
    ]


def _refused_option(flags: tuple[str, ...], reason: str) -> Callable[[Any], Any]:
    def refuse(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None and not ctx.resilient_parsing:
            names = f"{flags[0]} ({flags[-1]})" if len(flags) > 1 else flags[0]
            raise click.UsageError(f"there is no {names}: {reason}", ctx)

    return click.option(
        *flags, "_refused", hidden=True, expose_value=False, is_eager=True, callback=refuse,
        is_flag=False, flag_value="", help=f"Not here: {reason}.",
    )  # fmt: skip


def refuse_clusters(command: click.Command, ctx: click.Context, args: Sequence[str]) -> None:
    """Refuse letters run together, such as -pg, which click would read as -p with the value g.

    A number may follow its letter (-n128). args: the arguments after the command's name.

    Raises:
        UsageError: names the letters, and what to write instead.
    """
    options = {
        flag: param
        for param in command.get_params(ctx)
        if isinstance(param, click.Option)
        for flag in (*param.opts, *param.secondary_opts)
    }
    is_value = False
    for arg in args:
        if is_value:
            is_value = False
        elif arg == "--":
            return
        elif arg in options:
            option = options[arg]
            is_value = not option.is_flag and not option.count and not option.hidden
        elif len(arg) > 2 and arg[0] == "-" and arg[1] != "-":
            _refuse_cluster(arg, options, ctx)


def _refuse_cluster(arg: str, options: dict[str, click.Option], ctx: click.Context) -> None:
    letter, rest = arg[:2], arg[2:]
    option = options.get(letter)
    takes_value = option is not None and not option.is_flag and not option.hidden
    if _NUMBER.fullmatch(letter[1] + rest) or (takes_value and _NUMBER.fullmatch(rest)):
        return
    name = arg.partition("=")[0]
    hint = f"; for {letter}, write {letter} {rest.removeprefix('=')}" if takes_value else ""
    if f"-{name}" in options:
        hint = f"; did you mean -{name}?"
    raise click.UsageError(f"No such option: {name}{hint}", ctx)


def with_close_guesses(error: click.NoSuchOption) -> click.NoSuchOption:
    """Return the error with only the suggestions that are close to what the user typed."""
    typed = error.option_name.lstrip("-")
    close = [
        name
        for name in error.possibilities or ()
        if difflib.SequenceMatcher(None, typed, name.lstrip("-")).ratio() >= _ALIKE
    ]
    return click.NoSuchOption(error.option_name, possibilities=close, ctx=error.ctx)
