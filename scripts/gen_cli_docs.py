#!/usr/bin/env python3
"""Write docs/cli.md from the commands' own help, or check that it is up to date (--check)."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from moegraph import errors
from moegraph.cli import main as program

PAGE = ROOT / "docs" / "cli.md"

HEAD = """\
# Command line

This page is generated from the commands' help by `scripts/gen_cli_docs.py`.

Text and reports go to stdout, everything else (notes, speed, progress bars, errors) to stderr.
Nothing is drawn, and no colour is used, where a stream is not a terminal; `NO_COLOR` turns
colour off, too. Option names are llama.cpp's where the meaning is the same. An error is one
line; `MOEGRAPH_DEBUG=1` also shows where it came from. Every command has `-h/--help`;
`moegraph --version` names the libraries, the commit of llama.cpp and the patch set. On a machine
with up to 4 CPUs, CPU threads sleep while they wait for each other, so that other programs do not
slow them down; `OMP_WAIT_POLICY=active` makes them spin, as llama.cpp's do.
"""

RUN_JSON = {
    "model": "path, name, architecture, size and the main dimensions of the model",
    "config": "the settings as they took effect: device, mode, n_ctx, n_ubatch, n_threads, ...",
    "sampling": "the sampler settings, the seed that was used included",
    "prompt_tokens": "ids of the prompt",
    "tokens": "generated ids, the end token included",
    "text": "generated text, up to a stop text",
    "finish_reason": "`stop` (end token or stop text), `length` (-n or context) or `cancelled`",
    "n_prompt": "number of prompt tokens",
    "n_generated": "number of generated tokens",
    "prefill_tps": "prompt tokens a second",
    "decode_tps": "generated tokens a second, the first one left out",
    "timings": "`load_s`, `prefill_s` (to the first token), `decode_s` (from there to the last)",
    "memory": "`device_peak_bytes`, `host_peak_bytes`, `host_pinned_bytes` (copies "
    "of experts), and the parts that take device memory",
    "experts": "hits, misses, bytes, CPU experts, layers whose graphs fetch by themselves, "
    "prefetch, phases, guard; null in mode whole",
    "profile": "path, class, tokens, whether written and why not; null without a profile or misses",
}


def page() -> str:
    """Return the whole page."""
    context = click.Context(program, info_name="moegraph", **program.context_settings)
    parts = [HEAD, exit_codes()]
    for name, command in program.commands.items():
        parts.append(section(command, context))
        if name == "run":
            parts.append(run_json())
    return "\n".join(parts)


def exit_codes() -> str:
    """Return the table of exit codes, from the error classes."""
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    rows = [(0, "success", "")]
    rows += [
        (kind.exit_code, f"`{kind.__name__}`", (kind.__doc__ or "").splitlines()[0])
        for kind in kinds
        if issubclass(kind, errors.MoegraphError) and kind is not errors.MoegraphError
    ]
    rows += [
        (2, "usage", "The command line makes no sense: unknown flag, missing argument."),
        (141, "closed pipe", "Whoever read stdout has left, as with `| head`."),
    ]
    lines = ["## Exit codes", "", "| code | error | meaning |", "|---:|---|---|"]
    lines += [f"| {code} | {name} | {text} |" for code, name, text in sorted(rows)]
    return "\n".join(lines) + "\n"


def run_json() -> str:
    """Return the table of what run --json prints."""
    lines = ["`--json` prints one object:", "", "| key | value |", "|---|---|"]
    lines += [f"| `{key}` | {value} |" for key, value in RUN_JSON.items()]
    return "\n".join(lines) + "\n"


def section(command: click.Command, parent: click.Context) -> str:
    """Return the section of one command."""
    context = click.Context(command, info_name=command.name, parent=parent)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text, _, examples = inspect.cleandoc(command.help or "").partition("\b\nExamples:\n")
    lines = [f"## {context.command_path}", "", "```", usage, "```", "", text.strip(), ""]
    lines += ["```sh", inspect.cleandoc(examples), "```", ""]
    lines += ["| option | default | meaning |", "|---|---|---|"]
    shown = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    lines += [row(option, context) for option in shown]
    return "\n".join(lines) + "\n"


def row(option: click.Option, context: click.Context) -> str:
    """Return the table row of one option."""
    names = ", ".join((*option.opts, *option.secondary_opts))
    metavar = "" if option.is_flag else f" {option.make_metavar(context)}"
    default = option.default if option.show_default and not option.is_flag else ""
    return f"| `{cell(names + metavar)}` | {default} | {cell(option.help or '')} |"


def cell(text: str) -> str:
    """Return text that a table cell may hold."""
    return text.replace("|", "\\|")


def main() -> int:
    """Write the page; with --check, only say whether it is up to date."""
    if sys.argv[1:] not in ([], ["--check"]):
        print("usage: scripts/gen_cli_docs.py [--check]", file=sys.stderr)
        return 2
    text = page()
    if sys.argv[1:]:
        is_fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        if not is_fresh:
            print(f"{PAGE.name} is not up to date; run scripts/gen_cli_docs.py", file=sys.stderr)
        return 0 if is_fresh else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
