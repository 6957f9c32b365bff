"""Predicted speed: for which machine, of decode, and of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import CPU_ROWS
from ..units import format_bytes, parse_bytes
from . import ui
from .models import Decorated

if TYPE_CHECKING:
    from ..experts.cost import Machine
    from ..experts.policy import Policy
    from ..ggml.nvml import Card
    from ..placement.profile import Profile
    from ..placement.prompttime import PromptEstimate
    from ..placement.simulate import HostLimit, Simulation
    from ..placement.trace import Trace

AUTO = "auto"


def host_options(command: Decorated) -> Decorated:
    """Add --host-mem and --disk, as (host_mem, disk), to a command; `host_limit` takes them."""
    size = click.option(
        "--host-mem", metavar="SIZE", help="Host memory for experts. Default: enough for all.",
    )  # fmt: skip
    rate = click.option(
        "--disk", type=click.FloatRange(0, min_open=True), metavar="GB/s", default=3.5,
        help="Speed of reading the others.",
    )  # fmt: skip
    return size(rate(command))


def host_limit(host_mem: str | None, disk: float) -> HostLimit | None:
    """Return the limit that the options of `host_options` set."""
    from ..placement.simulate import HostLimit

    return None if host_mem is None else HostLimit(parse_bytes(host_mem, "g"), disk * 1e9)


@dataclass(frozen=True)
class Assumption:
    """What speeds are predicted for: a machine that was named, or else this one's card, if any."""

    named: Machine | None
    card: Card | None

    @classmethod
    def of(cls, asked: str) -> Assumption:
        """Return what --machine asks for; `auto` takes the card that the engine would."""
        from ..experts.machines import find_machine
        from ..ggml.nvml import gpu_card

        if asked != AUTO:
            return cls(find_machine(asked), None)
        return cls(None, gpu_card())

    def machine(self, cards: Sequence[int] = ()) -> Machine:
        """Return the machine for a budget: the bytes of one card, or of several; none: any size.

        Unless one was named, it is this machine's if its card has so much memory, or else one with
        a usual card of that size; of several cards, the smallest decides.
        """
        from ..experts.machines import CARD_SHARE, MACHINES, usual_card

        if self.named:
            return self.named
        if self.card and max(cards, default=0) * CARD_SHARE <= self.card.n_bytes:
            return _machine(self.card)
        return usual_card(min(cards)) if cards else MACHINES["desktop"]


def _machine(card: Card) -> Machine:
    """Return the times of a card of this machine: measured for its kind, or computed."""
    from ..experts.machines import MACHINES, card_machine

    if card.name.startswith("NVIDIA H200"):  # a GH200 has another host
        return MACHINES["h200"]
    about = (
        f"this machine's card: {format_bytes(card.n_bytes)} with {card.memory_rate / 1e9:.0f} "
        f"GB/s, {card.link}; computed, with DDR5 assumed"
    )
    return card_machine(card.name, about, card.memory_rate, card.link_rate, card.arithmetic)


@dataclass(frozen=True)
class Times:
    """A machine's times for a model; none if it is unknown how large its experts are.

    machine: scaled to the model. slot_bytes: of an expert of each layer, [n_layer] or empty.
    """

    machine: Machine
    slot_bytes: tuple[int, ...]

    @classmethod
    def of(
        cls,
        machine: Machine,
        slot_bytes: tuple[int, ...],
        token: tuple[int, int, int] | None = None,
    ) -> Times:
        """Return the times of a machine; token: as of `Machine.scaled`."""
        if slot_bytes:
            mean = sum(slot_bytes) // sum(size > 0 for size in slot_bytes)
            machine = machine.scaled(len(slot_bytes), mean, token)
        return cls(machine, slot_bytes)


@dataclass(frozen=True)
class Routing:
    """A trace to replay, and the profile that fills the slots at the start, or a class of it."""

    trace: Trace
    profile: Profile | None
    profile_class: str | None

    @classmethod
    def of(cls, trace: Trace, path: Path | None, name: str | None) -> Routing:
        """Return a trace with the profile of --profile; name: of --profile-class."""
        from ..placement.profile import read_profile

        if name is not None and path is None:
            raise click.UsageError("--profile-class needs --profile")
        return cls(trace, read_profile(path, trace.shape) if path else None, name)

    def predict(
        self, n_slots: Sequence[int], policy: Policy, times: Times, mode: str,
        n_ubatch: int = CPU_ROWS, stages: Sequence[range] = (), skip: int = 0,
        limit: HostLimit | None = None,
    ) -> Prediction:  # fmt: skip
        """Replay the trace with so many slots of each layer; see `simulate`."""
        from ..placement.prompttime import PROMPT_LENGTHS, estimate_prompt
        from ..placement.simulate import open_level, simulate, warm_cache

        trace, profile, sizes = self.trace, self.profile, times.slot_bytes
        found = simulate(
            trace, n_slots, policy, times.machine, mode=mode, profile=profile,
            profile_class=self.profile_class, skip=skip, slot_bytes=sizes or None, stages=stages,
            limit=limit,
        )  # fmt: skip
        if not sizes:
            return Prediction(found, [], times)
        n_slots = [n if size else trace.shape.n_expert for n, size in zip(n_slots, sizes)]
        cache = warm_cache(trace, n_slots, policy, profile, self.profile_class)
        resident = cache.tables[:, : trace.shape.n_expert] >= 0
        level = open_level(cache, n_slots, sizes, limit)
        disk = (level.mask(), limit.disk_rate) if level and limit else ()
        prompts = [
            estimate_prompt(trace, resident, n, sizes, times.machine, n_ubatch, *disk)
            for n in PROMPT_LENGTHS
        ]
        return Prediction(found, prompts, times)


@dataclass(frozen=True)
class Prediction:
    """What a replay found, and what prompts take with the experts that are there at the start.

    prompts: empty if the size of an expert is unknown.
    """

    found: Simulation
    prompts: list[PromptEstimate]
    times: Times

    def fields(self) -> dict[str, Any]:
        """Return the JSON fields of the replay; unknown times and bytes are null."""
        found, stats, is_known = self.found, self.found.stats, bool(self.times.slot_bytes)
        return {
            "n_tokens": found.n_tokens,
            "hits": int(stats.hits.sum()), "misses": int(stats.misses.sum()),
            "hit_rate": round(found.stats.hit_rate, 5),
            "hit_rate_by_layer": [round(rate, 4) for rate in stats.hit_rates],
            "missing_per_token": round(stats.missing_per_step, 4),
            "missing_per_token_by_quarter": [round(n, 3) for n in found.quarters()],
            "admitted": int(stats.admitted.sum()), "evicted": int(stats.evicted.sum()),
            "declined": int(stats.declined.sum()),
            "uploaded_bytes_per_token": round(found.bytes_per_token) if is_known else None,
            "file_bytes_per_token": round(found.file_bytes / found.n_tokens) if is_known else None,
            "n_streamed": found.n_streamed, "n_cpu_experts": found.n_cpu,
            "n_promoted": found.n_promoted,
            "token_us": round(1e6 * float(found.step_s.mean()), 2) if is_known else None,
            "decode_tps": round(found.tokens_per_s, 2) if is_known else None,
        }  # fmt: skip

    def prompt_fields(self) -> list[dict[str, Any]]:
        """Return the JSON fields of the prompts; unknown times are null."""
        return [
            {
                "n_tokens": one.n_tokens, "n_sweeps": one.n_sweeps, "sent_bytes": one.sent_bytes,
                "link_s": round(one.link_s, 6), "seconds": _rounded(one.seconds, 6),
                "tokens_per_s": _rounded(one.tokens_per_s, 2),
            }
            for one in self.prompts
        ]  # fmt: skip


def _rounded(value: float | None, n_digits: int) -> float | None:
    return None if value is None else round(value, n_digits)


def show_prompts(header: Sequence[str], rows: Sequence[tuple[Sequence[str], Prediction]]) -> None:
    """Show what prompts take, unless the machines do not say it; header: of the first cells."""
    from ..placement.prompttime import PROMPT_LENGTHS

    if not rows or not all(one.prompts and one.times.machine.prompt for _, one in rows):
        return
    ui.section("Prompts, estimated")
    ui.table(
        [(*first, *(f"{prompt.seconds:.2f}" for prompt in one.prompts)) for first, one in rows],
        (*header, *(f"{n:,} tokens, s" for n in PROMPT_LENGTHS)),
    )


def trace_fields(trace: Trace) -> dict[str, Any]:
    """Return the JSON fields that identify and describe a trace."""
    from ..placement.trace import trace_stats

    stats = trace_stats(trace)
    n_layer, n_expert, n_expert_used = trace.shape.sizes
    return {
        "sha256": trace.sha256, "source": trace.source, "n_tokens": trace.n_tokens,
        "n_prompt": trace.n_prompt, "n_layer": n_layer, "n_expert": n_expert,
        "n_expert_used": n_expert_used, "overlap": round(stats.overlap, 4),
        "entropy": round(stats.entropy, 4),
        "lru_hit_rate_by_quarter": [round(rate, 4) for rate in stats.lru],
        "slot_bytes_by_layer": list(trace.slot_bytes) or None,
    }  # fmt: skip
