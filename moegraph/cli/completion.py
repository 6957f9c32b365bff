"""`moegraph completion`: scripts with which a shell completes command lines."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from ..errors import InternalError
from ..gguf.resolve import SHIPPED

SHELLS = ("bash", "zsh", "fish")


class ModelTarget(click.ParamType[str]):
    """A model: the name of a shipped one, or a path; not checked before it is opened."""

    name = "text"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the shipped names that begin with the text; if none does, ask for file names."""
        names = [name for name in SHIPPED if incomplete and name.startswith(incomplete)]
        if names:
            return [CompletionItem(name) for name in names]
        return [CompletionItem(incomplete, type="file")]


MODEL_TARGET = ModelTarget()


@click.command()
@click.argument("shell", type=click.Choice(SHELLS), metavar="SHELL")
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script with which SHELL (bash, zsh or fish) completes commands, options and files.

    To use it in the current shell only: eval "$(moegraph completion bash)".

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
    # If moegraph offers no completion, bash should complete file names, as for other programs.
    click.echo(script.replace("complete -o nosort -F", "complete -o nosort -o default -F"))
