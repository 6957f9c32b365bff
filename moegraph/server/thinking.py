"""Whether and how hard the model reasons: what the chat template is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine.chat import thinking_variables
from .errors import ApiError

# Variables that belong to the conversation and not to the client.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")


def template_variables(
    effort: str | None, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the variables of a chat template for a reasoning effort.

    effort: OpenAI's word, from none to max; None leaves the template's own default. given:
    chat_template_kwargs, which have the last word.

    Raises:
        ApiError: a variable is not the client's to set.
    """
    for name in given or {}:
        if name in _RESERVED or not name.isidentifier():
            raise ApiError(
                400, "chat_template_kwargs may not set this variable",
                param=f"chat_template_kwargs.{name[:80]}", code="invalid_value",
            )  # fmt: skip
    thinks = (given or {}).get("enable_thinking", True)
    if not isinstance(thinks, bool):  # any text would be true to a template
        raise ApiError(
            400, f"chat_template_kwargs.enable_thinking: {thinks!r:.80} is not true or false",
            param="chat_template_kwargs.enable_thinking", code="invalid_value",
        )  # fmt: skip
    return {**thinking_variables(effort), **(given or {})}
