"""What is remembered of a model's own turns, so that later prompts show them as it wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..text.chat.rawjson import CallMemory
from ..text.chat.segments import SegmentEncoder
from ..text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Turn:
    """One answer that is being written; a `TurnMemory` of its parser.

    head: the end of the prompt that belongs to the same turn. head_ids: its tokens.
    """

    tokenizer: Tokenizer
    encoder: SegmentEncoder
    calls: CallMemory
    head: str
    head_ids: Sequence[int]

    def keep_turn(self, text: str, tokens: Sequence[int]) -> None:
        """Remember the tokens of an answer; the last is its end token, unless it was cut."""
        if tokens and tokens[-1] in self.tokenizer.eog_ids:
            tokens = tokens[:-1]
        # a stop string cuts the text, and a control token is none of it
        if tokens and self.tokenizer.decode(tokens, special=True) == text:
            self.encoder.keep(self.head + text, [*self.head_ids, *tokens])

    def keep_call(self, name: str, arguments: str, raw: Mapping[str, str]) -> None:
        """Remember how the values of a call were written."""
        self.calls.keep(name, arguments, raw)
