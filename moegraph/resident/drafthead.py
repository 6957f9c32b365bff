"""Some rows of an output matrix, for drafts over a part of the vocabulary.

A drafter spends most of its time on the output matrix. A draft over fewer tokens is faster, and
where the target draws one of the others, the draft is wrong there, but never the text.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arch import ModelFile
from ..ggml.device import Device
from ..ggml.handles import Context
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import I32, Tensor
from ..gguf import TensorInfo
from ..units import round_up


class DraftHead:
    """The rows of an output matrix for some tokens, on a device.

    ids: I32 numpy [n], ascending: the tokens. output: [n_embd, n], in the type of the file. table:
    I32 [1, n] on the device, row -> token. n_bytes: device memory.
    """

    def __init__(
        self, device: Device, model: ModelFile, info: TensorInfo, ids: npt.NDArray[np.int32]
    ) -> None:
        """Copy rows; info: the matrix [n_embd, n_vocab] in the file."""
        self.ids = ids
        row_bytes, n = info.nbytes // info.ne[1], len(ids)
        self._context = Context(2)
        self.output: Tensor = C.ggml_new_tensor_2d(self._context.ptr, int(info.type), info.ne[0], n)
        self.table: Tensor = C.ggml_new_tensor_2d(self._context.ptr, I32, 1, n)
        needed = C.ggml_backend_buft_get_alloc_size(device.buft, self.output)
        # a word of zeros before the table: on CUDA, the argmax of NaN is -1
        at = round_up(needed, device.alignment) + device.alignment
        self.n_bytes = at + 4 * n
        self._buffer = device.buffer(self.n_bytes, f"a draft head of {n} tokens", "lower it")
        C.ggml_backend_buffer_set_usage(
            self._buffer.ptr, C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS
        )  # fmt: skip
        C.ggml_backend_buffer_clear(self._buffer.ptr, 0)
        place(self._buffer, self.output, 0)
        place(self._buffer, self.table, at)
        ordered = np.ascontiguousarray(ids, dtype=np.int32)
        C.ggml_backend_tensor_set(self.table, ffi.from_buffer(ordered), 0, ordered.nbytes)
        # ids that follow one another are one piece of the file
        starts = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), n]):
            rows = np.empty((end - start) * row_bytes, dtype=np.uint8)
            model.read(info, rows, int(ids[start]) * row_bytes)
            C.ggml_backend_tensor_set(
                self.output, ffi.from_buffer(rows), start * row_bytes, rows.nbytes
            )

    def close(self) -> None:
        """Free the memory."""
        self._buffer.close()
        self._context.close()
