"""Prompts encoded segment by segment, so that a conversation's earlier turns are encoded once.

A tokenizer first cuts text at its control tokens, and encodes what is between them independently.
So a text that is cut before a control token has the tokens of its segments, exactly.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

# Characters of all segments that are remembered; their ids are about as large.
_MAX_CHARS = 8 * 1024 * 1024


class Encoder(Protocol):
    """What encodes text; see `Tokenizer`."""

    def encode(self, text: str, add_special: bool = ...) -> list[int]:
        """Return the token ids of a text."""


@dataclass(frozen=True)
class Encoded:
    """A prompt's token ids.

    starts: where a segment begins, its first character and the number of tokens before it.
    """

    ids: list[int]
    starts: list[tuple[int, int]]

    def tokens_before(self, place: int) -> int:
        """Return the number of tokens before the segment that a character is in."""
        return max((n for at, n in self.starts if at <= place), default=0)


class SegmentEncoder:
    """Encodes prompts; any thread may call it.

    tags: control tokens, before each of which a prompt is cut. ends: those that end an answer.
    """

    def __init__(
        self, encoder: Encoder, tags: Iterable[str] = (), ends: Iterable[str] = ()
    ) -> None:
        self._encoder = encoder
        self._end = re.compile("|".join(map(re.escape, ends)) or "(?!)")
        names = sorted(tags, key=len, reverse=True)
        self._tag = re.compile("|".join(map(re.escape, names))) if names else None
        self._known, self._written = _Memory(), _Memory()

    def encode(self, prompt: str, add_special: bool) -> Encoded:
        """Return the token ids of a prompt.

        add_special: add BOS if the model asks for it.
        """
        if self._tag is None:
            return Encoded(self._encoder.encode(prompt, add_special=add_special), [(0, 0)])
        begin = self._encoder.encode("", add_special=add_special)
        cuts = [found.start() for found in self._tag.finditer(prompt) if found.start()]
        ids, starts = list(begin), list[tuple[int, int]]()
        for start, end in pairwise((0, *cuts, len(prompt))):
            starts.append((start, len(ids)))
            ids.extend(self._ids(prompt[start:end]))
        return Encoded(ids, starts)

    def keep(self, segment: str, ids: Sequence[int]) -> None:
        """Remember the tokens of a segment that a model wrote, before its end token.

        A model may draw other tokens than its text is encoded to. A prompt with this text then has
        the tokens that the engine holds.
        """
        if self._tag is not None:
            self._written.put(segment, array("i", ids))

    def _ids(self, segment: str) -> array[int]:
        end = next((found.start() for found in self._end.finditer(segment)), 0)
        if end and (written := self._written.get(segment[:end])) is not None:
            rest = segment[end:]
            return written + array("i", self._encoder.encode(rest, add_special=False))
        if (found := self._known.get(segment)) is None:
            found = array("i", self._encoder.encode(segment, add_special=False))
            self._known.put(segment, found)
        return found


class _Memory:
    """The ids of texts, those used last."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._n_chars = 0
        self._lock = threading.Lock()

    def get(self, text: str) -> array[int] | None:
        with self._lock:
            if (found := self._ids.get(text)) is not None:
                self._ids.move_to_end(text)
            return found

    def put(self, text: str, ids: array[int]) -> None:
        with self._lock:
            if text not in self._ids:
                self._n_chars += len(text)
            self._ids[text] = ids
            self._ids.move_to_end(text)
            while self._n_chars > _MAX_CHARS:
                self._n_chars -= len(self._ids.popitem(last=False)[0])


def turn_tags(source: str, specials: Sequence[str], ends: Iterable[str]) -> list[str]:
    """Return the control tokens that a template begins turns with, if prompts can be cut there.

    specials: all texts that the tokenizer reads as one token. ends: those that end a generation.
    """
    tags = {text for text in specials if text in source} - set(ends)
    return [tag for tag in sorted(tags) if not any(_straddles(text, tag) for text in specials)]


def _straddles(text: str, tag: str) -> bool:
    """Return whether an occurrence of text can begin before one of the tag and reach into it."""
    rests = (text[n:] for n in range(1, len(text)))
    return any(rest.startswith(tag) or tag.startswith(rest) for rest in rests)
