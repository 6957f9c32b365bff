"""Where later prompts of a conversation may part from a prompt; an engine can keep states there."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ...errors import MoegraphError
from .history import Message
from .template import ChatTemplate

# Two texts that have no beginning in common, for messages that are not known yet.
_ONE, _OTHER = "A", "B"


class _Encoder(Protocol):
    def encode(self, text: str, add_special: bool = True) -> list[int]: ...


def parting_places(
    template: ChatTemplate,
    messages: Sequence[Message],
    prompt: str,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the characters of a prompt after which later prompts may differ from it.

    The first: where the first question begins, if there is a system prompt. The second: where the
    answer begins, in the form that the template gives it once it is an old one; that may lack the
    reasoning, or the mark that asks for it. Places that the template fails to show are left out.

    messages: those that the template made the prompt of; the last is a question. variables: what
    else the template got.
    """
    more = dict(variables or {})

    def common(*variant: Message) -> int:
        return _n_common(prompt, template.render(variant, **more))

    found = []
    try:
        if messages[0].role == "system":
            other = _OTHER if messages[1].content.startswith(_ONE) else _ONE
            found.append(common(messages[0], Message("user", other)))
        found.append(common(*messages, Message("assistant", _ONE), Message("user", _ONE)))
    except MoegraphError:
        pass  # the prompt itself was rendered, so the conversation goes on
    return found


def _n_common(a: str, b: str) -> int:
    """Return how many characters two texts have in common before they differ."""
    return bisect(range(1, min(len(a), len(b)) + 1), False, key=lambda n: a[:n] != b[:n])


def token_marks(
    encoder: _Encoder, prompt: str, ids: Sequence[int], places: Iterable[int]
) -> list[int]:
    """Return how many of the prompt's tokens come before each place, where a token ends there.

    A later prompt that has the text up to the place begins with these tokens. At least the last
    token is left out, so that the same prompt can be continued too.
    """
    found = []
    for place in places:
        if place >= len(prompt):
            found.append(len(ids) - 1)
        elif place > len(prompt) // 2:
            tail = encoder.encode(prompt[place:], add_special=False)
            if list(ids[-len(tail) :]) == tail:
                found.append(len(ids) - len(tail))
        else:
            head = encoder.encode(prompt[:place])
            if list(ids[: len(head)]) == head:
                found.append(len(head))
    return sorted({mark for mark in found if 0 < mark < len(ids)})
