"""Run the parts of scripts/measure_card: which is next, limits, ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
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


def arguments(step: str, values: Mapping[str, str]) -> list[str]:
    """Return the command of a step."""
    program, *rest = shlex.split(step.format_map(dict(values)))
    if program.endswith(".py"):
        return [str(_card.python()), str(ROOT / "scripts" / program), *rest]
    if program in ("moegraph", "pytest"):
        return [str(_card.python()), "-m", program, *rest]
    return [str(_card_upstream.programs() / program), *rest]


def run_command(
    command: Sequence[str], env: Mapping[str, str], out: IO[bytes], log: IO[bytes], end: float,
    stop: threading.Event,
) -> int | None:  # fmt: skip
    """Run a command, and end all that it has started; return its exit status, None if it was cut.

    end: of time.monotonic().
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=log,
        start_new_session=True,
    )  # fmt: skip
    while process.poll() is None and time.monotonic() < end and not stop.wait(0.1):
        pass
    code = process.poll()
    if code is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it started and left
    process.wait()
    return code


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
    limit cut runs once more at the end. took, expected: seconds of the parts so far, which tell how
    much slower this machine is than an H200.
    """

    results: Results
    waiting: list[Part]
    env: Mapping[str, str]
    values: Mapping[str, str]
    end: float = float("inf")
    took: float = 0.0
    expected: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def pace(self) -> float:
        """Return how many times longer parts take here than on an H200; at least once."""
        return max(1.0, self.took / self.expected) if self.expected else 1.0

    def run(self) -> None:
        """Run all parts."""
        was_cut: set[str] = set()
        while not self.stop.is_set():
            left_s = self.end - time.monotonic()
            part = next((one for one in self.waiting if one.seconds * self.pace <= left_s), None)
            if part is None:
                return
            self.waiting.remove(part)
            outcome = self._run_part(part)
            if outcome.state != FAILED:
                self.took += outcome.seconds
                self.expected += part.seconds
            if outcome.why == LIMIT and part.name not in was_cut:
                was_cut.add(part.name)
                self.waiting.append(part)  # now that it is known how slow this machine is

    def _run_part(self, part: Part) -> Outcome:
        run, outcome, start = self.results.begin(), Outcome(), time.monotonic()
        seconds = part.seconds * self.pace
        limit = min(self.end - start, _PATIENCE * seconds + _MORE_S)
        print(f"{part.name}: about {seconds:.0f} s, at most {limit:.0f}",
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
            command = arguments(step, {**self.values, **more})
            with raw.open("ab") as lines:
                out = log if "{out}" in step or "{xml}" in step else lines  # what it prints
                code = run_command(command, self.env, out, log, end, self.stop)
            if xml.is_file():
                raw.write_text(json_line(junit(xml)), encoding="utf-8")
                xml.unlink()
            if code is None:
                return CUT, "stopped" if self.stop.is_set() else LIMIT
            if code:
                is_finding = code == 1 and step.startswith("pytest")  # tests failed
                return (DONE if is_finding else FAILED), ""
        return DONE, ""
