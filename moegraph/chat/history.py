"""The messages of a conversation, in the form that chat templates read."""

from __future__ import annotations

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

    def retract(self) -> None:
        """Remove the last user message if it has no answer."""
        if self._messages and self._messages[-1].role == "user":
            self._messages.pop()

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        del self._messages[1 if self.system is not None else 0 :]
