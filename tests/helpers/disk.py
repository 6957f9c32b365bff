"""A disk that is full, as far as one process can see."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_limit(n_bytes: int) -> Iterator[None]:
    """Refuse to write files beyond n_bytes, with EFBIG: Python ignores the signal for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
