"""Typed messages: line editing, pasted lines, blocks of lines, completion with Tab, history."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType

from . import ui
from .linehistory import LineHistory

BLOCK = '"""'


def start_editing(commands: Sequence[str], with_files: Sequence[str], history: LineHistory) -> None:
    """Let Tab complete commands and file names, keep pasted lines together, and recall messages.

    commands: what Tab completes. with_files: those that take a file name. history: messages of
    earlier conversations. Does nothing if Python has no readline.
    """
    ui.enable_line_editing()
    readline = _readline()
    if readline is None:
        return
    # With bracketed paste, the lines of a paste are one message.
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind("tab: complete")
    readline.set_completer_delims(" \n")

    def complete(text: str, state: int) -> str | None:
        found = candidates(readline.get_line_buffer(), text, commands, with_files)
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    for message in history.load():
        readline.add_history(message)


def candidates(
    line: str, text: str, commands: Sequence[str], with_files: Sequence[str]
) -> list[str]:
    """Return the completions of text, the last word of a line."""
    if line == text:
        return [name for name in commands if text.startswith("/") and name.startswith(text)]
    if line.split(" ")[0] not in with_files:
        return []
    found = sorted(glob.glob(glob.escape(os.path.expanduser(text)) + "*"))
    return [path + os.sep if os.path.isdir(path) else path for path in found]


def next_message(history: LineHistory) -> str | None:
    """Return the next message; empty after Ctrl-C, None at the end of the input.

    history: gets the message as it was typed.
    """
    readline = _readline()
    n_before = readline.get_current_history_length() if readline else 0
    try:
        message = ui.ask(">>> ")
        if not message.startswith(BLOCK):
            history.add(message)
            return message
        message = _read_block(message.removeprefix(BLOCK), ui.ask)
        history.add(f"{BLOCK}{message}{BLOCK}" if message else "")
        if readline:
            _join_history(readline, n_before, message)
        return message
    except KeyboardInterrupt:
        ui.write_text("\n", stream=sys.stderr)
        ui.note("(Ctrl-D or /quit ends the conversation)")
        return ""
    except EOFError:
        ui.write_text("\n", stream=sys.stderr)
        return None


def _read_block(first: str, ask: Callable[[str], str]) -> str:
    """Return the lines of a block; the closing mark or Ctrl-D ends it."""
    lines = [first]
    while not lines[-1].endswith(BLOCK):
        try:
            lines.append(ask("... "))
        except EOFError:
            ui.write_text("\n", stream=sys.stderr)
            break
    return "\n".join(lines).removesuffix(BLOCK)


def _readline() -> ModuleType | None:
    """Return Python's readline if it is loaded."""
    return sys.modules.get("readline")


def _join_history(readline: ModuleType, n_before: int, message: str) -> None:
    """Replace the lines of a block in the history by one entry."""
    with suppress(ValueError):
        for at in range(readline.get_current_history_length() - 1, n_before - 1, -1):
            readline.remove_history_item(at)
    if message:
        readline.add_history(f"{BLOCK}{message}{BLOCK}")
