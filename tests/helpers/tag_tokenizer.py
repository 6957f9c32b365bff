"""A tokenizer for tests of grammars: a token is a byte, a tag, or one of a few longer texts."""

from __future__ import annotations

import re
from collections.abc import Iterable

TAGS = ("<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
TEXTS = ("\n\n", "{\n", '{"', '": ', "true", "  ")


class TagTokenizer:
    """Ids 0 to 255 are bytes, then come the tags, then longer texts; <|im_end|> ends an answer."""

    def __init__(self, tags: tuple[str, ...] = TAGS) -> None:
        self._tags = tags
        self._pieces = [bytes([i]) for i in range(256)]
        self._pieces += [text.encode() for text in (*tags, *TEXTS)]
        self.n_vocab = len(self._pieces)
        self.bos, self.eos = None, 256
        self.eog_ids = frozenset({256})

    def id_of(self, text: str) -> int:
        return self._pieces.index(text.encode(), 256)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, self._tags)) + ")", text)
        found: list[int] = []
        for part in parts:
            found += [self.id_of(part)] if part in self._tags else list(part.encode())
        return found

    def piece(self, token: int, special: bool = False) -> bytes:
        return self._pieces[token]

    def is_special(self, token: int) -> bool:
        return 256 <= token < 256 + len(self._tags)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        return b"".join(self._pieces[token] for token in ids).decode(errors="replace")
