"""The C library's heap in a process that runs for months: what is freed goes back to the system."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

from ..units import MiB

# glibc's names are M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
# Blocks of this size come from the system and go back to it. Without a fixed size, glibc takes up
# to 32 MiB from the heap of the thread that asks, once such a block was freed; and smaller blocks
# that live longer keep the gaps in use. Arrays of a pass, which come again and again, are smaller.
_BLOCK_BYTES = 8 * MiB


def keep_small() -> None:
    """Keep large blocks out of the heaps, from now on; does nothing without glibc."""
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _BLOCK_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _BLOCK_BYTES)


def give_back() -> None:
    """Free what only cycles hold, and return the free pages of all heaps to the system.

    Takes milliseconds; any thread may call it.
    """
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def settle() -> None:
    """Free what only cycles hold, and have Python not look for cycles among what is left.

    That is the modules and the model. To look at all of them takes a tenth of a second, and so
    Python would also seldom do it for the objects of requests.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
