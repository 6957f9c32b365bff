"""Run the parts of scripts/measure_card: which is next, limits, ends."""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import _card
import _card_upstream
from _bench import Line, json_line
from _card_parts import Part
from _card_results import CUT, DONE, FAILED, Outcome, Results
from _tools import ROOT

LIMIT = "its limit"  # why a part was cut
# A part may take so many times what it should, and so many seconds more.
_PATIENCE, _MORE_S = 2.5, 30.0
# Seconds in which a process must end after SIGTERM.
_GRACE_S = 5.0


@dataclass
class Pace:
    """How many times longer parts take here than on an H200; at least once."""

    took: float = 0.0
    expected: float = 0.0

    @property
    def times(self) -> float:
        """Return what the parts so far say."""
        return max(1.0, self.took / self.expected) if self.expected else 1.0

    def note(self, part: Part, outcome: Outcome) -> None:
        """Learn from a part; one that failed says nothing."""
        if outcome.state != FAILED:
            self.took += outcome.seconds
            self.expected += part.seconds


def next_part(waiting: Sequence[Part], left_s: float, pace: float) -> Part | None:
    """Return the first part that should end in time."""
    return next((part for part in waiting if part.seconds * pace <= left_s), None)


def limit_s(part: Part, left_s: float, pace: float) -> float:
    """Return the seconds after which a part is ended."""
    return min(left_s, _PATIENCE * pace * part.seconds + _MORE_S)


def why_not(part: Part, have: Iterable[str], share_that_fits: float) -> str:
    """Return why a part cannot run, "" if it can. have: of what parts need."""
    named = {
        "upstream": "unpatched llama.cpp is not built", "mtp": "the model has no MTP block",
        "before": "no --tree", "cuda": "no card",
        "tests": "pytest or pytest-xdist is not installed",
    }  # fmt: skip
    missing = [named[need] for need in part.needs if need not in have]
    if part.share > share_that_fits:
        missing.append(f"the card is too small for {part.share:.0%} of the experts")
    return ", ".join(missing)


def arguments(step: str, values: Mapping[str, str]) -> list[str]:
    """Return the command of a step."""
    program, *rest = shlex.split(step.format_map(dict(values)))
    if program.endswith(".py"):
        return [str(_card.python()), str(ROOT / "scripts" / program), *rest]
    if program in ("moegraph", "pytest"):
        return [str(_card.python()), "-m", program, *rest]
    return [str(_card_upstream.programs() / program), *rest]


class Process:
    """A command in a process group of its own, with all that it starts."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> None:
        self._log = log
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True, bufsize=0,
        )  # fmt: skip
        self._held: dict[IO[bytes], bytes] = {}  # by pipe: the begin of a line
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._held[pipe] = b""

    def wait(self, end: float, stop: threading.Event, say: Callable[[bytes], None]) -> int | None:
        """Wait for the end; hand over each line of its output. None: it was ended by us.

        end: of time.monotonic().
        """
        with selectors.DefaultSelector() as chosen:
            for pipe in self._held:
                chosen.register(pipe, selectors.EVENT_READ)
            while self._process.poll() is None and time.monotonic() < end and not stop.is_set():
                for key, _ in chosen.select(0.1):
                    pipe = next(pipe for pipe in self._held if pipe is key.fileobj)
                    if not self._take(pipe, say):
                        chosen.unregister(pipe)
        code = self._process.poll()
        self.end()
        for pipe in self._held:
            while self._take(pipe, say):
                pass
            self._log.write(self._held[pipe])
            pipe.close()
        return code

    def _take(self, pipe: IO[bytes], say: Callable[[bytes], None]) -> bool:
        """Read what there is of a pipe, and log whole lines; return whether there was anything."""
        data = pipe.read(1 << 16)
        *whole, self._held[pipe] = (self._held[pipe] + (data or b"")).split(b"\n")
        for line in whole:
            self._log.write(line + b"\n")
            if pipe is self._process.stdout:
                say(line)
        return bool(data)

    def end(self) -> None:
        """End the whole group: politely, then not."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        self._signal(signal.SIGKILL)  # what it started and left
        self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def junit(path: Path) -> Line:
    """Return what pytest counted in its XML file."""
    suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    found: Line = {
        name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")
    }
    bad = [x for x in suite.iter("testcase") if {"failure", "error"} & {part.tag for part in x}]
    return {**found, "failed": [f"{x.get('classname')}.{x.get('name')}" for x in bad]}


@dataclass
class Runner:
    """Runs parts one after the other until they are done, the time is up, or `stop` is set.

    env, values: the environment of commands, and what stands for names in them. A part that its
    limit cut runs once more at the end.
    """

    results: Results
    waiting: list[Part]
    env: Mapping[str, str]
    values: Mapping[str, str]
    end: float = float("inf")
    pace: Pace = field(default_factory=Pace)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Run all parts."""
        was_cut: set[str] = set()
        while not self.stop.is_set():
            part = next_part(self.waiting, self.end - time.monotonic(), self.pace.times)
            if part is None:
                return
            self.waiting.remove(part)
            outcome = self._run_part(part)
            self.pace.note(part, outcome)
            if outcome.why == LIMIT and part.name not in was_cut:
                was_cut.add(part.name)
                self.waiting.append(part)  # now that it is known how slow this machine is

    def _run_part(self, part: Part) -> Outcome:
        run, outcome, start = self.results.begin(), Outcome(), time.monotonic()
        limit = limit_s(part, self.end - start, self.pace.times)
        print(f"{part.name}: about {part.seconds * self.pace.times:.0f} s, at most {limit:.0f}",
              file=sys.stderr, flush=True)  # fmt: skip
        path = self.results.raw(part.name).with_suffix(".log")
        with path.open("wb") as log:
            try:
                outcome.state, outcome.why = self._run_steps(part, start + limit, log)
            except OSError as error:
                outcome.state, outcome.why = FAILED, str(error)
            outcome.seconds = time.monotonic() - start
        said = path.read_text(encoding="utf-8", errors="replace")
        path.unlink()
        if outcome.state == FAILED and not outcome.why:
            words = [line for line in said.splitlines() if line.strip() and line[0] != "{"]
            outcome.why = words[-1][:200] if words else "it said nothing"
        self.results.end(part.name, run, outcome, said)
        print(f"{part.name}: {outcome.state} after {outcome.seconds:.0f} s {outcome.why}".rstrip(),
              file=sys.stderr, flush=True)  # fmt: skip
        return outcome

    def _run_steps(self, part: Part, end: float, log: IO[bytes]) -> tuple[str, str]:
        """Run the commands of a part; return how it ended and why."""
        raw = self.results.raw(part.name)
        raw.unlink(missing_ok=True)
        for step in part.steps:
            xml = raw.with_suffix(".xml")
            more = {"out": shlex.quote(str(raw)), "xml": shlex.quote(str(xml))}
            keeps = "{out}" not in step

            def say(line: bytes, keeps: bool = keeps) -> None:
                if keeps and line.startswith(b"{"):
                    with raw.open("ab") as file:
                        file.write(line + b"\n")

            process = Process(arguments(step, {**self.values, **more}), self.env, log)
            code = process.wait(end, self.stop, say)
            if xml.is_file():
                raw.write_text(json_line(junit(xml)), encoding="utf-8")
                xml.unlink()
            if code is None:
                return CUT, "stopped" if self.stop.is_set() else LIMIT
            if code:
                return (DONE, "") if _says_so(step, code) else (FAILED, "")
        return DONE, ""


def _says_so(step: str, code: int) -> bool:
    """Return whether an exit status is a finding: tests failed."""
    return code == 1 and step.startswith("pytest")
