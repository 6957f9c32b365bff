"""A request of the daemon on its way: its tokens are taken out one by one."""

from __future__ import annotations

import queue
from collections import deque

from ..errors import MoegraphError, RequestError
from ..loop.requests import Request, Step, Usage
from .contract import Service
from .daemonlines import GREEDY, Line, LineError


class Run:
    """A request on its way: its tokens come from the service and are taken out one by one."""

    def __init__(self, service: Service, request: Request) -> None:
        """Raises what `Service.submit` does."""
        self.n_prompt = len(request.prompt)
        self.usage = Usage(self.n_prompt)
        self._error: MoegraphError | None = None
        self._ended = False
        self._ready: deque[int] = deque()
        self._steps: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self._ticket = service.submit(request, self._steps.put)

    def next_token(self) -> int | None:
        """Wait for the next token; None: the request has ended.

        Raises:
            LineError: it has failed.
        """
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


def make_request(line: Line, number: int, prompt: list[int], n_gen: int, text: bool) -> Request:
    """Return the request of a line. number: of the request. text: the model has a vocabulary."""
    marks = (line.snap[0],) if line.snap and line.snap[0] < len(prompt) else ()
    return Request(
        prompt, line.sampling or GREEDY, max_tokens=n_gen, marks=marks, text=text,
        name=f"req{number}",
    )  # fmt: skip
