"""The bodies of /tokenize, /detokenize and /apply-template."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ..thinking import template_variables
from .chat import Effort, Message, Messages, Tools, Variables
from .fields import Body


class Rendered(Body):
    """What a chat template is given besides the messages."""

    tools: Tools | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Variables | None = None

    def variables(self) -> dict[str, Any]:
        """Return the variables of the template."""
        return template_variables(self.reasoning_effort, self.chat_template_kwargs)


class TemplateBody(Rendered):
    """A conversation that becomes a prompt."""

    messages: Messages


class TokenizeBody(Rendered):
    """A text under llama-server's name or vLLM's, or a conversation."""

    content: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    """Ids that become a text."""

    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]
