"""What a service is asked for, what it answers, and what it says of itself: values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..draft.plan import SpecStats
from ..errors import MoegraphError
from ..experts.cachestats import ExpertStats
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
    the same owner; files of them have this text. n_keep: tokens that a context shift
    keeps, as in `EngineConfig`; None: what that says.
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
    n_keep: int | None = None


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
    there to now. n_dropped: tokens that context shifts have dropped.
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
    n_dropped: int = 0


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


@dataclass(frozen=True)
class SlotStatus:
    """One sequence slot.

    state: "idle", "reading" or "answering". n_held: tokens in it, also of earlier requests. The
    rest is of its request, as in `Usage` and `Answer`; empty if it is idle. has_new_line: whether
    the answer has more than one line.
    """

    id: int
    state: str = "idle"
    n_held: int = 0
    n_prompt: int = 0
    n_read: int = 0
    n_cached: int = 0
    n_generated: int = 0
    number: int = 0
    request: Request | None = None
    has_new_line: bool = False


@dataclass(frozen=True)
class ServiceCounts:
    """Sums since the service began.

    refused: requests for which there was no room. passes: decode passes; pass_rows: rows of those.
    prompt_s, decode_s: seconds that the device spent on each, as far as they can be told apart.
    preempted: sequences that went to host memory for others.
    """

    refused: int = 0
    passes: int = 0
    pass_rows: int = 0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    preempted: int = 0


@dataclass(frozen=True)
class ServiceStatus:
    """A service at one moment, at most a fraction of a second ago.

    n_running: requests with a slot. n_waiting: requests without. n_ctx: positions of a sequence.
    prefix_bytes, prefix_places: host memory of kept prompt beginnings, and how many there are.
    memory: as `Engine.memory`. experts, spec: as `Engine.expert_stats` and `Engine.spec_stats`.
    group_passes, stage_idle: passes of groups, and the share of their time in which a stage had no
    work, the mean of all stages; 0 without several devices.
    busy_s: since when the engine has been at one piece of work; 0.0 while it waits for requests.
    failure: why requests are not answered any more; None if they are.
    """

    slots: tuple[SlotStatus, ...]
    n_running: int
    n_waiting: int
    n_ctx: int
    counts: ServiceCounts
    prefix_bytes: int = 0
    prefix_places: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    experts: ExpertStats | None = None
    spec: SpecStats | None = None
    group_passes: int = 0
    stage_idle: float = 0.0
    busy_s: float = 0.0
    failure: str | None = None
