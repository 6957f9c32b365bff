"""An engine for asyncio, whose hidden states and routing a program can read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, RequestError
from ..events import GenerationEvent
from ..ggml.ops import Tensor
from ..loop.requests import Request, Step
from ..passes.checks import prompt_ids
from ..runner import LayeredRunner
from ..runner.inspect import read_tensor
from ..runner.sweep_batch import SweepBatch
from ..sampling import SamplingParams
from .chat import ChatRequest
from .chatanswer import AsyncChatAnswer
from .engine import Engine
from .service import Service

Routing = Callable[[int, npt.NDArray[np.int32]], object]


class AsyncEngine(Engine):
    """An engine that also answers for asyncio and shows its inside.

    The first asynchronous request starts a service, whose thread owns the engine until it is
    closed: passes and generations of other threads are refused from then on.
    """

    @cached_property
    def _service(self) -> Service:
        service = Service(self)
        service.start()
        return service

    def close(self) -> None:
        """End all answers, and free everything as `Engine.close` does."""
        if service := self.__dict__.pop("_service", None):
            service.close()
        super().close()

    def agenerate(
        self, prompt: Sequence[int] | npt.NDArray[np.int32] | str,
        sampling: SamplingParams | None = None, max_tokens: int | None = None,
        stop: Sequence[str] = (), **more: Any,
    ) -> AsyncGenerator[GenerationEvent, None]:  # fmt: skip
        """Generate as `generate` does, for asyncio; `EngineConfig.n_seq` answers run at a time.

        Leaving the loop ends the answer, if the generator is closed or its task is cancelled.

        more: fields of `Request`, such as reuse and constraint.

        Raises:
            RequestError, ContextOverflow: the request is wrong.
            QueueFull: too many are waiting.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        sampling = sampling or SamplingParams(temperature=0.0)
        return _events(self._service, Request(ids, sampling, max_tokens, tuple(stop), **more))

    def achat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
        **more: Any,
    ) -> AsyncChatAnswer:  # fmt: skip
        """Answer a conversation as `chat` does, for asyncio: `async for part in engine.achat(...)`.

        messages, tools, more: as in `chat`. Errors: as in `agenerate`.
        """
        prepared = self._chat_model.prepare(ChatRequest(messages=messages, tools=tools, **more))
        return AsyncChatAnswer(_events(self._service, prepared.request), prepared.parser)

    def hidden_states(
        self, tokens: Sequence[int] | npt.NDArray[np.int32], layers: Sequence[int], seq: int = 0
    ) -> dict[int, npt.NDArray[np.float32]]:
        """Compute a prompt that continues a sequence; return outputs of layers, F32 [n, n_embd].

        Raises:
            RequestError: there is no such layer; others as in `prefill`.
        """
        self.ownership.enter_alone()
        ids, n_layer = prompt_ids(tokens, self.hparams.n_vocab), self.hparams.n_layer
        if wrong := [il for il in layers if not 0 <= il < n_layer]:
            raise RequestError(f"there is no layer {wrong[0]}; the model has {n_layer}")
        found: dict[int, list[npt.NDArray[np.float32]]] = {il: [] for il in layers}

        def read_of(il: int) -> Callable[[Tensor, int, int, int], None]:
            def read(hidden: Tensor, row: int, n: int, first: int) -> None:
                for device in self.devices:
                    device.synchronize()
                found[il].append(read_tensor(hidden)[row : row + n])

            return read

        batch = SweepBatch(ids, seq, greedy=True, readers={il: read_of(il) for il in layers})
        self.passes.prompts.run(self.passes.begin_prompts([batch], True), None, lambda: None)
        return {il: np.concatenate(rows) for il, rows in found.items()}

    def watch_routing(self, see: Routing) -> Callable[[], None]:
        """Have `see(il, ids)` called with what each layer's router chose; return what ends that.

        ids: I32 numpy [n_rows, n_expert_used], a copy. It is called on the thread that computes,
        for rows of every pass, and for those of a prompt layer by layer.

        Raises:
            ConfigError: the host does not see the router's choice.
        """
        parts, n_used = self.runner.parts, self.hparams.n_expert_used
        found = [part for part in parts if isinstance(part, LayeredRunner)]
        if len(found) < len(parts):
            raise ConfigError("the router's choice stays on the device; load with mode='layered'")

        def observe(il: int, ids: npt.NDArray[np.int32]) -> None:
            see(il, ids.reshape(-1, n_used).copy())

        for part in found:
            part.observers.append(observe)

        def end() -> None:
            for part in found:
                part.observers.remove(observe)

        return end


async def _events(service: Service, request: Request) -> AsyncGenerator[GenerationEvent, None]:
    """Yield the events of a request; closing it ends the request."""
    loop, steps = asyncio.get_running_loop(), asyncio.Queue[Step]()

    def deliver(step: Step) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(steps.put_nowait, step)

    ticket = service.submit(request, deliver)
    try:
        reason = None
        while reason is None:
            step = await steps.get()
            usage, reason = step.usage, step.finish_reason
            if step.error:
                raise step.error
            n, text = len(step.tokens), step.text
            if not n and not (text or reason):
                continue  # the prompt is being read
            for i, token in enumerate(step.tokens or (None,), 1):
                is_last = i >= n
                yield GenerationEvent(
                    token, text if is_last else "", usage.n_prompt,
                    usage.n_generated - max(n - i, 0), usage.prefill_s, usage.decode_s,
                    reason if is_last else None, None, usage.n_cached, usage.n_read,
                )  # fmt: skip
    finally:
        ticket.cancel()
