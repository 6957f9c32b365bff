"""How long tests wait for what must come: so long that only a hang makes it fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

# A busy machine may stop a process for seconds, anywhere.
PATIENCE_S = 120.0


def until(is_so: Callable[[], Any], pause_s: float = 0.001) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, "it never was so"
        time.sleep(pause_s)


async def until_so(is_so: Callable[[], Any], pause_s: float = 0.005) -> None:
    """Wait until something is so, while other tasks run."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, "it never was so"
        await asyncio.sleep(pause_s)
