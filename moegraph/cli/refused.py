"""What a command line means that is not one of ours: llama.cpp's options, letters run together."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import click

_PLACED = "moegraph places experts itself; --vram SIZE limits what it takes on the device"
_ONE_GPU = "moegraph computes on one device; --device cuda:N chooses it"
_DOWNLOAD = "moegraph does not download; get the file first, then give its path"
_FREE_TEXT = "moegraph cannot hold an answer to a grammar or a schema"
_CHAIN = "the order of the samplers is fixed"
_CHAT = "moegraph chat is the conversation, moegraph chat -p TEXT asks one question"
# llama.cpp's options that people try, by the reason why they are not here. Without this list,
# -ngl 99 would be read as -n gl, and -hf as -h -f.
NOT_HERE: dict[tuple[str, ...], str] = {
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): f"{_PLACED}, --device cpu leaves the GPU alone",
    ("-ncmoe", "--n-cpu-moe"): _PLACED,
    ("-cmoe", "--cpu-moe"): f"{_PLACED}, --cache-slots 0 keeps no expert there",
    ("-ot", "--override-tensor"): _PLACED,
    ("-fa", "--flash-attn"): "flash attention is always on",
    ("-b", "--batch-size"): "-ub N is the number of prompt tokens in one pass",
    ("-tb", "--threads-batch"): "-t N sets the threads of prompts and answers alike",
    ("--mlock",): "--host-pin all keeps the experts in memory",
    ("-nommap", "--no-mmap"): "the file is mapped; what the device needs is copied when it loads",
    ("--keep",): "run stops when the context is full; chat drops its oldest turns, and keeps the "
    "system prompt",
    ("--samplers", "--sampling-seq", "--sampler-seq"): _CHAIN,
    ("--mirostat", "--mirostat-lr", "--mirostat-ent"): "there is no Mirostat; see --temp, --top-p",
    ("--grammar", "--grammar-file"): _FREE_TEXT,
    ("-j", "--json-schema", "--json-schema-file"): f"{_FREE_TEXT}; --json is about the report",
    ("-hf", "-hfr", "--hf-repo"): _DOWNLOAD,
    ("-hff", "--hf-file"): _DOWNLOAD,
    ("-mu", "--model-url"): _DOWNLOAD,
    ("--prompt-cache", "--prompt-cache-all", "--prompt-cache-ro"): "prompts are not kept on disk",
    ("-mg", "--main-gpu"): _ONE_GPU,
    ("-sm", "--split-mode"): _ONE_GPU,
    ("-ts", "--tensor-split"): _ONE_GPU,
    ("-dev",): "write --device cpu, cuda or cuda:N",
    ("-nkvo", "--no-kv-offload"): "the KV cache is on the device that computes",
    ("-md", "--model-draft"): "there is no speculative decoding yet",
    ("-st", "--single-turn"): _CHAT,
    ("-cnv", "--conversation"): _CHAT,
    ("-no-cnv", "--no-conversation"): "moegraph run continues a text without a chat template",
    ("-i", "--interactive"): _CHAT,
    ("--jinja", "--no-jinja"): "chat templates are always Jinja",
    ("--chat-template",): "--chat-template-file FILE replaces the template of the model",
    ("-lv", "--verbosity"): "MOEGRAPH_DEBUG=1 shows where errors come from, 2 also native logs",
}
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?", re.I | re.A)
# How alike an unknown option must be to one of ours, dashes left out, to be offered in its place.
_ALIKE = 0.75


def refused_options(taken: Collection[str]) -> list[Callable[[Any], Any]]:
    """Return hidden options that only say why there is no such option.

    taken: spellings that the command itself has.
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
    """Refuse letters run together, such as -pg, which would be read as -p with the value g.

    A number may follow its letter (-n128). args: those after the command's name.

    Raises:
        UsageError: names the letters, and what they would have meant.
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
    """Return an error with only those of its suggestions that are close to what was typed."""
    typed = error.option_name.lstrip("-")
    close = [
        name
        for name in error.possibilities or ()
        if difflib.SequenceMatcher(None, typed, name.lstrip("-")).ratio() >= _ALIKE
    ]
    return click.NoSuchOption(error.option_name, possibilities=close, ctx=error.ctx)
