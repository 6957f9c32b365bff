"""`moegraph daemon`: the reference's line protocol, as an adapter on the service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import RequestError
from ..loop.requests import Request
from ..text.idfiles import read_ids
from .contract import Service
from .daemonlines import PROMPT, Line, LineError, integers, parse_line
from .daemonrun import Run, make_request
from .daemonstream import Frames
from .daemonturns import Focus, Turns

Ids = npt.NDArray[np.int32]
N_SNAPSHOTS = 64


class Daemon:
    """Obeys one line after another; replies are lines too.

    What the protocol calls a snapshot is here a mark at which the service keeps the prefix of a
    prompt; it finds a prefix again by its tokens, whichever number it has.
    """

    def __init__(
        self, service: Service, say: Callable[[str], None], frames: Frames, n_slots: int = 1,
        text: bool = True,
    ) -> None:  # fmt: skip
        """service: answers requests. say: writes a reply. frames: the stream of tokens.

        n_slots: requests of START that can be under way. text: whether the model has a vocabulary,
        whose end tokens end an answer.
        """
        self._service, self._say, self._frames = service, say, frames
        self._n_slots, self._text = n_slots, text
        self._focus = Focus()
        self._turns = Turns(say, frames, self._focus, n_slots)
        self._snapshots: dict[int, int] = {}
        self._commands: dict[str, Callable[[Line], None]] = {
            "": lambda _: None, PROMPT: self._prompt, "generate": self._generate,
            "RESTORE": self._restore, "SNAPSHOT": self._snapshot, "FREE_SNAPSHOT": self._free,
            "LIST_SLOTS": self._list_snapshots, "START": self._start,
            "CONTINUE": self._turns.go_on, "CANCEL": self._turns.cancel,
            "SCHED_STEP": self._turns.step, "SCHED_DRAIN": self._turns.drain,
            "LIST_REQUESTS": self._turns.list_requests,
            "LIST_TARGET_CACHE_SLOTS": self._list_slots,
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
            self._take_prefixes(line)
            if line.command == "quit":
                return False
            streams = line.command in (PROMPT, "RESTORE")
            self._commands[line.command](line)
        except LineError as error:
            self._refuse(str(error), streams)
        except RequestError as error:
            self._refuse(f"bad_request {error}", streams)
        return True

    def close(self) -> None:
        """Cancel what is under way."""
        self._turns.close()

    def _refuse(self, why: str, streams: bool) -> None:
        self._say(f"err {why}")
        if streams:  # whoever reads the stream must not wait for this request
            self._frames.done(self._focus.request)

    def _take_prefixes(self, line: Line) -> None:
        """Remember request and slot of a line: they stay until another line names others."""
        if line.slot is not None:
            if not 0 <= line.slot < self._n_slots:
                raise LineError("bad_slot", f"{line.slot}; there are 0 to {self._n_slots - 1}")
            self._focus.slot = line.slot
        if line.request is not None:
            self._focus.request = line.request

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

    def _answer(self, line: Line, prompt: Ids, n_gen: int) -> tuple[Run, int]:
        """Answer a prompt and stream the tokens; return how many there were."""
        if self._frames.fd is None:
            raise LineError("no_stream_fd", "give --stream-fd to the daemon")
        if line.snap is not None:
            _require_snapshot(line.snap[1])
        run = Run(self._service, self._request(line, prompt, n_gen))
        n = 0
        while (token := run.next_token()) is not None:
            self._frames.token(self._focus.request, token)
            n += 1
        self._focus.n_held[self._focus.slot] = run.n_prompt + n
        if line.snap is not None:
            self._snapshots[line.snap[1]] = line.snap[0]
        self._frames.done(self._focus.request)
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
        run = Run(self._service, self._request(line, ids[1:], n))
        tokens = []
        while (token := run.next_token()) is not None:
            tokens.append(token)
        self._focus.n_held[self._focus.slot] = run.n_prompt + len(tokens)
        try:
            Path(target).write_bytes(np.array([len(tokens), *tokens], dtype="<i4").tobytes())
        except OSError as error:
            raise LineError("write_out", f"{target}: {error.strerror}") from error
        self._say(f"ok {run.figures(len(tokens))} out={target}")

    def _start(self, line: Line) -> None:
        self._turns.require_tags(line)
        names = "n_gen quantum" if len(line.words) == 3 else "n_gen"
        n_gen, quantum, *_ = [*integers(line, names, 1), 0]
        slot = self._turns.free_slot()
        request = self._request(line, read_ids(Path(line.words[0])), n_gen)
        self._turns.start(Run(self._service, request), slot, n_gen, quantum or n_gen)

    def _request(self, line: Line, prompt: Ids, n_gen: int) -> Request:
        return make_request(line, self._focus.request, prompt.tolist(), n_gen, self._text)

    def _snapshot(self, line: Line) -> None:
        number = self._number(line, "SNAPSHOT takes the number of a snapshot")
        n_held = self._focus.n_held.get(self._focus.slot)
        if n_held is None:
            raise LineError("empty_slot", f"slot {self._focus.slot} has answered nothing yet")
        self._snapshots[number] = n_held
        self._say(f"[snap] inline slot={number} cur_pos={n_held} live={self._focus.slot}")

    def _free(self, line: Line) -> None:
        number = self._number(line, "FREE_SNAPSHOT takes the number of a snapshot")
        self._snapshots.pop(number, None)
        self._say(f"[snap] freed slot={number}")

    def _number(self, line: Line, usage: str, n_words: int = 1) -> int:
        if len(line.words) != n_words:
            raise LineError("bad_args", usage)
        word = line.words[0]
        return _require_snapshot(int(word) if word.isascii() and word.isdecimal() else -1)

    def _list_snapshots(self, _: Line) -> None:
        self._say(f"[snap] slots={','.join(str(n) for n in sorted(self._snapshots))}")

    def _list_slots(self, _: Line) -> None:
        self._say(f"[daemon] target_cache_slots={self._n_slots} active={self._focus.slot}")


def _require_snapshot(number: int) -> int:
    if not 0 <= number < N_SNAPSHOTS:
        raise LineError("bad_slot", f"snapshots have numbers from 0 to {N_SNAPSHOTS - 1}")
    return number
