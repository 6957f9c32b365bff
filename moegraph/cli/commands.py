"""The commands of `moegraph chat`, which a user types instead of a question: /clear, /set, ..."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RequestError
from ..sampling import settings as sampling_settings
from ..setting import Setting
from ..text.chat import Message
from ..units import MiB, format_bytes
from . import options, ui
from .conversation import Conversation
from .typed import BLOCK

_FORMAT, _VERSION = "moegraph conversation", 1
_MAX_BYTES = 64 * MiB
_COMMAND = re.compile(r"/([a-z]*|\?)")


@dataclass(frozen=True)
class ChatCommand:
    """A chat command.

    takes: the argument as /help shows it: empty for none, in brackets if optional. act: a function
    of the conversation and the argument; it may return a question for the model.
    """

    takes: str
    help: str
    act: Callable[[Conversation, str], str | None]

    def fits(self, argument: str) -> bool:
        """Return whether an argument, or none, is what the command takes."""
        return bool(self.takes) if argument else self.takes[:1] in ("", "[")


def find_command(message: str) -> tuple[ChatCommand, str] | None:
    """Return the command that a message holds, and its argument; None if it is a question.

    A message is a command if it is one line that begins with a slash and a word of letters.
    """
    word, _, argument = message.rstrip().partition(" ")
    if "\n" in message.rstrip() or not _COMMAND.fullmatch(word):
        return None
    command, argument = COMMANDS.get(word), argument.strip()
    if command is None or (argument and not command.takes):
        is_known = command is not None or word in QUIT
        wrong = f"{word} takes no argument" if is_known else f"there is no {word}"
        raise RequestError(f"{wrong}; see /help; a line that begins with a blank is a message")
    return command, argument


def run_command(talk: Conversation, command: ChatCommand, name: str, argument: str) -> str | None:
    """Run a command; return the question to ask next, if any."""
    if not command.fits(argument):
        raise RequestError(f"{name} takes {command.takes}")
    return command.act(talk, argument)


def _clear(talk: Conversation, _: str) -> None:
    talk.forget()
    ui.note("cleared")


def _again(talk: Conversation, _: str) -> str:
    question = talk.history.undo()
    if question is None:
        raise RequestError("there is no question to ask again; type one first")
    if talk.sampling.is_greedy:
        ui.note("note: at temperature 0 the answer is always the same; see /set temp")
    talk.draw_anew()
    return question


def _system(talk: Conversation, text: str) -> None:
    talk.history.system = None if text in ('""', "''") else text or talk.history.system
    shown = talk.history.system
    ui.note("no system prompt" if shown is None else f"system prompt: {shown}")


def _set(talk: Conversation, argument: str) -> None:
    name, _, text = argument.partition(" ")
    if not name:
        return _list_sampling(talk)
    setting = _setting_named(name)
    if not text.strip():
        return ui.note(f"{setting.name} is {getattr(talk.sampling, setting.name)}")
    try:
        value: Any = (int if setting.kind == "int" else float)(text.strip())
    except ValueError:
        raise RequestError(
            f"{setting.name} is {text.strip()!r}; allowed: {setting.allowed}"
        ) from None
    changed = replace(talk.sampling, **{setting.name: value})
    talk.sampling = changed.validate(talk.engine.hparams.n_vocab).seeded()
    talk.from_file.pop(setting.name, None)
    ui.note(f"{setting.name} is {getattr(talk.sampling, setting.name)}")
    return None


def _setting_named(name: str) -> Setting:
    wanted = name.lstrip("-").replace("-", "_")
    for setting in sampling_settings():
        spellings = {flag.lstrip("-").replace("-", "_") for flag in setting.flags}
        if wanted == setting.name or wanted in spellings:
            return setting
    known = ", ".join(s.name for s in sampling_settings())
    raise RequestError(f"no setting {name!r}; there are {known}")


def _list_sampling(talk: Conversation) -> None:
    for setting in sampling_settings():
        where = "  (of the model file)" if setting.name in talk.from_file else ""
        ui.note(f"{setting.name:<18} {getattr(talk.sampling, setting.name)}{where}")


def _save(talk: Conversation, name: str) -> None:
    from ..placement.trace import replace_file

    path = Path(_one_path(name))
    if os.path.lexists(path) and not _is_saved(path):
        raise RequestError(f"{path}: exists and holds no conversation; choose another name")
    messages = [{"role": m.role, "content": m.content} for m in talk.history.messages]
    saved = {"format": _FORMAT, "version": _VERSION, "messages": messages}
    text = json.dumps(saved, ensure_ascii=False, indent=1) + "\n"
    try:
        replace_file(path, [text.encode(errors="replace")])
    except ConfigError as error:
        raise RequestError(str(error)) from error
    turns = talk.history.n_turns
    ui.note(f"saved {turns} turn{'' if turns == 1 else 's'} to {path}")


def _load(talk: Conversation, name: str) -> None:
    path = Path(_one_path(name))
    talk.history.restore(_read_saved(path))
    talk.n_held = 0
    turns = talk.history.n_turns
    ui.note(f"loaded {turns} turn{'' if turns == 1 else 's'} from {path}")


def _is_saved(path: Path) -> bool:
    try:
        _read_saved(path)
    except RequestError:
        return False
    return True


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
    try:
        name, *rest = shlex.split(argument)
    except ValueError as error:
        raise RequestError(f"{argument}: {error}") from None
    return options.joined_question(options.read_text(_expanded(name)), " ".join(rest))


def _one_path(argument: str) -> str:
    try:
        parts = shlex.split(argument)
    except ValueError:
        parts = [argument]
    return _expanded(parts[0] if len(parts) == 1 else argument)


def _expanded(name: str) -> str:
    return os.path.expanduser(name)


def _show(talk: Conversation, _: str) -> None:
    engine = talk.engine
    ui.note(f"model    {engine.file.path} on {engine.device_name}, mode {engine.mode}")
    turns = talk.history.n_turns
    ui.note(f"context  {talk.n_held} of {engine.n_ctx} tokens; questions so far: {turns}")
    kept = engine.prefixes
    places = "1 place" if kept.n_places == 1 else f"{kept.n_places} places"
    ui.note(f"kept     {places} to go on from, {format_bytes(kept.n_bytes)}")
    ui.note(f"system   {talk.history.system or '(none)'}")
    limit = "none" if talk.max_tokens is None else talk.max_tokens
    ui.note(f"limit    {limit} (-n)")
    _list_sampling(talk)


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
    "/system": ChatCommand("[TEXT]", 'show or set the system prompt, "" for none', _system),
    "/set": ChatCommand("[NAME [VALUE]]", "show or change sampling settings", _set),
    "/show": ChatCommand("", "show model, context and settings", _show),
    "/save": ChatCommand("FILE", "write the conversation to a file", _save),
    "/load": ChatCommand("FILE", "continue a saved conversation", _load),
    "/help": ChatCommand("", "show this list (also: /?)", _help),
    "/?": ChatCommand("", "", _help),
}
QUIT = ("/quit", "/exit", "/bye")
WITH_FILES = ("/read", "/save", "/load")
