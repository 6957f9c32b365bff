"""What a service says of itself: its slots, its queue, and counts since it began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..draft.plan import SpecStats
from ..experts.cachestats import ExpertStats
from .requests import Request


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
