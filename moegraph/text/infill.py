"""Fill in the middle: the prompt for text between a beginning and an end that are known.

The order of parts, and what is cut to fit, are those of llama-server (server-common.cpp).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import RequestError
from .chat.answer import AnswerParser
from .chat.parts import Part
from .tokenizer import Tokenizer

# Tokens around the gap that a prompt has at most, and three quarters of a small context: three
# quarters before it, a quarter after it.
_NEAR = 2048
# Tokens for which a prompt leaves room; no setting of a request, as the cut would move.
_ANSWER = 1024
# Separates files for a model that has no token for it.
_SNIPPET = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True)
class Gap:
    """What is around the text that is asked for.

    before, after: of the file. line: follows `before`; if empty, the last line of `before` is
    taken for it. extra: names and texts of other files, the most important last.
    """

    before: str
    after: str
    line: str = ""
    extra: Sequence[tuple[str, str]] = ()


def infill_prompt(
    tokenizer: Tokenizer, gap: Gap, n_ctx: int, n_longest: int
) -> tuple[list[int], tuple[int, ...]]:
    """Return the ids of a prompt, and its marks: how many of them a later prompt may begin with.

    They end before the file, and before the line with the gap. n_longest: most characters of a
    token.

    Raises:
        RequestError: the model has no tokens for it.
    """
    pre, suf, mid, repository, file = map(tokenizer.fim, ("pre", "suf", "mid", "rep", "sep"))
    if pre is None or suf is None or mid is None:
        raise RequestError("infill is not supported by this model: it has no tokens for gaps")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=False)

    room = n_ctx - min(_ANSWER, n_ctx // 2)
    n_near = min(_NEAR, 3 * room // 4)
    before, line = gap.before, gap.line
    if not line:
        at = before.rfind("\n") + 1
        before, line = before[:at], before[at:]
    chars = n_near * n_longest  # what is beyond them has no place
    of_line = _last(encode(_last(line, chars)), n_near // 2)
    head = _kept(encode(_last(before, chars)), 3 * (n_near // 4), tokenizer)
    tail = encode(gap.after[:chars])[: max(0, n_near // 4 - 2 - len(of_line))]
    name = [] if file is None else [file, *encode("filename\n")]
    others = list[int]()
    n_others = max(0, room - n_near - len(name))
    for title, text in reversed(gap.extra):
        if len(others) >= n_others:
            break
        start = encode(_SNIPPET) if file is None else [file, *encode(f"{title}\n")]
        others = [*start, *encode(_last(text, n_others * n_longest)), *others]
    if repository is not None:
        others = [repository, *encode("myproject\n"), *others]
    others = _last(others, n_others)
    begin = [token for token in tokenizer.encode("") if token == tokenizer.bos]
    ids = [*others, *name, *begin, pre, *head]
    marks = {len(others), len(ids)} - {0}
    return [*ids, *of_line, suf, *tail, mid], tuple(sorted(marks))


Text = TypeVar("Text", str, list[int])


def _last(value: Text, n: int) -> Text:
    return value[max(0, len(value) - n) :]


def _kept(ids: list[int], n: int, tokenizer: Tokenizer) -> list[int]:
    """Return the end of a text's ids, n of them at most and hardly less than three quarters of n.

    It begins with a line that its first tokens choose, so with the same one when lines are added
    at the end or drop out at the beginning: most of the next prompt has been computed then.
    """
    if (first := len(ids) - n) <= 0:
        return ids
    ends = (at for at in range(first, first + n // 4) if tokenizer.piece(ids[at - 1])[-1:] == b"\n")
    return ids[min(ends, key=lambda at: hash(tuple(ids[at : at + 8])), default=first) :]


class LineParser(AnswerParser):
    """Reads the text of a gap, and ends it as llama-server does for editors.

    n_indent: blanks that each line after the first must begin with; a text ends before another
    line. limit_s: seconds from the first token after which the text ends with its line.
    """

    end = "length"

    def __init__(self, n_indent: int = 0, limit_s: float | None = None) -> None:
        super().__init__(reasoning=False)
        self._n_indent, self._limit_s = n_indent, limit_s
        self._blanks = ""  # the last line end and what follows it, as long as that is blanks
        self._until = math.inf

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[Part]:
        """Return the parts that text completes; see `AnswerParser.push`."""
        if self._limit_s is not None and self._until == math.inf:
            self._until = time.monotonic() + self._limit_s
        text, is_done = self._indented(text) if self._n_indent else (text, False)
        found = super().push(text, tokens)
        self.is_done = self.is_done or is_done or ("\n" in text and time.monotonic() > self._until)
        return found

    def _indented(self, text: str) -> tuple[str, bool]:
        """Return text as far as its lines are indented, and whether that is its end."""
        n_begun, text = len(self._blanks), self._blanks + text
        for line in re.finditer(r"\n([ \t]*)(?![ \t]|\Z)", text):
            if len(line[1]) < self._n_indent:
                return text[n_begun : line.end()], True
        found = re.search(r"\n[ \t]*\Z", text)
        self._blanks = found[0] if found else ""
        return text[n_begun:], False
