"""The line protocol of the daemon: parsing, replies, frames, turns, and what is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegraph.errors import ConfigError, InternalError, MoegraphError, QueueFull
from moegraph.loop.requests import Request, Step, Usage
from moegraph.sampling import SamplingParams
from moegraph.server.daemon import Daemon, Frames, Line, LineError, parse_line

GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    "text, line",
    [
        ("/tmp/p.bin 64", Line("PROMPT", ("/tmp/p.bin", "64"))),
        ("p.bin 64", Line("PROMPT", ("p.bin", "64"))),
        ("./p", Line("PROMPT", ("./p",))),
        ("REQ 7 SLOT 1 START a 8 2", Line("START", ("a", "8", "2"), 7, 1)),
        ("  SLOT 0  REQUEST 3 LIST_REQUESTS ", Line("LIST_REQUESTS", (), 3, 0)),
        ("REQ 7 CANCEL", Line("CANCEL", (), 7)),
        ("CONT", Line("CONTINUE")),
        ("exit", Line("quit")),
        ("SLOT 1", Line("", (), None, 1)),
        ("/p 4 snap=10:3", Line("PROMPT", ("/p", "4"), snap=(10, 3))),
    ],
)
def test_lines(text: str, line: Line) -> None:
    assert parse_line(text) == line


def test_sampling_of_a_line() -> None:
    line = parse_line("/p 4 samp=0.7,0.9,40,1.1,42,0.5,0.25")
    assert line is not None and line.sampling == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.0, repeat_penalty=1.1, repeat_last_n=256,
        frequency_penalty=0.5, presence_penalty=0.25, seed=42,
    )  # fmt: skip
    line = parse_line("/p 4 samp=0.7,0.9,40,1.1,42")
    assert line is not None and line.sampling is not None
    assert (line.sampling.frequency_penalty, line.sampling.presence_penalty) == (0, 0)


@pytest.mark.parametrize(
    "text, message",
    [
        ("park", "unsupported park"),
        ("unpark target", "unsupported unpark"),
        ("free drafter", "unsupported free"),
        ("compress a 100 b", "unsupported compress"),
        ("RESTORE_CHAIN -1 - /p 4", "unsupported RESTORE_CHAIN"),
        ("SLOT 0 SNAPSHOT_THIN 1 0 4", "unsupported SNAPSHOT_THIN"),
        ("SCHED_BATCH_PEEK", "unsupported SCHED_BATCH_PEEK"),
        ("SCHED_BATCH_DRAIN", "unsupported SCHED_BATCH_DRAIN"),
        ("hello", "unknown_command hello"),
        ("REQ", "bad_args REQ needs a number"),
        ("REQ x START /p 1", "bad_args REQ is 'x', which is no number"),
        ("/p 4 samp=1,2", "bad_args samp=1,2: five or seven numbers"),
        ("/p 4 samp=1,2,x,1,1", "bad_args samp=1,2,x,1,1: not all of these"),
        ("/p 4 snap=0:1", "bad_args snap=0:1: a position is 1 or more"),
        ("/p 4 snap=5", "bad_args snapshot is ''"),
    ],
)
def test_lines_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(LineError, match=message.replace("(", "\\(")):
        parse_line(text)


WORDS = st.sampled_from(
    [
        "REQ",
        "SLOT",
        "START",
        "/p",
        "CONTINUE",
        "CANCEL",
        "RESTORE",
        "1",
        "-1",
        "snap=1:2",
        "samp=",
        "x",
    ]
)


@given(st.one_of(st.text(max_size=40), st.lists(WORDS, max_size=8).map(" ".join)))
def test_any_line_is_parsed_or_refused_in_one_line(text: str) -> None:
    try:
        parse_line(text)
    except LineError as error:
        assert "\n" not in str(error)


class Ticket:
    """Ends its request."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class Scripted:
    """A service whose answer counts up from the prompt's last id, one to three tokens a step.

    stop_at: a token after which an answer stops. fails: what ends answers after three tokens.
    refuses: what submit raises. held: requests that deliver only when the event is set.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.tickets: list[Ticket] = []
        self.stop_at: int | None = None
        self.fails: MoegraphError | None = None
        self.refuses: MoegraphError | None = None
        self.endless = False

    def submit(self, request: Request, deliver: Callable[[Step], None]) -> Ticket:
        if self.refuses is not None:
            raise self.refuses
        self.requests.append(request)
        ticket = Ticket()
        self.tickets.append(ticket)
        threading.Thread(target=self._answer, args=(request, deliver, ticket)).start()
        return ticket

    def _answer(self, request: Request, deliver: Callable[[Step], None], ticket: Ticket) -> None:
        first = request.prompt[-1] + 1
        usage = Usage(len(request.prompt), n_cached=2, prefill_s=0.5, decode_s=0.25)
        tokens = list(range(first, first + (request.max_tokens or 0)))
        reason = "length"
        if self.stop_at is not None and self.stop_at in tokens:
            tokens, reason = tokens[: tokens.index(self.stop_at) + 1], "stop"
        if self.fails is not None:
            tokens = tokens[:3]
        deliver(Step(usage))
        n = 1
        while tokens and not (self.endless and ticket.cancelled.is_set()):
            deliver(Step(usage, tuple(tokens[:n])))
            tokens, n = tokens[n:], n % 3 + 1
        if self.endless:
            assert ticket.cancelled.wait(120)
            reason = "cancelled"
        if self.fails is not None:
            deliver(Step(usage, finish_reason="error", error=self.fails))
        else:
            deliver(Step(usage, finish_reason=reason))


class Talk:
    """A daemon, its service, what it replied, and what it streamed."""

    def __init__(self, folder: Path, n_slots: int = 2, tagged: bool = True) -> None:
        self.folder = folder
        self.service = Scripted()
        self.replies: list[str] = []
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self.reader, self.writer = reader, writer
        self.frames = Frames(writer, tagged)
        self.daemon = Daemon(self.service, self.replies.append, self.frames, n_slots)

    def file(self, *ids: int, name: str = "p.bin") -> Path:
        path = self.folder / name
        path.write_bytes(np.array(ids, dtype="<i4").tobytes())
        return path

    def __call__(self, text: str) -> str:
        """Obey a line and return its replies, joined by |."""
        before = len(self.replies)
        assert self.daemon.obey(text)
        return "|".join(self.replies[before:])

    def stream(self) -> list[int]:
        try:
            return np.frombuffer(os.read(self.reader, 1 << 16), dtype="<i4").tolist()
        except BlockingIOError:
            return []

    def tagged(self) -> list[tuple[int, int]]:
        """Return the frames as (request, value)."""
        values = self.stream()
        assert values[::3] == [-2] * (len(values) // 3)
        return list(zip(values[1::3], values[2::3]))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Talk]]:
    talks: list[Talk] = []

    def start(**options: object) -> Talk:
        talks.append(Talk(tmp_path, **options))  # type: ignore[arg-type]
        return talks[-1]

    yield start
    for talk in talks:
        talk.daemon.close()
        os.close(talk.reader)
        os.close(talk.writer)


@pytest.fixture
def talk(make: Callable[..., Talk]) -> Talk:
    return make()


def test_a_prompt_is_streamed_bare(make: Callable[..., Talk]) -> None:
    talk = make(tagged=False)
    path = talk.file(5, 6, 7)
    assert talk(f"{path} 4") == (
        f"ok N=3 gen=4 prefill_s=0.500 decode_s=0.250 decode_tok_s=16.0 stream_fd={talk.writer}"
    )
    assert talk.stream() == [8, 9, 10, 11, -1]
    (request,) = talk.service.requests
    assert list(request.prompt) == [5, 6, 7] and request.max_tokens == 4
    assert request.sampling == GREEDY and request.marks == () and request.name == "req0"


def test_generate_reads_and_writes_counted_files(talk: Talk, tmp_path: Path) -> None:
    source, target = talk.file(3, 5, 6, 7), tmp_path / "out.bin"
    assert talk(f"generate {source} 2 {target}").endswith(f"out={target}")
    assert np.fromfile(target, dtype="<i4").tolist() == [2, 8, 9] and talk.stream() == []
    assert list(talk.service.requests[0].prompt) == [5, 6, 7]
    wrong = talk.file(5, 6, 7, name="w.bin")
    assert talk(f"generate {wrong} 2 {target}").startswith("err bad_prompt")
    assert talk(f"generate {source} 2 {tmp_path}").startswith("err write_out")


def test_requests_are_handed_out_in_turns(talk: Talk) -> None:
    first, second = talk.file(10, name="a"), talk.file(100, name="b")
    assert talk(f"REQ 1 START {first} 5 2") == "ok START req=1 slot=0 emitted=2 remaining=3"
    assert talk.tagged() == [(1, 11), (1, 12), (1, -4)]
    assert talk(f"REQ 2 START {second} 3 2") == "ok START req=2 slot=1 emitted=2 remaining=1"
    assert talk.tagged() == [(2, 101), (2, 102), (2, -4)]
    assert talk("LIST_REQUESTS") == "[scheduler] requests=1@slot0(rem=3,q=2),2@slot1(rem=1,q=2)"
    assert talk(f"REQ 3 START {first} 3") == (
        "err no_free_slot all 2 have a request; see LIST_REQUESTS"
    )
    assert talk("SCHED_STEP") == "ok SCHED_STEP"
    assert talk.tagged() == [(1, 13), (1, 14), (1, -4)]
    assert talk("SCHED_DRAIN") == "ok SCHED_DRAIN steps=2"
    assert talk.tagged() == [(2, 103), (2, -1), (1, 15), (1, -1)]
    assert talk("SCHED_STEP") == "ok SCHED_STEP idle"
    assert talk("LIST_REQUESTS") == "[scheduler] requests="
    # both were with the service at the same time: two tickets before the first was taken out
    assert len(talk.service.requests) == 2


def test_a_cancelled_request_is_rejected_afterwards(talk: Talk) -> None:
    talk.service.endless = True
    talk(f"REQ 4 START {talk.file(10)} 5 2")
    assert talk("REQ 4 CANCEL") == "[scheduler] cancelled req=4 slot=0"
    assert talk.service.tickets[0].cancelled.is_set()
    talk.tagged()
    assert talk("SLOT 0 CONTINUE") == "err no_active_request slot 0" and talk.stream() == []
    assert talk("CANCEL 4") == "err no_active_request req 4"
    talk.service.endless = False
    assert talk(f"REQ 5 START {talk.file(10)} 1").startswith("ok START req=5 slot=0")


def test_snapshots_are_marks(talk: Talk) -> None:
    path = talk.file(5, 6, 7, 8)
    assert talk("LIST_SLOTS") == "[snap] slots="
    talk(f"{path} 2 snap=3:12")
    assert talk.service.requests[0].marks == (3,)
    assert talk("SNAPSHOT 4") == "[snap] inline slot=4 cur_pos=6 live=0"
    assert talk("LIST_SLOTS") == "[snap] slots=4,12"
    talk.stream()
    assert talk(f"RESTORE 12 {path} 2") == (
        f"ok N=4 gen=2 prefix_len=2 (RESTORE slot=12) stream_fd={talk.writer}"
    )
    assert talk.tagged() == [(0, 9), (0, 10), (0, -1)]
    assert talk("FREE_SNAPSHOT 12") == "[snap] freed slot=12"
    assert talk(f"RESTORE 12 {path} 2") == "err empty_slot 12"
    assert talk.tagged() == [(0, -1)]
    assert talk("SLOT 1 SNAPSHOT 3") == "err empty_slot slot 1 has answered nothing yet"
    # a mark behind the prompt's end is no mark
    talk(f"{path} 2 snap=4:1")
    assert talk.service.requests[-1].marks == ()


@pytest.mark.parametrize(
    "text, reply",
    [
        ("{p}", "err bad_args PROMPT takes FILE N_GEN"),
        ("{p} 0", "err bad_args n_gen is 0; allowed: 1 and more"),
        ("{p} x", "err bad_args n_gen is 'x', which is no number"),
        ("{p} 2 3", "err bad_args PROMPT takes FILE N_GEN"),
        ("{p} 2 snap=1:64", "err bad_slot snapshots have numbers from 0 to 63"),
        ("./none 2", "err bad_request none: cannot read token ids: No such file or directory"),
        ("SLOT 2 LIST_REQUESTS", "err bad_slot 2; there are 0 to 1"),
        ("SLOT -1 LIST_REQUESTS", "err bad_slot -1; there are 0 to 1"),
        ("START {p}", "err bad_args START takes FILE N_GEN"),
        ("START", "err bad_args START takes FILE N_GEN"),
        ("START {p} 4 0", "err bad_args quantum is 0; allowed: 1 and more"),
        ("CONTINUE 4", "err bad_args CONTINUE takes nothing"),
        ("RESTORE {p} 4", "err bad_args RESTORE takes SNAPSHOT FILE N_GEN"),
        ("RESTORE 64 {p} 4", "err bad_slot snapshots have numbers from 0 to 63"),
        ("SNAPSHOT x", "err bad_slot snapshots have numbers from 0 to 63"),
        ("FREE_SNAPSHOT", "err bad_args FREE_SNAPSHOT takes the number of a snapshot"),
        ("generate {p} 4", "err bad_args generate takes IN N_GEN OUT"),
        ("park draft", "err unsupported park"),
    ],
)
def test_replies_to_lines_that_cannot_be_obeyed(talk: Talk, text: str, reply: str) -> None:
    assert talk(text.format(p=talk.file(1, 2))) == reply
    assert talk.service.requests == []


def test_a_service_that_refuses(talk: Talk) -> None:
    talk.service.refuses = QueueFull("128 requests wait", 1.0)
    assert talk(f"{talk.file(1)} 2") == "err bad_request 128 requests wait"
    assert talk(f"START {talk.file(1)} 2") == "err bad_request 128 requests wait"
    assert talk("LIST_REQUESTS") == "[scheduler] requests="


def test_a_request_that_fails_ends(talk: Talk) -> None:
    talk.service.fails = InternalError("NaN")
    reply = talk(f"REQ 3 {talk.file(10)} 8")
    assert reply == "err failed internal error: NaN (please report this)"
    assert talk.tagged() == [(3, 11), (3, 12), (3, 13), (3, -1)]
    assert talk(f"START {talk.file(10)} 8 2").startswith("ok START")
    assert talk("CONT").startswith("err failed internal error")
    assert talk.tagged()[-2:] == [(3, 13), (3, -1)]
    assert talk("LIST_REQUESTS") == "[scheduler] requests="


def test_turns_need_tags_and_prompts_a_stream(make: Callable[..., Talk]) -> None:
    bare = make(tagged=False)
    for line in (f"START {bare.file(1)} 2", "CONTINUE", "SCHED_STEP", "SCHED_DRAIN"):
        assert bare(line) == f"err stream_tagged_required {line.split()[0]}"
    replies: list[str] = []
    daemon = Daemon(Scripted(), replies.append, Frames(None))
    daemon.obey(f"{bare.file(1)} 2")
    assert replies == ["err no_stream_fd give --stream-fd to the daemon"]


def test_a_stream_that_is_closed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--stream-fd 99: cannot write: Bad file descriptor"):
        Frames(99)
    reader, writer = os.pipe()
    frames = Frames(writer)
    os.close(reader)
    with pytest.raises(ConfigError, match="cannot write: Broken pipe"):
        frames.write(0, 1)
    os.close(writer)
