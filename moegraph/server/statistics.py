"""The extension field of answers: what the engine did while a request ran."""

from __future__ import annotations

from typing import Any

from ..loop.requests import Usage
from .backend import Backend


class Statistics:
    """Compares the engine's statistics at the start and at the end of a request.

    They count the work for all requests of that time.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._before = self._experts()

    def _experts(self) -> Any:
        loaded = self._backend.peek()
        return None if loaded is None else loaded.service.status().experts

    def report(self, usage: Usage) -> dict[str, Any]:
        """Return what this request cost beyond OpenAI's fields; durations in milliseconds."""
        now, before = self._experts(), self._before
        experts = None if now is None or before is None else now.since(before).report()
        return {
            "queued_ms": round(usage.queued_s * 1e3, 3),
            "cached_tokens": usage.n_cached,
            "drafted_tokens": usage.n_drafted,
            "accepted_tokens": usage.n_accepted,
            "experts": experts,
        }
