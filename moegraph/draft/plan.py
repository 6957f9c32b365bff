"""What one step of drafting is asked to do, what became of it, and the sums of all steps: values.

A step drafts tokens after the *anchor* (the last token drawn, which no pass has read yet), has the
target verify them in one pass, and takes those that the target would have drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Any

from ..placement.draftcounts import MAX_DEPTH, Counts, less, summed
from .tree import DDTree


@dataclass(frozen=True)
class Source:
    """What is known of a drafter before it has run.

    fixed, per_token: seconds of a draft and of each of its tokens, in units of a plain decode step.
    accept: expected probability that a drafted token is accepted if all before it were.
    has_tree: it can build trees itself, because it knows what follows each token (`Drafter.tree`).
    joins: it drafts for several sequences at once (`Drafter.draft_all`). is_free: a draft costs
    nothing and says how likely it is right.
    """

    name: str
    max_draft: int
    fixed: float = 0.0
    per_token: float = 0.0
    accept: float = 0.7
    has_tree: bool = False
    joins: bool = False
    is_free: bool = False


@dataclass(frozen=True)
class DraftSettings:
    """What the user has asked for.

    spec: "auto": whatever pays; "off"; or the source that drafts in every step.
    draft_max: most drafted tokens on a path. p_min: a draft ends before the first token to which
    the drafter gives a smaller probability. budget: rows of a verify pass, the anchor included.
    ddtree: how to build trees; None for chains.
    max_rows: rows of a verify pass that there is memory for. is_timed: choices may depend on
    measured times, and so differ from run to run. captures: the device captures graphs.
    """

    spec: str = "auto"
    draft_max: int | None = None
    p_min: float = 0.0
    budget: int | None = None
    ddtree: DDTree | None = None
    max_rows: int = 32
    is_timed: bool = True
    captures: bool = True

    @property
    def most_rows(self) -> int:
        """Most rows of a verify pass, the anchor included."""
        wanted = self.ddtree.budget + 1 if self.ddtree else self.budget
        return self.max_rows if wanted is None else min(self.max_rows, wanted)

    @property
    def gives_length(self) -> bool:
        """Whether the user has said how much each step drafts."""
        return bool(self.draft_max or self.budget or self.ddtree)

    def most_depths(self, source: Source) -> int:
        """Return the most depths that a source may draft."""
        limits = [source.max_draft, self.draft_max]
        if not self.ddtree:
            limits.append(self.most_rows - 1)
        return min(limit for limit in limits if limit is not None)

    @property
    def graph_price(self) -> float:
        """What the first passes of a width cost more than later ones, in plain steps.

        They build graphs, and some devices capture them. Where no time may count, it is nothing.
        """
        return (16.0 if self.captures else 2.0) if self.is_timed else 0.0

    @property
    def is_fixed(self) -> bool:
        """Whether every step drafts with a named source."""
        return self.spec not in ("auto", "off")


@dataclass(frozen=True)
class Plan:
    """What the next step drafts.

    source: name of a drafter; "" for a plain decode step. n_draft: most depths to ask it for.
    n_top: candidates at each depth to ask for. ddtree: how to build the rows; None: a chain.
    n_nodes: rows besides the anchor, if the drafter itself builds the tree (`Drafter.tree`); 0 if
    not. is_trial: it is not what is best by what is known, but may be better. is_whole: every token
    of the draft gets a row.
    """

    source: str = ""
    n_draft: int = 0
    n_top: int = 1
    ddtree: DDTree | None = None
    is_trial: bool = False
    n_nodes: int = 0
    is_whole: bool = False


PLAIN = Plan()


@dataclass(frozen=True)
class Step:
    """What a step did; plain decode steps count too.

    source: as in its plan. seconds: since the end of the step before it, or of the prompt.
    n_tokens: by which the text grew. n_rows: of its pass. n_draft: depths asked of the drafter.
    n_spine: depths of the spine that were verified. n_accepted: drafted tokens accepted.
    ranks: by depth, for the depths that the acceptance walk reached on the spine: which of the
        drafter's candidates the target drew there; 0 for the spine's token, -1 for none of them.
    log_p: the drafter's log probability of the spine's token, by depth; empty if it has none.
    n_missing: distinct missing experts of the pass, summed over layers. is_trial: as in its plan.
    """

    source: str
    seconds: float
    n_tokens: int = 1
    n_rows: int = 1
    n_draft: int = 0
    n_spine: int = 0
    n_accepted: int = 0
    ranks: tuple[int, ...] = ()
    log_p: tuple[float, ...] = ()
    drafter_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    n_missing: int = 0
    is_trial: bool = False


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
        self.verified_at = summed(self.verified_at, (1,) * n)
        self.accepted_at = summed(self.accepted_at, (*right, *(0,) * n)[:n])
        if right:
            del right[MAX_DEPTH:]
            before = self.drafts.get(step.source, ((), ()))
            self.drafts[step.source] = (
                summed(before[0], (1,) * len(right)),
                summed(before[1], right),
            )

    def copy(self) -> SpecStats:
        """Return the counts so far."""
        return replace(self, chosen=dict(self.chosen), drafts=dict(self.drafts))

    def since(self, earlier: SpecStats) -> SpecStats:
        """Return what happened since earlier."""
        found = self.copy()
        for name, before in vars(earlier).items():
            now = getattr(self, name)
            if isinstance(now, tuple):
                setattr(found, name, summed(now, [-n for n in before]))
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


def expected_tokens(accept: Sequence[float], most: int) -> list[float]:
    """Return by how many tokens the text is expected to grow with 0, 1, ... `most` drafted rows.

    accept: probability of the token at depth 1, 2, ... if all before it are accepted. The token
    drawn after the path counts, so the first is 1.
    """
    return [*accumulate(accumulate(accept[: max(most, 0)], mul), initial=1.0)]
