"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .fields import Body


class TokenizeBody(Body):
    """A text under llama-server's name or vLLM's; without one, the body is that of a chat."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    """Ids that become a text."""

    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]
