#!/usr/bin/env python3
"""Write the sections of docs/cli.md that the commands' own help says, or --check them.

They are between <!--NAME--> and <!--end-->; all else is written by hand.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

from _tools import write_or_check

from moegraph import errors
from moegraph.cli import main as program
from moegraph.cli.options import group_of
from moegraph.cli.program import COMMANDS, load_command
from moegraph.config import DRAFT_GROUP, GROUPS
from moegraph.config import settings as engine_settings
from moegraph.sampling import settings as sampling_settings

PAGE = ROOT / "docs" / "cli.md"
END = "<!--end-->"
_ALL_HAVE = "Commands with TARGET have these."
MARK = re.compile(r"<!--(?!end)([\w-]+)-->")
SECTION = re.compile(MARK.pattern + r".*?" + END, re.DOTALL)


def page() -> str:
    """Return the page with all sections that come from the program written anew."""
    context = click.Context(program, info_name="moegraph", **program.context_settings)
    chat = click.Context(load_command("chat"), info_name="chat", parent=context)
    written = {"exit-codes": exit_codes()}
    for title, options in shared().items():
        of_all = [_ALL_HAVE, ""] * (title == "Model options")
        text = "\n".join([f"## {title}", "", *of_all, *table(options, chat)])
        written[title.lower().replace(" ", "-")] = text
    written |= {name: section(load_command(name), context) for name in COMMANDS}
    text = PAGE.read_text(encoding="utf-8")
    if set(MARK.findall(text)) != set(written):
        raise SystemExit(f"{PAGE.name} must have a mark for each of {', '.join(written)}")
    return SECTION.sub(lambda found: f"<!--{found[1]}-->\n{written[found[1]].strip()}\n{END}", text)


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
        (2, "usage", "The command line is wrong: unknown option, missing argument."),
        (141, "closed pipe", "The reader of stdout closed the pipe, as in `| head`."),
    ]
    lines = ["## Exit codes", "", "| code | error | meaning |", "|---:|---|---|"]
    lines += [f"| {code} | {name} | {text} |" for code, name, text in sorted(rows)]
    return "\n".join(lines) + "\n"


def section(command: click.Command, parent: click.Context) -> str:
    """Return the section of one command."""
    context = click.Context(command, info_name=command.name, parent=parent)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text, _, examples = inspect.cleandoc(command.help or "").partition("\b\nExamples:\n")
    lines = [f"## {context.command_path}", "", "```", usage, "```", "", text.strip(), ""]
    lines += ["```sh", inspect.cleandoc(examples), "```", ""]
    usual = [option for options in shared().values() for option in options]
    own = [p for p in visible(command) if not is_shared(p, usual, command)]
    lines += table(own, context)
    for title, options in shared().items():
        lines += shared_line(title, options, [p for p in visible(command) if p not in own])
    return "\n".join(lines) + "\n"


def visible(command: click.Command) -> list[click.Option]:
    """Return the options of a command that --help lists."""
    return [p for p in command.params if isinstance(p, click.Option) and not p.hidden]


def shared() -> dict[str, list[click.Option]]:
    """Return the options that many commands have, as `chat` has them, by the title of a section."""
    engine = {setting.name for setting in engine_settings()}
    sampling = {setting.name for setting in sampling_settings()} | {"logit_bias", "ignore_eos"}
    options = visible(load_command("chat"))
    return {
        "Model options": [option for option in options if option.name in ("model", "hf_repo")],
        "Engine options": [option for option in options if option.name in engine],
        "Sampling options": [option for option in options if option.name in sampling],
    }


def is_shared(option: click.Option, usual: list[click.Option], command: click.Command) -> bool:
    """Return whether the page has an option elsewhere; bench has lists, but the same meaning."""
    for other in usual:
        if other.name == option.name:
            return other.help == option.help or (
                command.name == "bench" and "as the tests need" not in str(option.help)
            )
    return False


def shared_line(title: str, usual: list[click.Option], has: list[click.Option]) -> list[str]:
    """Return a line that says which of the usual options a command also has, if any."""
    names = {option.name for option in has}
    usually = {option.name: option.default for option in usual}
    other = [f"`{o.opts[-1]}` is {o.default}" for o in has
             if not o.multiple and usually.get(o.name, o.default) != o.default]  # fmt: skip
    but_default = f" The default of {', of '.join(other)}." if other else ""
    found, missing = ([o for o in usual if (o.name in names) is here] for here in (True, False))
    where = f"[{title.lower()}](#{title.lower().replace(' ', '-')})"
    if not found or (title == "Model options" and not missing):
        return []
    if len(missing) <= len(found):
        but = f" but {_flags(missing, usual)}" if missing else ""
        return [f"Also the {where}{but}.{but_default}", ""]
    return [f"Also, of the {where}: {_flags(found, usual)}.{but_default}", ""]


def _flags(options: list[click.Option], usual: list[click.Option]) -> str:
    """Return flags; those of drafts in three words if they are all that there are."""
    drafts = [option for option in usual if group_of(option) == DRAFT_GROUP]
    all_drafts = bool(drafts) and all(option in options for option in drafts)
    names = [f"`{o.opts[-1]}`" for o in options if not (all_drafts and o in drafts)]
    return ", ".join(names + ["those of drafts"] * all_drafts)


def table(options: list[click.Option], context: click.Context) -> list[str]:
    """Return the lines of a table of options, by group."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for group in GROUPS:
        rows = [row(option, context) for option in options if group_of(option) == group]
        if rows and group != group_of(options[0]):
            lines.append(f"| **{group} options** | | |")
        lines += rows
    return [*lines, ""]


def row(option: click.Option, context: click.Context) -> str:
    """Return the table row of one option."""
    names = ", ".join((*option.opts, *option.secondary_opts))
    metavar = "" if option.is_flag else f" {option.make_metavar(context)}"
    default = option.get_help_extra(context).get("default", "")
    return f"| `{cell(names + metavar)}` | {default} | {cell(option.help or '')} |"


def cell(text: str) -> str:
    """Return text escaped for a table cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, PAGE, page))
