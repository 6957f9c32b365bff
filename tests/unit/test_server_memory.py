"""What a request leaves in memory: nothing that only Python's collector of cycles would find."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_service import FakeChatModel, FakeService
from helpers.patience import PATIENCE_S
from helpers.server_case import CHAT, Case

from moegraph.engine.chat import TextRequest
from moegraph.errors import InternalError, MoegraphError
from moegraph.server.answers import Answers
from moegraph.server.host import give_back

LONG = "x" * 5000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def left() -> Iterator[Callable[[], list[str]]]:
    """Yield a function that returns which of our objects and frames wait for the collector."""

    def found() -> list[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        names = [name for one in gc.garbage if (name := ours(one))]
        gc.garbage.clear()
        return names

    gc.freeze()  # for good: what other tests have loaded takes a second to look through
    gc.disable()
    yield found
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def ours(value: object) -> str:
    if isinstance(value, types.FrameType):
        code = value.f_code
        return code.co_name if "/moegraph/" in code.co_filename else ""
    return type(value).__name__ if type(value).__module__.startswith("moegraph") else ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "x"}, 200),
        ("/v1/completions", {"prompt": LONG}, 400),
        ("/v1/completions", {"prompt": 7.5}, 400),
        ("/v1/chat/completions", CHAT, 200),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL]}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, 400),
        ("/v1/messages", {**CHAT, "max_tokens": 5}, 200),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": LONG}]}, 400),
        ("/v1/responses", {"input": "x"}, 200),
        ("/v1/responses", {"input": LONG}, 400),
    ],
)
def test_a_request_leaves_nothing(
    left: Callable[[], list[str]], path: str, body: dict[str, Any], status: int, stream: bool
) -> None:
    case = Case()
    case.post(path, body)  # what is made once and kept
    left()
    assert case.post(path, {**body, "stream": stream}).status_code == status
    assert left() == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_an_answer_that_fails_leaves_nothing(
    left: Callable[[], list[str]], path: str, body: dict[str, Any], stream: bool
) -> None:
    script: list[str | MoegraphError] = ["a", InternalError("broken")]
    case = Case(script)
    for _ in range(2):
        left()
        assert case.post(path, {**body, "stream": stream}).status_code == (200 if stream else 500)
    assert left() == []


class Knowing(FakeService):
    """Its tickets know who waits for the answer, as those of the real service do."""

    def submit(self, request: Any, deliver: Any) -> Any:
        ticket = super().submit(request, deliver)
        ticket.deliver = deliver  # type: ignore[attr-defined]
        return ticket


@pytest.mark.parametrize("is_read", [True, False])
def test_a_talk_is_free_when_it_is_closed(is_read: bool) -> None:
    async def talk() -> weakref.ref[Answers]:
        service = Knowing(step_s=0.01)
        made = Answers(service, [FakeChatModel().prepare_text(TextRequest(prompt="x"))])
        with closing(made):
            async for _ in made:
                if not is_read:
                    break
        ticket = service.tickets.pop()
        assert await asyncio.to_thread(ticket.ended.wait, PATIENCE_S)
        await asyncio.sleep(0.01)  # the last step is delivered
        return weakref.ref(made)

    gc.disable()
    try:
        assert asyncio.run(talk())() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_free_memory_at_the_end_of_a_threads_heap_goes_back_too() -> None:
    """Small blocks behind large ones are merged with them, and with the end, only by a trim."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    done, end = threading.Event(), threading.Event()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE >> 20

    def work() -> None:
        blocks: list[int] = [0] * 6500
        for at in range(6500):
            size = 60_000 if 3000 <= at < 3500 else 100
            blocks[at] = libc.malloc(size)
            ctypes.memset(blocks[at], 1, size)
        for block in blocks:
            libc.free(block)
        give_back()
        done.set()
        assert end.wait(PATIENCE_S)

    before = resident()
    thread = threading.Thread(target=work)
    thread.start()
    assert done.wait(PATIENCE_S)
    after = resident()
    end.set()
    thread.join()
    assert after - before < 15
