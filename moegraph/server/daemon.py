"""`moegraph daemon`: the reference's line protocol, as an adapter on the service."""

from __future__ import annotations

import os
import queue
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, MoegraphError, RequestError
from ..loop.requests import Request, Step, Usage
from ..sampling import SamplingParams
from ..text.tokenizer import read_ids

if TYPE_CHECKING:
    from ..engine.service import Service

# A line that begins with a file of token ids, and not with a command.
PROMPT = "PROMPT"
GREEDY = SamplingParams(temperature=0.0)
# The window of the repeat penalty in the protocol; it has no word for it.
_PENALTY_WINDOW = 256
_PREFIXES = {"REQ": "request", "REQUEST": "request", "SLOT": "slot"}
_SAME = {"CONT": "CONTINUE", "exit": "quit"}
_COMMANDS = frozenset({
    PROMPT, "generate", "RESTORE", "SNAPSHOT", "FREE_SNAPSHOT", "LIST_SLOTS", "START", "CONTINUE",
    "CANCEL", "SCHED_STEP", "SCHED_DRAIN", "LIST_REQUESTS", "LIST_TARGET_CACHE_SLOTS", "quit",
})  # fmt: skip
# Commands whose requests may take turns.
_TAGGED = frozenset({"START", "CONTINUE", "SCHED_STEP", "SCHED_DRAIN"})
# Commands of the protocol for which there is nothing here: the model is never parked, prompts are
# not compressed, parts of a snapshot are not joined, and every pass takes all sequences that run.
_UNSUPPORTED = frozenset({
    "park", "unpark", "free", "drafter", "compress", "RESTORE_CHAIN", "SNAPSHOT_THIN",
    "SCHED_BATCH_PEEK", "SCHED_BATCH_PROBE", "SCHED_BATCH_TARGET_TAIL", "SCHED_BATCH_TARGET_STEP",
    "SCHED_BATCH_DRAIN",
})  # fmt: skip


class LineError(RequestError):
    """A line cannot be obeyed. code: the word after "err" in the reply."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code} {detail}".rstrip())


@dataclass(frozen=True)
class Line:
    """A parsed line.

    words: what follows the command. request, slot: of the prefixes REQ and SLOT; None without.
    snap: position in the prompt and number of the snapshot to take there. sampling: of samp=; None
    without.
    """

    command: str
    words: tuple[str, ...] = ()
    request: int | None = None
    slot: int | None = None
    snap: tuple[int, int] | None = None
    sampling: SamplingParams | None = None


def parse_line(text: str) -> Line | None:
    """Parse a line; None if it is empty."""
    words = text.split()
    found: dict[str, int] = {}
    while words and words[0] in _PREFIXES:
        if len(words) < 2:
            raise LineError("bad_args", f"{words[0]} needs a number")
        found[_PREFIXES[words[0]]] = _integer(words[1], words[0])
        words = words[2:]
    if not words:
        return Line("", (), found.get("request"), found.get("slot")) if found else None
    command = _command(words)
    options = words if command == PROMPT else words[1:]
    snap = next((_snap(w[5:]) for w in options if w.startswith("snap=")), None)
    sampling = next((_sampling(w[5:]) for w in options if w.startswith("samp=")), None)
    rest = tuple(w for w in options if not w.startswith(("snap=", "samp=")))
    return Line(command, rest, found.get("request"), found.get("slot"), snap, sampling)


def _command(words: list[str]) -> str:
    word = _SAME.get(words[0], words[0])
    if word in _UNSUPPORTED:
        raise LineError("unsupported", word)
    if word in _COMMANDS - {PROMPT}:
        return word
    is_path = word.startswith(".") or "/" in word
    if is_path or (len(words) > 1 and words[1].isdecimal()):
        return PROMPT
    raise LineError("unknown_command", word)


def integers(line: Line, names: str, at: int = 0) -> list[int]:
    """Return the words of a line from `at` on as positive numbers, one for each name."""
    wanted = names.split()
    given = line.words[at:]
    if len(given) != len(wanted):
        how = " ".join([*("FILE" for _ in range(at)), *(name.upper() for name in wanted)])
        raise LineError("bad_args", f"{line.command} takes {how or 'nothing'}")
    values = [_integer(word, name) for word, name in zip(given, wanted)]
    for value, name in zip(values, wanted):
        if value < 1:
            raise LineError("bad_args", f"{name} is {value}; allowed: 1 and more")
    return values


def _integer(word: str, name: str) -> int:
    digits = word.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 10):
        raise LineError("bad_args", f"{name} is {word!r}, which is no number")
    return int(word)


def _snap(text: str) -> tuple[int, int]:
    position, _, number = text.partition(":")
    found = _integer(position, "position"), _integer(number, "snapshot")
    if found[0] < 1:
        raise LineError("bad_args", f"snap={text}: a position is 1 or more")
    return found


def _sampling(text: str) -> SamplingParams:
    """Return the settings of samp=temp,top_p,top_k,rep_pen,seed[,freq_pen,pres_pen]."""
    parts = text.split(",")
    if len(parts) not in (5, 7):
        raise LineError("bad_args", f"samp={text}: five or seven numbers, separated by commas")
    try:
        temperature, top_p, repeat = (float(parts[i]) for i in (0, 1, 3))
        frequency, presence = (float(p) for p in [*parts[5:], "0", "0"][:2])
        top_k, seed = int(parts[2]), int(parts[4])
    except ValueError:
        raise LineError("bad_args", f"samp={text}: not all of these are numbers") from None
    return SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=0.0, repeat_penalty=repeat,
        repeat_last_n=_PENALTY_WINDOW, frequency_penalty=frequency, presence_penalty=presence,
        seed=seed,
    ).seeded()  # fmt: skip


DONE, TAG, GOES_ON = -1, -2, -4


class Frames:
    """Tokens and ends of requests on a file descriptor.

    Tagged, each is a frame of three integers: -2, the number of the request, and a token, -4 (the
    request can be continued) or -1 (it has ended). Otherwise each is one integer: a token, or -1.
    """

    def __init__(self, fd: int | None, is_tagged: bool = False) -> None:
        """fd: None writes nothing."""
        self.fd, self.is_tagged = fd, is_tagged
        self._write(b"")

    def write(self, request: int, value: int) -> None:
        """Write a token of a request, GOES_ON (only in tagged frames) or DONE."""
        if self.is_tagged or value != GOES_ON:
            values = (TAG, request, value) if self.is_tagged else (value,)
            self._write(struct.pack(f"<{len(values)}i", *values))

    def _write(self, data: bytes) -> None:
        if self.fd is None:
            return
        try:
            n = os.write(self.fd, data)  # of nothing, too: that tells whether it is open
            while n < len(data):
                n += os.write(self.fd, data[n:])
        except OSError as error:
            why = f"--stream-fd {self.fd}: cannot write: {error.strerror}"
            raise ConfigError(why) from error


class Running:
    """A request under way: its tokens come from the service and are taken out one by one."""

    def __init__(self, service: Service, request: Request) -> None:
        self.n_prompt = len(request.prompt)
        self.usage = Usage(self.n_prompt)
        self._error: MoegraphError | None = None
        self._ended = False
        self._ready: deque[int] = deque()
        self._steps: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self._ticket = service.submit(request, self._steps.put)

    def next_token(self) -> int | None:
        """Wait for the next token; None: the request has ended."""
        while not self._ready and not self._ended:
            step = self._steps.get()
            self.usage = step.usage
            self._ready.extend(step.tokens)
            self._ended = step.finish_reason is not None
            self._error = step.error
        if self._ready:
            return self._ready.popleft()
        if self._error is not None:
            is_request = isinstance(self._error, RequestError)
            raise LineError("bad_request" if is_request else "failed", str(self._error))
        return None

    def cancel(self) -> None:
        """End the request and wait for its end; tokens that were not taken out are dropped."""
        self._ticket.cancel()
        self._ready.clear()
        while not self._ended:
            self._ended = self._steps.get().finish_reason is not None

    def figures(self, n: int) -> str:
        """Return sizes and times for a reply. n: tokens of the answer."""
        usage = self.usage
        rate = n / max(1e-9, usage.decode_s)
        return (
            f"N={self.n_prompt} gen={n} prefill_s={usage.prefill_s:.3f} "
            f"decode_s={usage.decode_s:.3f} decode_tok_s={rate:.1f}"
        )


@dataclass
class _Started:
    """A request whose tokens lines ask for. remaining: tokens that it may still have."""

    run: Running
    request: int
    slot: int
    quantum: int
    remaining: int
    emitted: int = 0

    def __str__(self) -> str:
        return (
            f"req={self.request} slot={self.slot} emitted={self.emitted} remaining={self.remaining}"
        )


Ids = npt.NDArray[np.int32]
N_SNAPSHOTS = 64


class Daemon:
    """Obeys one line after another; replies are lines too.

    What the protocol calls a snapshot is here a mark at which the service keeps the prefix of a
    prompt; it finds a prefix again by its tokens, whichever number it has. A request of START runs
    at the service's speed, together with all others; its tokens are kept until a line asks for
    them.
    """

    def __init__(
        self, service: Service, say: Callable[[str], None], frames: Frames,
        n_slots: int = 1, text: bool = True,
    ) -> None:  # fmt: skip
        """service: answers requests. say: writes a reply. frames: the stream of tokens.

        n_slots: requests of START that can be under way. text: whether the model has a vocabulary,
        whose end tokens end an answer.
        """
        self._service, self._say, self._frames = service, say, frames
        self._n_slots, self._text = n_slots, text
        # what lines without a prefix are for: those of the last prefixes
        self._request = self._slot = 0
        self._cursor = 0
        self._started: dict[int, _Started] = {}
        # by slot, tokens of prompt and answer after its last answer; by number, those of snapshots
        self._n_held: dict[int, int] = {}
        self._snapshots: dict[int, int] = {}
        self._commands: dict[str, Callable[[Line], None]] = {
            "": lambda _: None, PROMPT: self._prompt, "generate": self._generate,
            "RESTORE": self._restore, "SNAPSHOT": self._snapshot, "FREE_SNAPSHOT": self._free,
            "LIST_SLOTS": lambda _: say(
                f"[snap] slots={','.join(map(str, sorted(self._snapshots)))}"
            ),
            "START": self._start, "CONTINUE": self._go_on, "CANCEL": self._cancel,
            "SCHED_STEP": lambda _: say(f"ok SCHED_STEP{'' if self._turn() else ' idle'}"),
            "SCHED_DRAIN": self._drain, "LIST_REQUESTS": self._list_requests,
            "LIST_TARGET_CACHE_SLOTS": lambda _: say(
                f"[daemon] target_cache_slots={n_slots} active={self._slot}"
            ),
        }  # fmt: skip

    def greet(self) -> None:
        """Say that lines are read from now on."""
        self._say("[daemon] ready")
        tagged = " stream_tagged=1" if self._frames.is_tagged else ""
        if self._n_slots > 1:
            self._say(f"[daemon] target_cache_slots={self._n_slots}{tagged}")

    def obey(self, text: str) -> bool:
        """Obey a line; return False after quit. What is wrong is replied as a line "err ..."."""
        streams = True
        try:
            line = parse_line(text)
            if line is None:
                return True
            if line.slot is not None:
                if not 0 <= line.slot < self._n_slots:
                    raise LineError("bad_slot", f"{line.slot}; there are 0 to {self._n_slots - 1}")
                self._slot = line.slot
            if line.request is not None:
                self._request = line.request
            if line.command == "quit":
                return False
            streams = line.command in (PROMPT, "RESTORE")
            if line.command in _TAGGED and not self._frames.is_tagged:
                # its tokens could not be told from another request's
                raise LineError("stream_tagged_required", line.command)
            self._commands[line.command](line)
        except RequestError as error:
            code = "" if isinstance(error, LineError) else "bad_request "
            self._say(f"err {code}{error}")
            if streams:  # the reader of the stream must not wait for this request
                self._frames.write(self._request, DONE)
        return True

    def close(self) -> None:
        """Cancel all requests."""
        for started in self._started.values():
            started.run.cancel()
        self._started.clear()

    def _prompt(self, line: Line) -> None:
        (n_gen,) = integers(line, "n_gen", 1)
        run, n = self._answer(line, read_ids(Path(line.words[0])), n_gen)
        self._say(f"ok {run.figures(n)} stream_fd={self._frames.fd}")

    def _restore(self, line: Line) -> None:
        """Answer a prompt that begins with what a snapshot holds."""
        number, file = self._number(line, "RESTORE takes SNAPSHOT FILE N_GEN", 3), line.words[1]
        (n_gen,) = integers(line, "n_gen", 2)
        if number not in self._snapshots:
            raise LineError("empty_slot", str(number))
        run, n = self._answer(line, read_ids(Path(file)), n_gen)
        self._say(
            f"ok N={run.n_prompt} gen={n} prefix_len={run.usage.n_cached} "
            f"(RESTORE slot={number}) stream_fd={self._frames.fd}"
        )

    def _answer(self, line: Line, prompt: Ids, n_gen: int) -> tuple[Running, int]:
        """Answer a prompt and stream the tokens; return how many there were."""
        if self._frames.fd is None:
            raise LineError("no_stream_fd", "give --stream-fd to the daemon")
        if line.snap is not None:
            _require_snapshot(line.snap[1])
        run = self._run(line, prompt, n_gen)
        n = 0
        while (token := run.next_token()) is not None:
            self._frames.write(self._request, token)
            n += 1
        self._n_held[self._slot] = run.n_prompt + n
        if line.snap is not None:
            self._snapshots[line.snap[1]] = line.snap[0]
        self._frames.write(self._request, DONE)
        return run, n

    def _generate(self, line: Line) -> None:
        """Answer a prompt from a file into a file; both begin with the number of their ids."""
        if len(line.words) != 3:
            raise LineError("bad_args", "generate takes IN N_GEN OUT")
        source, n_gen, target = line.words
        (n,) = integers(Line("generate", (n_gen,)), "n_gen")
        ids = read_ids(Path(source))
        if len(ids) != int(ids[0]) + 1 or len(ids) < 2:
            raise LineError("bad_prompt", f"{source}: it must begin with the number of its ids")
        run = self._run(line, ids[1:], n)
        tokens = list(iter(run.next_token, None))
        self._n_held[self._slot] = run.n_prompt + len(tokens)
        try:
            Path(target).write_bytes(np.array([len(tokens), *tokens], dtype="<i4").tobytes())
        except OSError as error:
            raise LineError("write_out", f"{target}: {error.strerror}") from error
        self._say(f"ok {run.figures(len(tokens))} out={target}")

    def _start(self, line: Line) -> None:
        """Begin a request in the slot that was named last, or the first free one: START."""
        names = "n_gen quantum" if len(line.words) == 3 else "n_gen"
        n_gen, quantum, *_ = [*integers(line, names, 1), 0]
        slots = (self._slot, *range(self._n_slots))
        slot = next((one for one in slots if one not in self._started), None)
        if slot is None:
            raise LineError(
                "no_free_slot", f"all {self._n_slots} have a request; see LIST_REQUESTS"
            )
        run = self._run(line, read_ids(Path(line.words[0])), n_gen)
        self._slot = slot
        started = _Started(run, self._request, slot, quantum or n_gen, n_gen)
        self._started[slot] = started
        self._hand_out(started)
        self._say(f"ok START {started}")

    def _go_on(self, line: Line) -> None:
        """Hand out a quantum of the request in the slot: CONTINUE."""
        integers(line, "")
        started = self._started.get(self._slot)
        if started is None or line.request not in (None, started.request):
            raise LineError("no_active_request", f"slot {self._slot}")
        self._hand_out(started)
        self._say(f"ok CONTINUE {started}")

    def _cancel(self, line: Line) -> None:
        """End a request: CANCEL; its stream gets no end."""
        (number,) = integers(line, "request") if line.words else (self._request,)
        found = [s for s in self._started.values() if s.request == number]
        if not found:
            raise LineError("no_active_request", f"req {number}")
        for started in found:
            started.run.cancel()
            del self._started[started.slot]
            self._say(f"[scheduler] cancelled req={number} slot={started.slot}")

    def _drain(self, line: Line) -> None:
        """Hand out all requests, quantum by quantum: SCHED_DRAIN."""
        n_steps = 0
        while self._turn():
            n_steps += 1
        self._say(f"ok SCHED_DRAIN steps={n_steps}")

    def _list_requests(self, _: Line) -> None:
        """Reply which requests have tokens to come."""
        shown = [
            f"{s.request}@slot{s.slot}(rem={s.remaining},q={s.quantum})"
            for _, s in sorted(self._started.items())
        ]
        self._say(f"[scheduler] requests={','.join(shown)}")

    def _turn(self) -> bool:
        """Hand out a quantum of the request whose turn it is; return whether there is one."""
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
                self._frames.write(started.request, token)
                n += 1
        except LineError:
            self._end(started)
            raise
        started.emitted += n
        started.remaining = 0 if token is None else started.remaining - n
        if started.remaining > 0:
            self._frames.write(started.request, GOES_ON)
        else:
            self._end(started)

    def _end(self, started: _Started) -> None:
        del self._started[started.slot]
        started.run.cancel()
        self._n_held[started.slot] = started.run.n_prompt + started.emitted
        self._frames.write(started.request, DONE)

    def _run(self, line: Line, prompt: Ids, n_gen: int) -> Running:
        marks = (line.snap[0],) if line.snap and line.snap[0] < len(prompt) else ()
        request = Request(
            prompt.tolist(), line.sampling or GREEDY, max_tokens=n_gen, marks=marks,
            text=self._text, name=f"req{self._request}",
        )  # fmt: skip
        return Running(self._service, request)

    def _snapshot(self, line: Line) -> None:
        number = self._number(line, "SNAPSHOT takes the number of a snapshot")
        n_held = self._n_held.get(self._slot)
        if n_held is None:
            raise LineError("empty_slot", f"slot {self._slot} has answered nothing yet")
        self._snapshots[number] = n_held
        self._say(f"[snap] inline slot={number} cur_pos={n_held} live={self._slot}")

    def _free(self, line: Line) -> None:
        number = self._number(line, "FREE_SNAPSHOT takes the number of a snapshot")
        self._snapshots.pop(number, None)
        self._say(f"[snap] freed slot={number}")

    def _number(self, line: Line, usage: str, n_words: int = 1) -> int:
        if len(line.words) != n_words:
            raise LineError("bad_args", usage)
        word = line.words[0]
        return _require_snapshot(int(word) if word.isascii() and word.isdecimal() else -1)


def _require_snapshot(number: int) -> int:
    if not 0 <= number < N_SNAPSHOTS:
        raise LineError("bad_slot", f"snapshots have numbers from 0 to {N_SNAPSHOTS - 1}")
    return number
