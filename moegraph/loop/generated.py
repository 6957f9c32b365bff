"""One request: prompt ids in; generated ids, text and the reason for its end out."""

from __future__ import annotations

import codecs
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from numbers import Integral

from ..errors import ContextOverflow, RequestError
from ..text.stream import StopMatcher


def room_after(n_prompt: int, n_ctx: int) -> int:
    """Return how many tokens can follow a prompt."""
    if n_prompt == 0:
        raise RequestError("the prompt is empty; give it at least one token")
    if n_prompt > n_ctx:
        raise ContextOverflow(
            f"the prompt has {n_prompt} tokens, the context holds {n_ctx}; "
            "shorten the prompt or raise -c/--ctx-size", n_prompt, n_ctx,
        )  # fmt: skip
    return n_ctx - n_prompt + 1


class GeneratedText:
    """The text of one request: its ids, what is known of it so far, and why it ended.

    An end-of-generation token counts as generated and has no text. A token that fills
    ``max_tokens`` or the last position of the context ends the text with "length"; if the context
    may be shifted, the latter only sets ``is_full``.

    Args:
        prompt: token ids; at least one, at most n_ctx.
        n_ctx: positions of the context; the last generated token needs none.
        max_tokens: the most tokens to generate; None: until the context is full; 0: compute only
            the prompt (the text is finished from the start).
        piece: returns the bytes of a token; None: no text, and no stop strings.
        eog_ids: tokens that end the generation.
        stop: strings that end the generation; they are not part of the text.
        shifts: the text goes on when the context is full, after `shift`.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        n_ctx: int,
        max_tokens: int | None = None,
        piece: Callable[[int], bytes] | None = None,
        eog_ids: Collection[int] = frozenset(),
        stop: Sequence[str] = (),
        shifts: bool = False,
    ) -> None:
        if stop and piece is None:
            raise RequestError("stop strings need the model's vocabulary, and none is loaded")
        if max_tokens is not None and (not isinstance(max_tokens, Integral) or max_tokens < 0):
            raise RequestError(f"max_tokens is {max_tokens!r}; allowed: an integer, 0 or more")
        room = room_after(len(prompt), n_ctx)
        self.prompt = prompt
        self.tokens: list[int] = []
        self.text = ""
        self._room = room
        most = sys.maxsize if max_tokens is None else max_tokens
        self._most = most if shifts else min(most, room)
        self._limit = min(most, room)
        self.is_full = False
        self.finish_reason: str | None = None if self._limit else "length"
        self._piece = piece
        self._eog_ids = eog_ids
        # an incomplete character is held back; what is not UTF-8 becomes U+FFFD
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = StopMatcher(stop) if stop else None
        self._n_told = 0  # tokens whose text is known
        self._known: deque[str] = deque()  # what `tell` returns next, if it is known already

    @property
    def n_generated(self) -> int:
        """Return the number of tokens drawn so far."""
        return len(self.tokens)

    @property
    def anchor(self) -> int:
        """Return the last token of prompt and text, which the sequence does not hold yet."""
        return (self.tokens or self.prompt)[-1]

    @property
    def n_left(self) -> int:
        """Return how many tokens may still be drawn, before a shift if there may be one."""
        return self._limit - self.n_generated if self.finish_reason is None else 0

    @property
    def n_room(self) -> int:
        """Return how many positions the context has for the last token and others after it."""
        return self._room - self.n_generated

    def append(self, token: int) -> None:
        """Take the next token; may set finish_reason. Then call `tell` once, sooner or later.

        The device waits for this, so the text is only looked at if a stop string may end it.
        """
        self.tokens.append(token)
        if token in self._eog_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self._limit:
            if self._limit < self._most:
                self.is_full = True
            else:
                self.finish_reason = "length"
        if self._matcher:
            self._known.append(self._tell())

    def shift(self, n: int) -> None:
        """Note that the context has n positions more for the text, because others were dropped."""
        self._room += n
        self._limit, self.is_full = min(self._most, self._room), False

    def tell(self) -> str:
        """Return the text that the next token completes; called once for each token, in order."""
        return self._known.popleft() if self._known else self._tell()

    def _tell(self) -> str:
        token = self.tokens[self._n_told]
        self._n_told += 1
        if self._piece is None or token in self._eog_ids:
            text = ""
        else:
            text = self._decoder.decode(self._piece(token))
            if self._matcher:
                text = self._matcher.push(text)
            self.text += text
        if self._matcher and self._matcher.matched is not None:
            self.finish_reason = "stop"
        elif self.finish_reason is not None and self._n_told == len(self.tokens):
            text += self._finish(self.finish_reason)
        return text

    @property
    def stop(self) -> str | None:
        """Return the stop string that ended the text, if one did."""
        return self._matcher.matched if self._matcher else None

    def cancel(self, reason: str = "cancelled") -> str:
        """End the text early and return the held-back text."""
        return self._finish(reason)

    def _finish(self, reason: str) -> str:
        """Flush decoder and matcher; this may still complete a stop string."""
        self.finish_reason = reason
        rest = self._decoder.decode(b"", final=True)
        if self._matcher:
            rest = self._matcher.push(rest) + self._matcher.flush()
        self.text += rest
        return rest
