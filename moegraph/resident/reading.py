"""Reads a model file with several threads, straight into the memory where the bytes belong."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..arch import ModelFile
from ..gguf import TensorInfo
from ..threads import usable_cpus
from .layout import Packing

if TYPE_CHECKING:
    from typing_extensions import Self

# More threads do not copy faster out of the page cache than memory can be written.
_MAX_THREADS = 16
# A thread reads about this many bytes at a time: large enough that Python's part does not show, and
# small enough that the last pieces end together.
PIECE_BYTES = 8 << 20


class Readers:
    """Threads that read one model file; a context manager.

    The memory that they read into must live until `close` returns.
    """

    def __init__(self, model: ModelFile) -> None:
        self._model = model
        n_threads = min(_MAX_THREADS, usable_cpus())
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="moegraph-read")

    def read(self, info: TensorInfo, out: npt.NDArray[np.uint8], start: int) -> Future[None]:
        """Begin what `ModelFile.read` does; the result has its errors."""
        return self._pool.submit(self._model.read, info, out, start)

    def read_experts(
        self, infos: Mapping[str, TensorInfo], packing: Packing, out: npt.NDArray[np.uint8]
    ) -> list[Future[None]]:
        """Begin to read all experts of a layer.

        infos: the layer's stacks, by part. out: uint8 [n_expert, packing.stride], numpy shape.
        """
        begun = []
        for part, info in infos.items():
            at, size = packing.offsets[part], packing.sizes[part]
            rows, step = out[:, at : at + size], max(1, PIECE_BYTES // size)
            begun += [
                self.read(info, rows[first : first + step], first * size)
                for first in range(0, len(out), step)
            ]
        return begun

    def close(self) -> None:
        """Drop what has not begun, and wait for the rest."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
