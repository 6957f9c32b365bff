"""What of a step's time is what such steps take: neither new graphs nor a busy machine. Pure."""

from __future__ import annotations

from dataclasses import replace

from .candidate import Candidate
from .firsttimes import Excused, FirstTimes
from .pace import Pace
from .plan import Step
from .stepcost import PassCost

# A draft that takes a smaller share of a plain step says nothing of the machine's pace.
_SHORT = 0.05


class StepTimes:
    """Corrects the times of steps. graphs: what new ones may cost. pace: of the machine."""

    def __init__(self, passes: PassCost, are_dear: bool) -> None:
        """are_dear: see `FirstTimes`."""
        self._passes = passes
        self.graphs, self.pace = FirstTimes(are_dear), Pace()

    def plain(self, step: Step) -> None:
        """Note a plain step."""
        if self._passes.plain_s:
            self.pace.plain(step.seconds / self._passes.usual(1, step.n_missing))

    def usual(self, step: Step, drafter: Candidate) -> tuple[Step, Excused]:
        """Return a step of a drafter without what does not count of its times, and what new graphs
        took of it.
        """
        if not (self._passes.plain_s and step.seconds):
            return step, Excused()
        excused = self._excused(step, drafter)
        seconds, drafter_s = step.seconds, step.drafter_s - excused.draft
        seconds -= excused.draft + excused.verify
        usual_s, pace = drafter.draft_s(step.n_draft, self._passes), 1.0
        if drafter.cost.is_known and usual_s >= _SHORT * self._passes.plain_s:
            usual_pass_s = self._passes.usual(step.n_rows, step.n_missing)
            pace = self.pace.of(drafter_s / usual_s, (seconds - drafter_s) / usual_pass_s)
        return replace(step, seconds=seconds / pace, drafter_s=drafter_s / pace), excused

    def _excused(self, step: Step, drafter: Candidate) -> Excused:
        """Return what of a step's time no later step takes, because its graphs were new."""
        passes = self._passes
        usual_s = passes.seconds.get(step.n_rows, step.seconds)
        return self.graphs.observe(
            step.source, step.n_draft, step.n_rows, step.n_tokens,
            (step.drafter_s, step.seconds - step.drafter_s),
            (drafter.draft_s(step.n_draft, passes), usual_s if step.n_rows > 1 else passes.plain_s),
            passes.plain_s,
        )  # fmt: skip


def by_law(step: Step, drafter: Candidate | None, passes: PassCost) -> Step:
    """Return a step with the times that it should take."""
    draft_s = 0.0
    if drafter:
        draft_s = drafter.source.fixed + drafter.source.per_token * step.n_draft
    verify_s = passes.by_law(step.n_rows, step.n_missing)
    return replace(step, seconds=draft_s + verify_s, drafter_s=draft_s)
