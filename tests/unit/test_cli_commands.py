"""What can be typed in `moegraph chat` besides questions."""

from __future__ import annotations

import json
import os
import pty
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from helpers.disk import file_limit
from helpers.fake_engine import FakeEngine

from moegraph.cli import ui
from moegraph.cli.typed import VARIABLE, LineHistory, history_path
from moegraph.text.chat.template import TEMPLATE_KEY

if TYPE_CHECKING:
    from click.testing import Result
    from conftest import Cli

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
KV = {TEMPLATE_KEY: TEMPLATE, "general.sampling.top_k": 20}
Talk = Callable[..., "Result"]


@pytest.fixture
def talk(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Return a function that types lines into a conversation, and then Ctrl-D."""

    def run(*lines: str, args: tuple[str, ...] = ()) -> Result:
        rest: Iterator[str] = iter(lines)

        def ask(prompt: str) -> str:
            for line in rest:
                return line
            raise EOFError

        monkeypatch.setattr(ui, "stdin_is_terminal", lambda: True)
        monkeypatch.setattr(ui, "ask", ask)
        result = cli("chat", "m", *args)
        assert result.exit_code == 0, result.output
        return result

    cli.engine = FakeEngine("one", "two", "three", kv=KV)
    return run


def prompts(cli: Cli) -> list[str]:
    return [call.prompt for call in cli.engine.calls]


def test_clear_forgets_all_but_the_system_prompt(cli: Cli, talk: Talk) -> None:
    talk("a", "/clear", "b", args=("-sys", "S"))
    assert prompts(cli)[1] == "[system]S[user]b[assistant]"
    assert cli.engine.n_resets == 1


@pytest.mark.parametrize(
    "line", ["/etc/passwd is what?", "/2 is a half?", "/clear\nthe table", " /dance", " /help me"]
)
def test_a_message_may_begin_with_a_slash(cli: Cli, talk: Talk, line: str) -> None:
    talk(line)
    assert prompts(cli) == [f"[user]{line.strip()}[assistant]"]


@pytest.mark.parametrize(
    "line, wrong",
    [("/dance", "there is no /dance"), ("/exit now", "/exit takes no argument"),
     ("/", "there is no /"), ("/help me", "/help takes no argument")],
)  # fmt: skip
def test_a_wrong_command_is_no_message(cli: Cli, talk: Talk, line: str, wrong: str) -> None:
    shown = talk(line).stderr
    assert f"error: {wrong}; see /help; a line that begins with a blank is a message" in shown
    assert prompts(cli) == []


def test_regen_asks_again_with_another_seed(cli: Cli, talk: Talk) -> None:
    result = talk("/regen", "a", "b", "/regen")
    assert "error: there is no question to ask again; type one first" in result.stderr
    assert prompts(cli)[2] == prompts(cli)[1] == "[user]a[assistant]one[user]b[assistant]"
    seeds = [call.sampling.seed for call in cli.engine.calls]
    assert seeds[0] == seeds[1] != seeds[2]


def test_system_replaces_the_system_prompt(cli: Cli, talk: Talk) -> None:
    shown = talk("a", "/system Be brief.", "b", '/system ""', "/system", "c").stderr
    assert prompts(cli)[1] == "[system]Be brief.[user]a[assistant]one[user]b[assistant]"
    assert prompts(cli)[2].startswith("[user]a")
    assert "system prompt: Be brief." in shown and "no system prompt" in shown


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("/set heat 1", "no setting 'heat'; there are temperature, top_k"),
        ("/set temp warm", "temperature is 'warm'; allowed: -100 to 100"),
        ("/set top_p 2", "top_p is 2.0 (--top-p); allowed: 0 to 1"),
    ],
)
def test_a_setting_that_is_wrong_changes_nothing(cli: Cli, talk: Talk, line: str, why: str) -> None:
    assert why in talk(line, "a").stderr
    assert cli.engine.calls[0].sampling.temperature == 0.8


def test_a_conversation_can_be_saved_and_continued(cli: Cli, talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "my talk.json"
    assert f"saved 1 turn to {path}" in talk("a", f"/save {path}", args=("-sys", "S")).stderr
    talk(f'/load "{path}"', "b")
    assert prompts(cli)[1] == "[system]S[user]a[assistant]one[user]b[assistant]"
    # A conversation may be replaced, anything else not.
    assert "saved 2 turns" in talk(f"/load {path}", "b", f"/save {path}").stderr
    (tmp_path / "notes").write_text("mine")
    assert "holds no conversation" in talk(f"/save {tmp_path / 'notes'}").stderr
    assert (tmp_path / "notes").read_text() == "mine"
    assert "cannot write: No such file" in talk(f"/save {tmp_path / 'no' / 'x'}").stderr


def test_a_full_disk_does_not_cost_a_saved_conversation(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    talk("a", f"/save {path}")
    before = path.read_text()
    with file_limit(16):
        assert "cannot write: File too large" in talk(f"/load {path}", "b", f"/save {path}").stderr
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", "[" * 100_000, '{"format": "moegraph conversation", "version": 2}',
        '{"format": "moegraph conversation", "version": 1, "messages": [{"role": "user"}]}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_conversation(cli: Cli, talk: Talk, tmp_path: Path, text: str) -> None:
    (tmp_path / "f").write_text(text)
    assert "not a conversation that /save wrote" in talk(f"/load {tmp_path / 'f'}").stderr


@pytest.mark.parametrize("roles", [["user"], ["assistant", "user"], ["user", "user"], ["root"]])
def test_messages_that_are_no_turns(talk: Talk, tmp_path: Path, roles: list[str]) -> None:
    messages = [{"role": role, "content": "x"} for role in roles]
    saved = {"format": "moegraph conversation", "version": 1, "messages": messages}
    (tmp_path / "f").write_text(json.dumps(saved))
    shown = talk(f"/load {tmp_path / 'f'}", "a").stderr
    assert "error: the messages do not alternate" in shown or "error: message role 'root'" in shown


def test_read_asks_about_a_file(cli: Cli, talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("text\n")
    shown = talk(f"/read {tmp_path / 't'} What is it?", "/read nope", f'/read "{tmp_path}').stderr
    assert prompts(cli) == ["[user]text\n\nWhat is it?[assistant]"]
    assert "nope: cannot read the prompt" in shown and "No closing quotation" in shown


def test_what_counts_as_piped_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def has_text(fd: int) -> bool:
        with open(fd, encoding="utf-8") as stream:
            monkeypatch.setattr(sys, "stdin", stream)
            return ui.stdin_has_text()

    (tmp_path / "f").touch()
    reader, writer = os.pipe()
    master, slave = pty.openpty()
    assert has_text(reader) and has_text(os.open(tmp_path / "f", os.O_RDONLY))
    assert not has_text(slave) and not has_text(os.open(os.devnull, os.O_RDONLY))
    os.close(writer)
    os.close(master)


class TestLineHistory:
    """What was typed in earlier conversations."""

    def test_messages_come_back_in_the_next_conversation(
        self, talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(VARIABLE, str(tmp_path / "new" / "h"))
        talk("a", "  ", "two\nlines", "/clear", '"""one', 'two"""', "/quit")
        path = history_path()
        assert path is not None and path.stat().st_mode & 0o77 == 0
        typed_before = ["a", "two\nlines", "/clear", '"""one\ntwo"""', "/quit"]
        assert LineHistory(path).load() == typed_before
        recalled: list[str] = []
        fake = SimpleNamespace(
            parse_and_bind=lambda _: None, set_completer_delims=lambda _: None,
            set_completer=lambda _: None, add_history=recalled.append,
            get_current_history_length=lambda: len(recalled),
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "readline", fake)
        talk("b")
        assert recalled == typed_before
        assert LineHistory(path).load() == [*typed_before, "b"]

    def test_a_damaged_file_and_one_that_cannot_be_written_are_no_errors(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "h").write_bytes(b'"a"\n{\n\xff\n[1]\n"b\n"c"\n')
        assert LineHistory(tmp_path / "h").load() == ["a", "c"]
        for history in (LineHistory(tmp_path), LineHistory(Path("/proc/none/h"))):
            history.add("a")
            assert history.load() == []

    def test_the_last_messages_of_a_long_file_come_back(self, tmp_path: Path) -> None:
        path = tmp_path / "h"
        path.write_text("".join(f'"{i}"\n' for i in range(2001)))
        assert LineHistory(path).load() == [str(i) for i in range(1001, 2001)]

    def test_where_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setenv("XDG_STATE_HOME", "/state")
        assert history_path() == Path("/state/moegraph/chat_history")
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setenv("HOME", "/me")
        assert history_path() == Path("/me/.local/state/moegraph/chat_history")
        monkeypatch.setenv(VARIABLE, "")
        assert history_path() is None


def test_a_model_without_an_encoder_is_shown_no_picture(cli: Cli, talk: Talk) -> None:
    result = talk("/image x.png what is it?", "/image", "b")
    assert "reads no pictures without --mmproj FILE" in result.stderr
    assert prompts(cli) == ["[user]b[assistant]"]
