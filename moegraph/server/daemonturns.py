"""Requests of the daemon that are handed out in turns, a quantum of tokens each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .daemonlines import Line, LineError, integers
from .daemonrun import Run
from .daemonstream import Frames


@dataclass
class Focus:
    """What lines without a prefix are for, and how much each slot held after its last answer.

    request, slot: of the last prefixes. n_held: by slot, tokens of prompt and answer.
    """

    request: int = 0
    slot: int = 0
    n_held: dict[int, int] = field(default_factory=dict)


@dataclass
class _Started:
    """A request that is handed out. remaining: tokens that it may still have."""

    run: Run
    request: int
    slot: int
    quantum: int
    remaining: int
    emitted: int = 0

    def place(self) -> str:
        """Return its numbers for a reply."""
        return (
            f"req={self.request} slot={self.slot} emitted={self.emitted} remaining={self.remaining}"
        )


@dataclass
class Turns:
    """Hands out requests, each in a slot, by line or one after another.

    A request runs at the service's speed, together with all others; here its tokens are kept until
    a line asks for them.
    """

    say: Callable[[str], None]
    frames: Frames
    focus: Focus
    n_slots: int
    _cursor: int = 0
    _started: dict[int, _Started] = field(default_factory=dict)

    def require_tags(self, line: Line) -> None:
        """Refuse a line whose tokens could not be told from another request's.

        Raises:
            LineError: the stream has no tagged frames.
        """
        if not self.frames.is_tagged:
            raise LineError("stream_tagged_required", line.command)

    def free_slot(self) -> int:
        """Return the slot that was named last if it is free, else the first free one.

        Raises:
            LineError: none is free.
        """
        slots: list[int] = [self.focus.slot, *range(self.n_slots)]
        for slot in slots:
            if slot not in self._started:
                return slot
        raise LineError("no_free_slot", f"all {self.n_slots} have a request; see LIST_REQUESTS")

    def start(self, run: Run, slot: int, n_gen: int, quantum: int) -> None:
        """Hand out the first quantum of a new request."""
        self.focus.slot = slot
        started = _Started(run, self.focus.request, slot, quantum, n_gen)
        self._started[slot] = started
        self._hand_out(started)
        self.say(f"ok START {started.place()}")

    def go_on(self, line: Line) -> None:
        """Hand out a quantum of the request in the slot: CONTINUE."""
        self.require_tags(line)
        integers(line, "")
        started = self._started.get(self.focus.slot)
        if started is None or line.request not in (None, started.request):
            raise LineError("no_active_request", f"slot {self.focus.slot}")
        self._hand_out(started)
        self.say(f"ok CONTINUE {started.place()}")

    def cancel(self, line: Line) -> None:
        """End a request: CANCEL; its stream gets no end."""
        number = self.focus.request
        if line.words:
            (number,) = integers(line, "request")
        found = [s for s in self._started.values() if s.request == number]
        if not found:
            raise LineError("no_active_request", f"req {number}")
        for started in found:
            started.run.cancel()
            del self._started[started.slot]
            self.say(f"[scheduler] cancelled req={number} slot={started.slot}")

    def step(self, line: Line) -> None:
        """Hand out a quantum of the request whose turn it is: SCHED_STEP."""
        self.require_tags(line)
        self.say("ok SCHED_STEP" if self._turn() else "ok SCHED_STEP idle")

    def drain(self, line: Line) -> None:
        """Hand out all requests, quantum by quantum: SCHED_DRAIN."""
        self.require_tags(line)
        n_steps = 0
        while self._turn():
            n_steps += 1
        self.say(f"ok SCHED_DRAIN steps={n_steps}")

    def list_requests(self, _: Line) -> None:
        """Reply which requests have tokens to come: LIST_REQUESTS."""
        shown = [
            f"{s.request}@slot{s.slot}(rem={s.remaining},q={s.quantum})"
            for _, s in sorted(self._started.items())
        ]
        self.say(f"[scheduler] requests={','.join(shown)}")

    def close(self) -> None:
        """Cancel all requests."""
        for started in self._started.values():
            started.run.cancel()
        self._started.clear()

    def _turn(self) -> bool:
        if not self._started:
            return False
        slots = sorted(self._started)
        slot = next((s for s in slots if s >= self._cursor), slots[0])
        self._cursor = slot + 1
        self._hand_out(self._started[slot])
        return True

    def _hand_out(self, started: _Started) -> None:
        """Stream the next tokens of a request, and whether more may come."""
        n, token = 0, None
        try:
            while n < min(started.quantum, started.remaining):
                token = started.run.next_token()
                if token is None:
                    break
                self.frames.token(started.request, token)
                n += 1
        except LineError:
            self._end(started)
            raise
        started.emitted += n
        started.remaining = 0 if token is None else started.remaining - n
        if started.remaining > 0:
            self.frames.goes_on(started.request)
        else:
            self._end(started)

    def _end(self, started: _Started) -> None:
        del self._started[started.slot]
        started.run.cancel()
        self.focus.n_held[started.slot] = started.run.n_prompt + started.emitted
        self.frames.done(started.request)
