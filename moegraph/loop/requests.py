"""What a service is asked for, and what it answers: requests, and the steps of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import MoegraphError
from ..pictures import Picture
from ..sampling import BoolArray, SamplingParams


class Constraint(Protocol):
    """A grammar that an answer must follow; it belongs to one request.

    One thread at a time calls its methods, mostly for `TokenChoice` while the device computes.
    """

    @property
    def is_slow(self) -> bool:
        """Whether its methods may take long."""

    def allowed(self) -> BoolArray | None:
        """Return which tokens may come next, bool numpy [n_vocab]; None: any. Errors as `accept`.

        At least one token may; an end-of-generation token where the answer may end. The array does
        not change later.
        """

    def accept(self, token: int) -> None:
        """Take the next token of the answer, unless it ends the answer."""

    def roll_back(self, n: int) -> None:
        """Forget the last n tokens."""

    def n_accepted(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may follow one another; none of them is taken."""


@dataclass(frozen=True)
class Request:
    """A prompt, and how its answer is drawn.

    prompt: token ids, and those of pictures. pictures: each with its first row in the prompt.
    max_tokens, stop, ignore_eos, marks, reuse, text: as in `Engine.generate`.
    keep_after: tokens of the answer after which its state is kept, because later prompts may part
    from it there; such as one that opens a tool call.
    n_logprobs: None for no log probabilities; else how many of the likeliest tokens are listed
    beside each token that was drawn. constraint: what the answer must follow; None: nothing.
    deadline_s: seconds from submission after which the request ends; None: never. name: of the
    request in logs. client: who asks. owner: beginnings of prompts are shared only by requests of
    the same owner; files of them have this text.
    """

    prompt: Sequence[int] | npt.NDArray[np.int32]
    sampling: SamplingParams
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    marks: tuple[int, ...] = ()
    keep_after: frozenset[int] = frozenset()
    reuse: bool = True
    text: bool = True
    n_logprobs: int | None = None
    constraint: Constraint | None = None
    deadline_s: float | None = None
    name: str = ""
    client: str = ""
    owner: str = ""
    pictures: Sequence[tuple[int, Picture]] = ()


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities before sampling: of a token, and of the likeliest.

    top: (token, logarithm) of the likeliest tokens, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """What a request has cost so far.

    n_prompt: tokens of its prompt. n_read: how many of them its sequence holds. n_cached: how many
    of those an earlier request had computed. n_generated: tokens of the answer. n_drafted,
    n_accepted: drafted tokens that were verified, and those that were right. queued_s: from
    submission until its prompt began. prefill_s: from there to the first token. decode_s: from
    there to now.
    """

    n_prompt: int
    n_read: int = 0
    n_cached: int = 0
    n_generated: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class Step:
    """What became of a request since its last step.

    tokens: that were drawn; none while the prompt is read. text: what they complete; a character
    or a possible stop string may be held back. logprobs: of each token, if they were asked for.
    finish_reason: None, or in the last step "stop", "length", "cancelled", "deadline" or "error".
    stop: the stop string that ended the text. error: with the reason "error".
    """

    usage: Usage
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop: str | None = None
    error: MoegraphError | None = field(default=None, compare=False)
