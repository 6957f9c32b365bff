"""The messages of a conversation, in the form that chat templates read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import RequestError
from .reasoning import END_OF_THINK, THINK

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """One message; role is "system", "user" or "assistant"."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise RequestError(f"message role {self.role!r}; allowed: {', '.join(ROLES)}")


class History:
    """A conversation: an optional system message, then alternating user and assistant."""

    def __init__(self, system: str | None = None) -> None:
        self._messages: list[Message] = []
        if system is not None:
            self._messages.append(Message("system", system))

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the messages so far, oldest first."""
        return tuple(self._messages)

    @property
    def system(self) -> str | None:
        """Return the system prompt, if there is one."""
        first = self._messages[0] if self._messages else None
        return first.content if first and first.role == "system" else None

    @system.setter
    def system(self, content: str | None) -> None:
        if self.system is not None:
            del self._messages[0]
        if content is not None:
            self._messages.insert(0, Message("system", content))

    @property
    def n_turns(self) -> int:
        """Return the number of questions."""
        return sum(message.role == "user" for message in self._messages)

    def ask(self, content: str) -> None:
        """Add a user message."""
        self._messages.append(Message("user", content))

    def answer(self, content: str) -> None:
        """Add an assistant message, also for an answer that was stopped early.

        Reasoning without an end tag is left out: later prompts would present it as the answer.
        """
        if content.lstrip().startswith(THINK) and END_OF_THINK not in content:
            content = ""
        self._messages.append(Message("assistant", content))

    def undo(self) -> str | None:
        """Remove the last question and its answer; return the question, or None."""
        if not self.n_turns:
            return None
        while (message := self._messages.pop()).role != "user":
            pass
        return message.content

    def forget_oldest(self) -> bool:
        """Remove the oldest question and its answer; False if there is only one question."""
        if self.n_turns < 2:
            return False
        start = 1 if self.system is not None else 0
        end = start + 1
        while self._messages[end].role != "user":
            end += 1
        del self._messages[start:end]
        return True

    def restore(self, messages: Iterable[Message]) -> None:
        """Replace the conversation by these messages, oldest first.

        Raises:
            RequestError: they are not an optional system message, then questions with answers.
        """
        found = list(messages)
        roles = [m.role for m in found]
        turns = roles[1:] if roles[:1] == ["system"] else roles
        if turns != ["user", "assistant"] * (len(turns) // 2):
            raise RequestError("the messages do not alternate: user, then assistant, in pairs")
        self._messages = found

    def clear(self) -> None:
        """Remove all messages except the system prompt."""
        del self._messages[1 if self.system is not None else 0 :]
