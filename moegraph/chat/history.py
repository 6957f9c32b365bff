"""The messages of a conversation, in the form that chat templates read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import RequestError
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
    """A conversation in order: an optional system message, then user and assistant in turn."""

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
        """Add an assistant message; an answer that was stopped early counts as one.

        Reasoning that never ended would stand in every later prompt as if it were the answer,
        so it is left out.
        """
        if content.lstrip().startswith(THINK) and END_OF_THINK not in content:
            content = ""
        self._messages.append(Message("assistant", content))

    def undo(self) -> str | None:
        """Remove the last question and its answer; return the question, None if there is none."""
        if not self.n_turns:
            return None
        while (message := self._messages.pop()).role != "user":
            pass
        return message.content

    def forget_oldest(self) -> bool:
        """Remove the oldest question and its answer; False where only the last question is left."""
        if self.n_turns < 2:
            return False
        start = 1 if self.system is not None else 0
        end = start + 1
        while self._messages[end].role != "user":
            end += 1
        del self._messages[start:end]
        return True

    def restore(self, messages: Iterable[Message]) -> None:
        """Replace everything by the messages of a conversation, oldest first.

        Raises:
            RequestError: they are not an optional system message and questions with answers.
        """
        found = list(messages)
        roles = [m.role for m in found]
        turns = roles[1:] if roles[:1] == ["system"] else roles
        if turns != ["user", "assistant"] * (len(turns) // 2):
            raise RequestError("the messages are not questions and answers in turn")
        self._messages = found

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        del self._messages[1 if self.system is not None else 0 :]
