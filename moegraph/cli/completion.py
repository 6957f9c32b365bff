"""`moegraph completion`: what a shell needs to complete command lines."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from ..errors import InternalError
from ..modelfile.resolve import SHIPPED

SHELLS = ("bash", "zsh", "fish")


class ModelTarget(click.ParamType[str]):
    """A model: the name of a shipped one, or a path; a text like any other until it is opened."""

    name = "text"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the shipped names that begin so; without any, have the shell look for files."""
        names = [name for name in SHIPPED if incomplete and name.startswith(incomplete)]
        if names:
            return [CompletionItem(name) for name in names]
        return [CompletionItem(incomplete, type="file")]


MODEL_TARGET = ModelTarget()


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(SHELLS), metavar="SHELL")
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that has SHELL (bash, zsh or fish) complete commands, options and files.

    For the running shell alone: eval "$(moegraph completion bash)".

    \b
    Examples:
      moegraph completion bash >> ~/.bashrc
      moegraph completion zsh > ~/.zfunc/_moegraph
      moegraph completion fish > ~/.config/fish/completions/moegraph.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise InternalError(f"no completion for {shell}")
    program = ctx.find_root()
    script = kind(program.command, {}, "moegraph", "_MOEGRAPH_COMPLETE").source()
    # Where nothing of ours fits, bash should complete file names, as it does for other programs.
    click.echo(script.replace("complete -o nosort -F", "complete -o nosort -o default -F"))
