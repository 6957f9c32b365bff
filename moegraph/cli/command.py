"""A command whose --help lists its options under headings."""

from __future__ import annotations

from typing import Any

import click

from ..config import GROUPS


class Option(click.Option):
    """An option that is listed under a heading in --help.

    group: one of config.GROUPS.
    """

    def __init__(self, *args: Any, group: str = GROUPS[0], **described: Any) -> None:
        super().__init__(*args, **described)
        self.group = group


def group_of(param: click.Parameter) -> str:
    """Return the heading of an option; an option without its own heading is common."""
    return param.group if isinstance(param, Option) else GROUPS[0]


class Command(click.Command):
    """A click command with grouped options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one section for each heading that has options."""
        for group in GROUPS:
            options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
            found = [p.get_help_record(ctx) for p in options if group_of(p) == group]
            rows = [record for record in found if record is not None]
            if rows:
                with formatter.section(f"{group} options"):
                    formatter.write_dl(rows)
