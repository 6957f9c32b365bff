"""Where later prompts of a conversation may part from a prompt; an engine can keep states there.

A client comes back with the same system prompt and tools, with a question changed, with a result
for a call, or with a new question. Then templates drop the reasoning of turns since the last
question, so the prompt parts from the old one where the first of these turns begins.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence

from .messages import TemplateMessage
from .segments import Encoded

# Of the earlier questions, so many of the latest have a mark: each costs memory.
MAX_QUESTIONS = 4
# So many characters of a message are looked for in the prompt.
_KEY_CHARS = 64
# Two texts that have no beginning in common, for messages that are not known yet.
_ONE, _OTHER = "A", "B"


def first_question(
    render: Callable[[list[TemplateMessage]], str],
    messages: Sequence[TemplateMessage],
    prompt: str,
) -> int:
    """Return the character of a prompt where its first message after the system's begins.

    render: makes prompts as that one was made.
    """
    n_system = int(messages[0]["role"] == "system")
    first = messages[n_system]["content"] if len(messages) > n_system else ""
    other = _OTHER if first.startswith(_ONE) else _ONE
    return n_common(prompt, render([*messages[:n_system], {"role": "user", "content": other}]))


def n_common(a: str, b: str) -> int:
    """Return how many characters two texts have in common before they differ."""
    return bisect(range(1, min(len(a), len(b)) + 1), False, key=lambda n: a[:n] != b[:n])


def prompt_marks(
    encoded: Encoded, prompt: str, messages: Sequence[TemplateMessage], first: int
) -> tuple[int, ...]:
    """Return how many of a prompt's tokens later prompts may begin with, in rising order.

    They are: what is before the first question, before each of the latest questions, before the
    turn that follows the last one, and before the turn that the prompt asks for. Each is the
    beginning of a segment, so it is certain that these tokens do not depend on what follows.

    first: the character where the first question begins.
    """
    found = {encoded.tokens_before(first), encoded.starts[-1][1]}
    questions = [*_questions(prompt, messages, first)]
    found |= {encoded.tokens_before(place) for place in questions[-MAX_QUESTIONS:]}
    if questions:
        later = (n for at, n in encoded.starts if at > questions[-1])
        found.add(next(later, encoded.starts[-1][1]))
    return tuple(sorted(mark for mark in found if 0 < mark < len(encoded.ids)))


def _questions(prompt: str, messages: Sequence[TemplateMessage], first: int) -> Iterator[int]:
    """Yield where in the prompt the text of each user message is, as far as it is found there."""
    at = first
    for message in messages[int(messages[0]["role"] == "system") :]:
        key = message["content"].strip()[:_KEY_CHARS]
        place = prompt.find(key, at) if key else -1
        if place < 0:
            continue
        if message["role"] == "user":
            yield place
        at = place + len(key)
