"""The `moegraph` program: its commands, and how errors become exit codes."""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TextIO

import click

from .. import __version__
from ..config import debug_level
from ..errors import Cancelled, InternalError, MoegraphError, NativeError
from ..sources import read_sources
from . import ui
from .foreign import refuse_command, refuse_foreign, with_close_guesses
from .given import check_keys, find_values, line_of, rows, settable, spellings

# The function of each command, and what the list of commands says about it. A command's module
# is imported when it is used: all of them together take a quarter of a second.
COMMANDS = {
    "run": ("run.run", "Continue a prompt."),
    "chat": ("chat.chat", "Talk with a model."),
    "serve": ("serve.serve", "Answer clients over HTTP."),
    "inspect": ("inspect.inspect", "Show what a model file holds and what fits."),
    "plan": ("plan.plan_command", "Show what fits on a card, and the predicted speed."),
    "trace": ("trace.trace_command", "Record which experts a run chooses."),
    "simulate": (
        "simulate.simulate_command",
        "Replay a routing trace with other cache sizes and policies.",
    ),
    "bench": ("bench.bench", "Measure speed as llama-bench does."),
    "perplexity": ("perplexity.perplexity", "Measure how well a model predicts a text."),
    "doctor": ("doctor.doctor", "Check the installation and the machine."),
    "pull": ("models.pull", "Download a model, or check the one that is there."),
    "models": ("models.list_models", "List or remove downloaded models."),
    "daemon": ("daemon.daemon", "Answer requests that come as lines on stdin."),
    "worker": ("worker.worker", "Lend this machine's devices to another one."),
    "config": ("program.config", "Show settings, and where each comes from."),
    "completion": ("program.completion", "Print the completion script of a shell."),
}
# The exit code that a shell reports for a program ended by SIGPIPE.
EXIT_BROKEN_PIPE = 141
# Commands that show settings, or help to set them, and so work with a wrong file too.
_UNSET = ("config", "completion")
SHELLS = ("bash", "zsh", "fish")


class _ReaderGone(Exception):
    """The reader of stdout has closed the pipe."""


@contextmanager
def _bypass_click() -> Iterator[None]:
    """Bypass click's own handling of Ctrl-C and of a closed pipe."""
    try:
        yield
    except KeyboardInterrupt:
        raise Cancelled from None
    except BrokenPipeError:
        raise _ReaderGone from None


def load_command(name: str) -> click.Command:
    """Import a command."""
    place, summary = COMMANDS[name]
    module, _, function = place.partition(".")
    command: click.Command = getattr(import_module(f"{__package__}.{module}"), function)
    command.short_help = summary
    return command


class Program(click.Group):
    """A group that reports each error as one line on stderr and an exit code."""

    def main(
        self, args: Any = None, prog_name: str | None = None, complete_var: str | None = None,
        standalone_mode: bool = True, **extra: Any,
    ) -> Any:  # fmt: skip
        """Run a command line and exit."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        _prepare_streams()
        sys.exit(_flush(self._run(args, prog_name or "moegraph", complete_var, extra)))

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Read the program's options; some of them print something."""
        with _bypass_click():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        with _bypass_click():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a name, if there is one."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; refuse options of other programs, and letters that are run together."""
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            refuse_command(args[0], list(COMMANDS), ctx)
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            own = click.Context(command, info_name=name, parent=ctx)
            refuse_foreign(command, own, rest)
            if name and name not in _UNSET and not {"-h", "--help"} & set(rest):
                ctx.default_map = {name: _given_elsewhere(command, own)}
        return name, command, rest

    def _run(self, args: Any, name: str, complete_var: str | None, extra: dict[str, Any]) -> int:
        try:
            result = super().main(args, name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
        except (KeyboardInterrupt, click.Abort):
            return _say("", Cancelled.exit_code)
        except click.UsageError as error:
            if isinstance(error, click.NoSuchOption):
                error = with_close_guesses(error)
            words = list(sys.argv[1:] if args is None else args)
            own = f"{name} {words[0]}" if words and words[0] in COMMANDS else name
            where = error.ctx.command_path if error.ctx else own
            # click puts each choice on its own line
            message = " ".join(error.format_message().split())
            if isinstance(error, click.NoSuchOption) and where == name and not error.possibilities:
                message += " A command comes first, as in moegraph run TARGET -p TEXT."
            return _say(f"{message} (see {where} -h)", error.exit_code)
        except click.ClickException as error:
            return _say(error.format_message(), error.exit_code)
        except (_ReaderGone, BrokenPipeError):
            return EXIT_BROKEN_PIPE
        except MoegraphError as error:
            return _say(str(error), error.exit_code)
        except MemoryError:
            return _say(
                "out of host memory; lower -c/--ctx-size or choose a smaller model",
                NativeError.exit_code,
            )
        except OSError as error:
            return _say(f"{error.filename or 'output'}: {error.strerror or error}", 1)
        except Exception as error:  # noqa: BLE001 - whatever fails, a user sees one line
            return _say(str(InternalError(f"{type(error).__name__}: {error}")), 1)


def _given_elsewhere(command: click.Command, ctx: click.Context) -> dict[str, Any]:
    """Return the options that files and the environment set, for click, which ranks them."""
    sources = read_sources()
    own = {ctx.info_name or "": {name for o in settable(command) for name in spellings(o)}}
    if any(found for source in sources[1:] for found in source.others(own)):
        check_keys(sources, known_keys())  # imports all commands
    return {name: found.value for name, found in find_values(command, ctx, sources).items()}


def known_keys() -> dict[str, set[str]]:
    """Return the spellings of the options of each command."""
    return {
        name: {key for option in settable(load_command(name)) for key in spellings(option)}
        for name in COMMANDS
    }


def _prepare_streams() -> None:
    """Make the standard streams usable, also if the caller closed some of them."""
    # A stream that was closed before the start, as by >&- in a shell, is None here.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")
    sys.stdout, sys.stderr = _reliable(sys.stdout), _reliable(sys.stderr)


def _reliable(stream: TextIO) -> TextIO:
    """Return a stream that writes all of a text, whatever it is."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    if isinstance(stream.buffer, io.RawIOBase):
        # With PYTHONUNBUFFERED, the rest of a text would be dropped if the system writes less of
        # it: the process was stopped, or the disk has become full.
        stream = open(stream.fileno(), "w", 1, stream.encoding, closefd=False)
    # a terminal that cannot show a character must not stop the program
    stream.reconfigure(errors="replace")
    return stream


def _say(message: str, code: int) -> int:
    """Print an error, and with MOEGRAPH_DEBUG=1 its traceback; return the code."""
    try:
        if debug_level() >= 1:
            traceback.print_exc()
        if code == Cancelled.exit_code:
            sys.stderr.write("\n" if ui.is_terminal(sys.stderr) else "")
            ui.note("interrupted")
        else:
            ui.error(message)
    except OSError:
        pass  # stderr is closed; only the exit code remains
    return code


def _flush(code: int) -> int:
    """Flush stdout here, because at exit the interpreter would print a traceback."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = code or EXIT_BROKEN_PIPE
    except OSError as error:
        code = code or _say(f"output: {error.strerror}", 1)
    else:
        return code
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    try:
        from ..ggml.lib import device_kinds, summary

        native = f"{summary()}; devices: {', '.join(device_kinds())}"
    except MoegraphError:
        native = "native libraries not built"
    click.echo(f"moegraph {__version__} ({native})")
    ctx.exit()


@click.group(
    cls=Program, name="moegraph", invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)  # fmt: skip
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version,
    help="Show the versions of moegraph, ggml, llama.cpp and the patch set.",
)  # fmt: skip
@click.pass_context
def main(ctx: click.Context) -> None:
    """Run Mixture-of-Experts models (GGUF) on GPUs too small for all their experts.

    \b
    Examples:
      moegraph run tiny -p "def fibonacci(n):" -n 100
      moegraph chat Qwen3.6-35B-A3B-Q4_K_M.gguf
      moegraph inspect Qwen3.6-35B-A3B-Q4_K_M.gguf --vram 12
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@click.command()
@click.argument("command", default="serve", type=click.Choice(list(COMMANDS)), metavar="COMMAND")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def config(ctx: click.Context, command: str, as_json: bool) -> None:
    """Show the options that COMMAND (default: serve) has without any, and where each comes from.

    The command line comes first, then the environment, then moegraph.toml in this folder, then
    moegraph/moegraph.toml in $XDG_CONFIG_HOME or ~/.config. Keys are long options without dashes,
    such as ctx-size = 8192; a table such as [serve] is for one command. Variables are in capitals:
    MOEGRAPH_CTX_SIZE. An unknown key in a file is an error, an unknown variable is only shown.

    \b
    Examples:
      moegraph config
      moegraph config bench --json
      moegraph config | grep -v "# default" > moegraph.toml
    """
    sources, known, chosen = read_sources(), known_keys(), load_command(command)
    found = rows(chosen, click.Context(chosen, info_name=command, parent=ctx.parent), sources)
    unknown = [str(one) for source in sources for one in source.others(known)]
    if as_json:
        listed = [{"key": r.key, "value": r.value, "source": r.where} for r in found]
        click.echo(json.dumps({"settings": listed, "unknown": unknown}))
    else:
        lines = [*map(line_of, found), *(f"# {one}: unknown" for one in unknown)]
        click.echo("\n".join(lines))
    check_keys(sources, known)


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
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise InternalError(f"no completion for {shell}")
    program = ctx.find_root()
    script = kind(program.command, {}, "moegraph", "_MOEGRAPH_COMPLETE").source()
    # If moegraph offers no completion, bash should complete file names, as for other programs.
    click.echo(script.replace("complete -o nosort -F", "complete -o nosort -o default -F"))
