"""What drafting did and what it gained, as counts that can be subtracted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from ..placement.draftcounts import MAX_DEPTH, Counts, less
from .plan import Step


@dataclass
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
    chosen: dict[tuple[str, int], int] = field(default_factory=dict)
    drafts: dict[str, Counts] = field(default_factory=dict)

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

    def add(self, step: Step, plain_s: float) -> None:
        """Count a step. plain_s: of a plain one, 0 if not known."""
        is_timed = step.seconds > 0.0
        if is_timed and plain_s:
            self.seconds += step.seconds
            self.plain_seconds += plain_s * step.n_tokens
        if step.n_rows == 1:
            self.plain_steps += 1
            return
        if is_timed:
            self.timed_steps += 1
            self.drafter_s += step.drafter_s
            self.verify_s += step.verify_s
            self.commit_s += step.commit_s
        self.steps += 1
        self.tokens += step.n_tokens
        self.drafted += step.n_rows - 1
        self.accepted += step.n_accepted
        self.chosen[step.source, step.n_rows] = self.chosen.get((step.source, step.n_rows), 0) + 1
        right, n = [int(rank == 0) for rank in step.ranks], step.n_spine
        self.verified_at = _sum(self.verified_at, (1,) * n)
        self.accepted_at = _sum(self.accepted_at, (*right, *(0,) * n)[:n])
        if right:
            del right[MAX_DEPTH:]
            before = self.drafts.get(step.source, ((), ()))
            self.drafts[step.source] = _sum(before[0], (1,) * len(right)), _sum(before[1], right)

    def copy(self) -> SpecStats:
        """Return the counts so far."""
        return replace(self, chosen=dict(self.chosen), drafts=dict(self.drafts))

    def since(self, earlier: SpecStats) -> SpecStats:
        """Return what happened since earlier."""
        found = self.copy()
        for name, before in vars(earlier).items():
            now = getattr(self, name)
            if isinstance(now, tuple):
                setattr(found, name, _sum(now, [-n for n in before]))
            elif not isinstance(now, dict):
                setattr(found, name, now - before)
        chosen = {key: n - earlier.chosen.get(key, 0) for key, n in self.chosen.items()}
        found.chosen = {key: n for key, n in chosen.items() if n}
        found.drafts = less(self.drafts, earlier.drafts)
        return found

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


def _sum(counts: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    return tuple(n + m for n, m in zip_longest(counts, more, fillvalue=0))
