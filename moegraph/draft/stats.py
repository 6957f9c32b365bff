"""What drafting did and what it gained, as counts that can be subtracted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..placement.draftcounts import MAX_DEPTH, Counts, DraftCounts, less
from .plan import Step


@dataclass(frozen=True)
class SpecStats:
    """Sums over steps since the engine was made. A *drafting* step is one with a verify pass.

    steps, tokens: drafting steps, and the tokens that they gave. plain_steps: all others.
    drafted, accepted: rows verified besides the anchor, and those that the text took.
    verified_at, accepted_at: by position after the anchor, steps whose spine had a token there, and
    those in which it was accepted. timed_steps: drafting steps whose times are known;
    drafter_s, verify_s, commit_s: of these. seconds, plain_seconds: of all steps whose times are
    known, and what as many tokens would have taken one by one. chosen: steps by source and rows.
    drafts: how often the drafts of each source were right, also of those that no pass verified.
    """

    steps: int = 0
    tokens: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    verified_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    timed_steps: int = 0
    drafter_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    chosen: Mapping[tuple[str, int], int] = field(default_factory=dict)
    drafts: DraftCounts = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Return the source of most drafting steps, '' if there are none."""
        by_source = Counter[str]()
        for (source, _), n in self.chosen.items():
            by_source[source] += n
        return by_source.most_common(1)[0][0] if by_source else ""

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens of a drafting step; 0 without any."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        """Return accepted over drafted; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def accepted_by_position(self) -> list[float]:
        """Return how often the token at each position was accepted, of the steps that had one."""
        return [hit / n for hit, n in zip(self.accepted_at, self.verified_at) if n]

    @property
    def speedup(self) -> float | None:
        """Return the speed over that of plain decoding, as estimated from plain steps; or None."""
        known = self.steps > 0 and self.plain_seconds > 0.0
        return self.plain_seconds / self.seconds if known else None

    def since(self, earlier: SpecStats) -> SpecStats:
        """Return what happened since earlier."""
        chosen = {key: n - earlier.chosen.get(key, 0) for key, n in self.chosen.items()}
        return SpecStats(
            self.steps - earlier.steps, self.tokens - earlier.tokens,
            self.plain_steps - earlier.plain_steps,
            self.drafted - earlier.drafted, self.accepted - earlier.accepted,
            _less(self.verified_at, earlier.verified_at),
            _less(self.accepted_at, earlier.accepted_at),
            self.timed_steps - earlier.timed_steps, self.drafter_s - earlier.drafter_s,
            self.verify_s - earlier.verify_s, self.commit_s - earlier.commit_s,
            self.seconds - earlier.seconds, self.plain_seconds - earlier.plain_seconds,
            {key: n for key, n in chosen.items() if n}, less(self.drafts, earlier.drafts),
        )  # fmt: skip

    def report(self) -> dict[str, Any]:
        """Return plain values for JSON; times are milliseconds of a drafting step."""
        by_source: dict[str, dict[str, int]] = {}
        for (source, n_rows), n in sorted(self.chosen.items()):
            by_source.setdefault(source, {})[str(n_rows)] = n
        n_timed = max(self.timed_steps, 1)
        return {
            "source": self.source or None,
            "steps": self.steps,
            "plain_steps": self.plain_steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "accepted_by_position": [round(rate, 4) for rate in self.accepted_by_position],
            "drafter_ms": round(1e3 * self.drafter_s / n_timed, 4),
            "verify_ms": round(1e3 * self.verify_s / n_timed, 4),
            "commit_ms": round(1e3 * self.commit_s / n_timed, 4),
            "speedup": None if self.speedup is None else round(self.speedup, 4),
            "chosen": by_source,
        }


def _less(counts: tuple[int, ...], earlier: tuple[int, ...]) -> tuple[int, ...]:
    before = (*earlier, *[0] * (len(counts) - len(earlier)))
    return tuple(n - m for n, m in zip(counts, before))


class Recorder:
    """Adds up steps."""

    def __init__(self) -> None:
        counts = "steps", "tokens", "plain_steps", "drafted", "accepted", "timed_steps"
        times = "drafter_s", "verify_s", "commit_s", "seconds", "plain_seconds"
        self._sums: dict[str, Any] = {**dict.fromkeys(counts, 0), **dict.fromkeys(times, 0.0)}
        self._verified_at: list[int] = []
        self._accepted_at: list[int] = []
        self._chosen = Counter[tuple[str, int]]()
        self._drafts: dict[str, tuple[list[int], list[int]]] = {}

    def add(self, step: Step, plain_s: float) -> None:
        """Count a step. plain_s: of a plain one, 0 if not known."""
        sums, is_timed = self._sums, step.seconds > 0.0
        if is_timed and plain_s:
            sums["seconds"] += step.seconds
            sums["plain_seconds"] += plain_s * step.n_tokens
        if step.n_rows == 1:
            sums["plain_steps"] += 1
            return
        if is_timed:
            sums["timed_steps"] += 1
            for name in ("drafter_s", "verify_s", "commit_s"):
                sums[name] += getattr(step, name)
        sums["steps"] += 1
        sums["tokens"] += step.n_tokens
        sums["drafted"] += step.n_rows - 1
        sums["accepted"] += step.n_accepted
        self._chosen[step.source, step.n_rows] += 1
        self._count_positions(step)

    def add_ranks(self, source: str, ranks: Sequence[int]) -> None:
        """Count how right a draft was; ranks: as in `Step`."""
        seen, right = self._drafts.setdefault(source, ([], []))
        for at, rank in enumerate(ranks[:MAX_DEPTH]):
            if at == len(seen):
                seen.append(0)
                right.append(0)
            seen[at] += 1
            right[at] += rank == 0

    def _count_positions(self, step: Step) -> None:
        self.add_ranks(step.source, step.ranks)
        n_more = step.n_spine - len(self._verified_at)
        self._verified_at += [0] * n_more
        self._accepted_at += [0] * n_more
        for at in range(step.n_spine):
            self._verified_at[at] += 1
        for at, rank in enumerate(step.ranks[: step.n_spine]):
            self._accepted_at[at] += rank == 0

    @property
    def stats(self) -> SpecStats:
        """The sums so far."""
        return SpecStats(
            **self._sums, verified_at=tuple(self._verified_at),
            accepted_at=tuple(self._accepted_at), chosen=dict(self._chosen), drafts=self._counts(),
        )  # fmt: skip

    def _counts(self) -> dict[str, Counts]:
        """Return how often drafts of each source were right."""
        known = {name: (tuple(a), tuple(b)) for name, (a, b) in self._drafts.items()}
        return {name: counts for name, counts in known.items() if counts[0]}
