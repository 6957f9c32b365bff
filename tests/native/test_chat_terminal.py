"""`moegraph chat` at a terminal, as a person meets it: typed, pasted, recalled, interrupted."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.patience import PATIENCE_S, until

# The shipped model is made to end each answer at once.
CHAT = ("chat", "tiny", "--device", "cpu", "-t", "1", "-c", "512", "--temp", "0")
END = ("--logit-bias", "4094+100")
PROMPT = b">>> "


class Terminal:
    """A program behind a pseudo-terminal."""

    def __init__(self, *args: str, **env: str) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            command = [sys.executable, "-m", "moegraph", *args]
            os.execve(sys.executable, command, {**os.environ, "TERM": "xterm", **env})
        self._seen = b""

    def until(self, mark: bytes) -> str:
        """Read up to a mark; return what came, without escape codes.

        After a prompt, wait until readline listens; before, the terminal echoes what is typed.
        """
        while mark not in self._seen:
            self._read(mark)
        found, _, self._seen = self._seen.partition(mark)
        if mark == PROMPT:
            until(lambda: not termios.tcgetattr(self._fd)[3] & termios.ICANON)
        return plain(found)

    def until_words(self) -> None:
        """Read until some words are shown that are not those of a progress bar."""
        while len(re.sub(r"Reading the prompt[^\r\n]*", "", plain(self._seen)).split()) < 4:
            self._read(b"words")

    def _read(self, wanted: bytes) -> None:
        ready, _, _ = select.select([self._fd], [], [], PATIENCE_S)
        assert ready, f"no {wanted!r} in {self._seen!r}"
        try:
            self._seen += os.read(self._fd, 1 << 16)
        except OSError as error:  # the program ended
            raise AssertionError(f"no {wanted!r} in {self._seen!r}") from error

    def send(self, text: str) -> None:
        """Type text."""
        os.write(self._fd, text.encode())

    def type(self, text: str, until: bytes = PROMPT) -> str:
        """Type text; return what the program shows up to a mark."""
        self.send(text)
        return self.until(until)

    def wait(self) -> int:
        """Wait until the program ends; return its exit status."""
        while True:
            try:
                if not os.read(self._fd, 1 << 16):
                    break
            except OSError:  # Linux reports the end this way
                break
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def close(self) -> None:
        os.close(self._fd)


def plain(shown: bytes) -> str:
    """Return what is shown without escape codes."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode(errors="replace"))


@pytest.fixture
def history(tmp_path: Path) -> Path:
    return tmp_path / "history"


@pytest.fixture
def terminal(history: Path) -> Iterator[Terminal]:
    found = Terminal(*CHAT, *END, MOEGRAPH_HISTORY=str(history))
    yield found
    found.close()


def n_held(shown: str) -> int:
    found = re.search(r"context (\d+) of 512; read", shown)
    assert found and shown.count("context ") == 1, shown
    return int(found[1])


def test_pasted_lines_are_one_message_and_the_context_in_use_is_shown(terminal: Terminal) -> None:
    assert "context 512 tokens; /help for help" in terminal.until(PROMPT)
    first = n_held(terminal.type("one\n", b"tok/s"))
    terminal.until(PROMPT)
    terminal.type("\x1b[200~def f(x):\n  return x\n\x1b[201~", b"return x")
    second = n_held(terminal.type("\n", b"tok/s"))
    terminal.until(PROMPT)
    assert 0 < first < second
    assert "questions so far: 2" in terminal.type("/show\n")
    terminal.send("\x04")
    assert terminal.wait() == 0


def test_up_recalls_what_was_typed_in_the_conversation_before(
    terminal: Terminal, history: Path
) -> None:
    terminal.until(PROMPT)
    terminal.type("/system Be kind to cats.\n")
    terminal.send("/quit\n")
    assert terminal.wait() == 0
    other = Terminal(*CHAT, *END, MOEGRAPH_HISTORY=str(history))
    other.until(PROMPT)
    assert "system prompt: Be kind to cats." in other.type("\x1b[A\x1b[A\n")
    other.send("\x04")
    assert other.wait() == 0
    other.close()


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(history: Path) -> None:
    endless = ("--ignore-eos", "-n", "8000", "-c", "16384")
    terminal = Terminal(*CHAT, *endless, MOEGRAPH_HISTORY="")
    terminal.until(PROMPT)
    terminal.type("write\n", b"\n")
    terminal.until_words()
    assert "stopped" in terminal.type("\x03")
    assert "cleared" in terminal.type("/clear\n")
    terminal.send("\x04")
    assert terminal.wait() == 0
    assert not history.exists()
    terminal.close()
