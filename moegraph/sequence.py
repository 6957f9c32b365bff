"""One request: prompt ids in; generated ids, text and the reason for its end out."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import ContextOverflow, RequestError

MAX_STOPS = 64
MAX_STOP_CHARS = 1024


class CancelToken:
    """Ask a running generation to end; safe from other threads and from signal handlers."""

    # Not a threading.Event: a signal handler that interrupts Event.set() in its own thread would
    # deadlock on the event's lock. The CPU kernels read the same word.
    def __init__(self) -> None:
        self.flag = np.zeros(1, dtype=np.int32)

    def set(self) -> None:
        """Request the end. The engine checks between layers, the CPU device between nodes."""
        self.flag[0] = 1

    def is_set(self) -> bool:
        """Return whether the end was requested."""
        return bool(self.flag[0])


@dataclass(frozen=True)
class GenerationEvent:
    """One step of a generation, for the command line, benchmarks and servers.

    token: the id drawn in this step; None in a last event without a token.
    text: text that this step completed; may be empty while a character or a possible stop
        string is incomplete.
    prefill_s, decode_s: seconds from the start to the first token, and from there to now.
    finish_reason: None, or in the last event "stop", "length" or "cancelled".
    logits: ``[n_rows, n_vocab]`` F32, the rows computed since the previous event, if requested.
    n_reused: prompt tokens that an earlier request had computed.
    n_read: prompt tokens in the sequence, n_reused included; fewer than n_prompt if the prompt
        was cancelled. None: all.
    """

    token: int | None
    text: str
    n_prompt: int
    n_generated: int
    prefill_s: float
    decode_s: float
    finish_reason: str | None = None
    logits: npt.NDArray[np.float32] | None = None
    n_reused: int = 0
    n_read: int | None = None

    @property
    def n_computed(self) -> int:
        """Return how many prompt tokens were computed."""
        return (self.n_prompt if self.n_read is None else self.n_read) - self.n_reused

    @property
    def prefill_tps(self) -> float:
        """Return prompt tokens computed per second."""
        return self.n_computed / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tps(self) -> float:
        """Return decode steps per second; the first token belongs to the prefill."""
        return (self.n_generated - 1) / self.decode_s if self.decode_s > 0 else 0.0


class IncrementalDecoder:
    """Decode a stream of UTF-8 bytes; the bytes of an incomplete character are held back.

    Bytes that are not UTF-8 become U+FFFD, exactly as in ``bytes.decode(errors="replace")``.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, data: bytes) -> str:
        """Return the text that data completes."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return the held-back bytes, an incomplete character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Cut a stream of text before the first stop string.

    The match that ends first wins; of those that end at the same place, the longest. So the result
    does not depend on how the text was split. Only text that may begin a stop string is held back.
    """

    def __init__(self, stops: SequenceOf[str] = ()) -> None:
        self.stops = _checked_stops((stops,) if isinstance(stops, str) else stops)
        self.matched: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that is certainly before any stop string."""
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [(at + len(s), at, s) for s in self.stops if (at := text.find(s)) >= 0]
        if ends:
            _, start, self.matched = min(ends)
            self._held = ""
            return text[:start]
        n_held = max((_open_length(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """Return the held-back text; call it at the end of the stream."""
        held, self._held = self._held, ""
        return held


def _checked_stops(stops: SequenceOf[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{len(stops)} stop strings; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not stop:
            raise RequestError("a stop string is empty; every text contains it")
        if len(stop) > MAX_STOP_CHARS:
            raise RequestError(
                f"a stop string has {len(stop)} characters; at most {MAX_STOP_CHARS} are allowed"
            )
    return tuple(stops)


def _open_length(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of stop that ends text."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


def room_after(n_prompt: int, n_ctx: int) -> int:
    """Return how many tokens can follow a prompt.

    Raises:
        RequestError: the prompt is empty.
        ContextOverflow: it is longer than the context.
    """
    if n_prompt == 0:
        raise RequestError("the prompt is empty; give it at least one token")
    if n_prompt > n_ctx:
        raise ContextOverflow(
            f"the prompt has {n_prompt} tokens, the context holds {n_ctx}; "
            "shorten the prompt or raise -c/--ctx-size"
        )
    return n_ctx - n_prompt + 1


class Sequence:
    """One request while it runs: its ids, its text so far, and why it ended.

    An end-of-generation token counts as generated and has no text. A token that fills
    ``max_tokens`` or the last position of the context ends the sequence with "length".

    Args:
        prompt: token ids; at least one, at most n_ctx.
        n_ctx: positions of the context; the last generated token needs none.
        max_tokens: the most tokens to generate; None: until the context is full; 0: compute only
            the prompt (the sequence is finished from the start).
        piece: returns the bytes of a token; None: no text, and no stop strings.
        eog_ids: tokens that end the generation.
        stop: strings that end the generation; they are not part of the text.

    Raises:
        RequestError: the prompt is empty, a stop string or max_tokens is out of range, or stop
            strings are given without piece.
        ContextOverflow: the prompt is longer than the context.
    """

    def __init__(
        self,
        prompt: SequenceOf[int],
        *,
        n_ctx: int,
        max_tokens: int | None = None,
        piece: Callable[[int], bytes] | None = None,
        eog_ids: Collection[int] = frozenset(),
        stop: SequenceOf[str] = (),
    ) -> None:
        if stop and piece is None:
            raise RequestError("stop strings need the model's vocabulary, and none is loaded")
        if max_tokens is not None and max_tokens < 0:
            raise RequestError(f"max_tokens is {max_tokens}; allowed: 0 or more")
        room = room_after(len(prompt), n_ctx)
        self.prompt = prompt
        self.tokens: list[int] = []
        self.text = ""
        self._limit = room if max_tokens is None else min(max_tokens, room)
        self.finish_reason: str | None = None if self._limit else "length"
        self._piece = piece
        self._eog_ids = eog_ids
        self._decoder = IncrementalDecoder()
        self._matcher = StopMatcher(stop)

    @property
    def n_prompt(self) -> int:
        """Return the number of prompt tokens."""
        return len(self.prompt)

    @property
    def n_generated(self) -> int:
        """Return the number of tokens drawn so far."""
        return len(self.tokens)

    def append(self, token: int) -> str:
        """Take the next token and return the text it completes; may set finish_reason."""
        self.tokens.append(token)
        if token in self._eog_ids:
            return self._finish("stop")
        text = "" if self._piece is None else self._decoder.push(self._piece(token))
        text = self._matcher.push(text)
        self.text += text
        if self._matcher.matched is not None:
            self.finish_reason = "stop"
        elif self.n_generated >= self._limit:
            text += self._finish("length")
        return text

    def cancel(self) -> str:
        """End the sequence early and return the held-back text."""
        return self._finish("cancelled")

    def _finish(self, reason: str) -> str:
        """Flush decoder and matcher; this may still complete a stop string."""
        self.finish_reason = reason
        rest = self._matcher.push(self._decoder.flush()) + self._matcher.flush()
        self.text += rest
        return rest
