"""What a user types in a conversation: messages, commands such as /clear, and their history."""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError, RequestError
from ..sampling import settings as sampling_settings
from ..setting import Setting
from ..text.chat.messages import Message
from ..units import MiB, format_bytes
from . import options, ui
from .conversation import Conversation

# Environment variable with the file; empty: keep nothing.
VARIABLE = "MOEGRAPH_HISTORY"
_MAX_ENTRIES, _MAX_BYTES = 1000, 8 * MiB
BLOCK = '"""'
_FORMAT, _VERSION = "moegraph conversation", 1
_COMMAND = re.compile(r"/([a-z]*|\?)")
QUIT = ("/quit", "/exit", "/bye")
_WITH_FILES = ("/read", "/image", "/save", "/load")


def history_path() -> Path | None:
    """Return the file of typed messages; None if the user wants none, or has no home."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(given) if given else None
    folder = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(folder) / "moegraph" / "chat_history" if os.path.isabs(folder) else None


class LineHistory:
    """A file with one JSON string a line, which only its owner can read.

    Lines are appended as messages are typed, so two conversations can share the file. That a
    message cannot be read or written is never an error.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def load(self) -> list[str]:
        """Return the latest messages, oldest first."""
        if self._path is None:
            return []
        try:
            with open(self._path, "rb") as file:
                file.seek(-min(_MAX_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
                data = file.read()
        except OSError:
            return []
        return list(_entries(data))[-_MAX_ENTRIES:]

    def add(self, message: str) -> None:
        """Append a message."""
        if self._path is None or not message.strip():
            return
        with suppress(OSError, ValueError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with open(os.open(self._path, flags, 0o600), "ab") as file:
                file.write(json.dumps(message).encode() + b"\n")


def _entries(data: bytes) -> Iterator[str]:
    """Yield the messages in a file; damaged lines are left out."""
    for line in data.splitlines():
        with suppress(ValueError, RecursionError):
            message = json.loads(line)
            if isinstance(message, str):
                yield message


def start_editing(history: LineHistory) -> None:
    """Let Tab complete commands and file names, keep pasted lines together, and recall messages.

    history: messages of earlier conversations. Does nothing if Python has no readline.
    """
    try:
        import readline  # gives input() arrow keys, too
    except ImportError:
        return
    # With bracketed paste, the lines of a paste are one message.
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind("tab: complete")
    readline.set_completer_delims(" \n")

    def complete(text: str, state: int) -> str | None:
        found = _candidates(readline.get_line_buffer(), text)
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    for message in history.load():
        readline.add_history(message)


def _candidates(line: str, text: str) -> list[str]:
    """Return the completions of text, the last word of a line."""
    if line == text:
        names = (*COMMANDS, *QUIT)
        return [name for name in names if text.startswith("/") and name.startswith(text)]
    if line.split(" ")[0] not in _WITH_FILES:
        return []
    found = sorted(glob.glob(glob.escape(os.path.expanduser(text)) + "*"))
    return [path + os.sep if os.path.isdir(path) else path for path in found]


def next_message(history: LineHistory) -> str | None:
    """Return the next message; empty after Ctrl-C, None at the end of the input.

    history: gets the message as it was typed.
    """
    readline = sys.modules.get("readline")
    n_before = readline.get_current_history_length() if readline else 0
    try:
        message = ui.ask(">>> ")
        if not message.startswith(BLOCK):
            history.add(message)
            return message
        message = _read_block(message.removeprefix(BLOCK))
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


def _read_block(first: str) -> str:
    """Return the lines of a block; the closing mark or Ctrl-D ends it."""
    lines = [first]
    while not lines[-1].endswith(BLOCK):
        try:
            lines.append(ui.ask("... "))
        except EOFError:
            ui.write_text("\n", stream=sys.stderr)
            break
    return "\n".join(lines).removesuffix(BLOCK)


def _join_history(readline: ModuleType, n_before: int, message: str) -> None:
    """Replace the lines of a block in the history by one entry."""
    with suppress(ValueError):
        for at in range(readline.get_current_history_length() - 1, n_before - 1, -1):
            readline.remove_history_item(at)
    if message:
        readline.add_history(f"{BLOCK}{message}{BLOCK}")


@dataclass(frozen=True)
class ChatCommand:
    """A chat command.

    takes: the argument as /help shows it: empty for none, in brackets if optional. act: a function
    of the conversation and the argument; it may return a question for the model.
    """

    takes: str
    help: str
    act: Callable[[Conversation, str], str | None]


def obey(chat: Conversation, message: str) -> str:
    """Run the command that a message holds; return the question to ask, if any, or else ''.

    A message is a command if it is one line that begins with a slash and a word of letters. Any
    other is the question itself.
    """
    name, _, argument = message.rstrip().partition(" ")
    if "\n" in message.rstrip() or not _COMMAND.fullmatch(name):
        return message.removeprefix(" ") if message.startswith(" /") else message
    command, argument = COMMANDS.get(name), argument.strip()
    if command is None or (argument and not command.takes):
        is_known = command is not None or name in QUIT
        wrong = f"{name} takes no argument" if is_known else f"there is no {name}"
        raise RequestError(f"{wrong}; see /help; a line that begins with a blank is a message")
    if not argument and command.takes[:1] not in ("", "["):
        raise RequestError(f"{name} takes {command.takes}")
    return command.act(chat, argument) or ""


def _clear(chat: Conversation, _: str) -> None:
    chat.history.clear()
    chat.engine.reset()
    chat.n_held = 0
    ui.note("cleared")


def _again(chat: Conversation, _: str) -> str:
    question = chat.history.undo()
    if question is None:
        raise RequestError("there is no question to ask again; type one first")
    if chat.sampling.is_greedy:
        ui.note("note: at temperature 0 the answer is always the same; see /set temp")
    chat.sampling = replace(chat.sampling, seed=None).seeded()
    return question


def _image(chat: Conversation, argument: str) -> str:
    path, question = _named_file(argument)
    return chat.show(Path(path)) + question


def _system(chat: Conversation, text: str) -> None:
    chat.history.system = None if text in ('""', "''") else text or chat.history.system
    shown = chat.history.system
    ui.note("no system prompt" if shown is None else f"system prompt: {shown}")


def _set(chat: Conversation, argument: str) -> None:
    name, _, text = argument.partition(" ")
    if not name:
        return _list_sampling(chat)
    setting = _setting_named(name)
    if not text.strip():
        return ui.note(f"{setting.name} is {getattr(chat.sampling, setting.name)}")
    try:
        value: Any = (int if setting.kind == "int" else float)(text.strip())
    except ValueError:
        raise RequestError(
            f"{setting.name} is {text.strip()!r}; allowed: {setting.allowed}"
        ) from None
    changed = replace(chat.sampling, **{setting.name: value})
    chat.sampling = changed.validate(chat.engine.hparams.n_vocab).seeded()
    chat.from_file.pop(setting.name, None)
    ui.note(f"{setting.name} is {getattr(chat.sampling, setting.name)}")
    return None


def _setting_named(name: str) -> Setting:
    wanted = name.lstrip("-").replace("-", "_")
    for setting in sampling_settings():
        spellings = {flag.lstrip("-").replace("-", "_") for flag in setting.flags}
        if wanted == setting.name or wanted in spellings:
            return setting
    known = ", ".join(s.name for s in sampling_settings())
    raise RequestError(f"no setting {name!r}; there are {known}")


def _list_sampling(chat: Conversation) -> None:
    for setting in sampling_settings():
        where = "  (of the model file)" if setting.name in chat.from_file else ""
        ui.note(f"{setting.name:<18} {getattr(chat.sampling, setting.name)}{where}")


def _save(chat: Conversation, name: str) -> None:
    from ..placement.trace import replace_file

    path = _path(name)
    if os.path.lexists(path):
        try:
            _read_saved(path)
        except RequestError:
            line = f"{path}: exists and holds no conversation; choose another name"
            raise RequestError(line) from None
    messages = [{"role": m.role, "content": m.content} for m in chat.history.messages]
    saved = {"format": _FORMAT, "version": _VERSION, "messages": messages}
    text = json.dumps(saved, ensure_ascii=False, indent=1) + "\n"
    try:
        replace_file(path, [text.encode(errors="replace")])
    except ConfigError as error:
        raise RequestError(str(error)) from error
    ui.note(f"saved {_turns(chat)} to {path}")


def _load(chat: Conversation, name: str) -> None:
    path = _path(name)
    chat.history.restore(_read_saved(path))
    chat.n_held = 0
    ui.note(f"loaded {_turns(chat)} from {path}")


def _turns(chat: Conversation) -> str:
    return f"{chat.history.n_turns} turn{'' if chat.history.n_turns == 1 else 's'}"


def _read_saved(path: Path) -> list[Message]:
    """Return the messages in a file that /save wrote."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{path}: cannot read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise RequestError(f"{path}: larger than {format_bytes(_MAX_BYTES)}")
    try:
        saved: Any = json.loads(data)
        if (saved["format"], saved["version"]) != (_FORMAT, _VERSION):
            raise ValueError
        messages = [(message["role"], message["content"]) for message in saved["messages"]]
        if not all(isinstance(part, str) for pair in messages for part in pair):
            raise ValueError
        return [Message(role, content) for role, content in messages]
    except (ValueError, TypeError, LookupError, RecursionError):
        raise RequestError(f"{path}: not a conversation that /save wrote") from None


def _read(_: Conversation, argument: str) -> str:
    path, question = _named_file(argument)
    return options.joined_question(options.read_text(path), question)


def _named_file(argument: str) -> tuple[str, str]:
    """Return the file that an argument begins with, and the rest."""
    try:
        name, *rest = shlex.split(argument)
    except ValueError as error:
        raise RequestError(f"{argument}: {error}") from None
    return os.path.expanduser(name), " ".join(rest)


def _path(argument: str) -> Path:
    """Return the path that an argument names, with or without quotes."""
    with suppress(ValueError):
        parts = shlex.split(argument)
        argument = parts[0] if len(parts) == 1 else argument
    return Path(os.path.expanduser(argument))


def _show(chat: Conversation, _: str) -> None:
    engine = chat.engine
    ui.note(f"model    {engine.file.path} on {engine.device_name}, mode {engine.mode}")
    turns = chat.history.n_turns
    ui.note(f"context  {chat.n_held} of {engine.n_ctx} tokens; questions so far: {turns}")
    kept = engine.prefixes.store
    places = "1 place" if kept.n_places == 1 else f"{kept.n_places} places"
    ui.note(f"kept     {places} to go on from, {format_bytes(kept.n_bytes)}")
    ui.note(f"system   {chat.history.system or '(none)'}")
    limit = "none" if chat.max_tokens is None else chat.max_tokens
    ui.note(f"limit    {limit} (-n)")
    _list_sampling(chat)


def _help(_: Conversation, __: str) -> None:
    for name, command in COMMANDS.items():
        if command.help:
            ui.note(f"{name + ' ' + command.takes:<22} {command.help}")
    ui.note(f"{BLOCK:<22} begin and end a message of several lines; Ctrl-D also ends it")
    ui.note("Ctrl-C stops an answer, Ctrl-D ends the conversation, Tab completes commands.")


COMMANDS: dict[str, ChatCommand] = {
    "/clear": ChatCommand("", "forget the conversation; keep the system prompt", _clear),
    "/regen": ChatCommand("", "ask the last question again, with another seed", _again),
    "/read": ChatCommand("FILE [QUESTION]", "ask about the text of FILE", _read),
    "/image": ChatCommand("FILE [QUESTION]", "ask about the picture in FILE", _image),
    "/system": ChatCommand("[TEXT]", 'show or set the system prompt, "" for none', _system),
    "/set": ChatCommand("[NAME [VALUE]]", "show or change sampling settings", _set),
    "/show": ChatCommand("", "show model, context and settings", _show),
    "/save": ChatCommand("FILE", "write the conversation to a file", _save),
    "/load": ChatCommand("FILE", "continue a saved conversation", _load),
    "/help": ChatCommand("", "show this list (also: /?)", _help),
    "/?": ChatCommand("", "", _help),
}
