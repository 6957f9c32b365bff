"""The weights of a drafter on a device; and rows of an output matrix, for part of the vocabulary.

A drafter spends most of its time on the output matrix. A draft over fewer tokens is faster, and
where the target draws one of the others, the draft is wrong there, but never the text.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

from ..arch import ModelFile
from ..arch.dflash import DFlashHParams
from ..arch.draftfile import DraftFile
from ..errors import UnsupportedModel
from ..ggml.device import Device
from ..ggml.handles import Owner
from ..ggml.lib import C, ffi
from ..ggml.memory import Block
from ..ggml.ops import I32, Tensor
from ..gguf import TensorInfo
from .draftlayout import EMBEDDING, PlannedTensor, plan_tensors
from .kvpool import runs_of
from .weights import TokenEmbedding

_Q = GGMLQuantizationType
# Elements that are converted at a time, and threads that convert.
_PIECE, _N_THREADS = 1 << 22, 8


class DraftWeights(Owner):
    """The weights of a DFlash or DSpark drafter.

    BF16 matrices become Q8_0, which halves the bytes that a draft reads, unless as_stored.

    fc: the part of the fusing matrix for each target layer, [n_embd, n_embd]. layers: by name
    after `blk.N.`. output: the drafter's own head [n_embd, n_vocab_draft], or None if it uses the
    target's. embedding: its own, or None. n_bytes: device memory.
    """

    def __init__(self, device: Device, file: DraftFile, as_stored: bool = False) -> None:
        """Load the weights of a file whose tensors were checked (`DraftFile.require_target`)."""
        hp: DFlashHParams = file.hparams
        planned = list(plan_tensors(file, as_stored))
        # others first: a look-up of -1, the argmax of NaN, must find something before the table
        planned.sort(key=lambda p: p.name.startswith("markov"))
        shapes = {p.name: (*p.ne, int(p.type)) for p in planned}
        block = self.own(Block(device, shapes, "the drafter's weights", "use --spec off"))
        C.ggml_backend_buffer_set_usage(block.buffer.ptr, C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        self.tensors: dict[str, Tensor] = block.tensors
        self.n_bytes = block.n_bytes
        _send(file, planned, self.tensors)
        self.fc = [self.tensors[f"fc.{k}"] for k in range(len(hp.target_layers))]
        self.layers = [self._layer(il) for il in range(hp.n_layer)]
        self.output = self.tensors.get("output.weight") or self.tensors.get(EMBEDDING)
        self.embedding: TokenEmbedding | None = None
        if EMBEDDING in file.tensors:
            self.embedding = TokenEmbedding(file.source, file.tensors)

    def _layer(self, il: int) -> dict[str, Tensor]:
        prefix = f"blk.{il}."
        return {k[len(prefix) :]: t for k, t in self.tensors.items() if k.startswith(prefix)}


def _send(file: DraftFile, planned: list[PlannedTensor], tensors: dict[str, Tensor]) -> None:
    """Read, convert and upload all tensors; threads convert a few pieces ahead of the upload."""
    pieces = [
        (p, row, min(max(1, _PIECE // p.source.ne[0]), p.ne[1] - row))
        for p in planned
        for row in range(0, p.ne[1], max(1, _PIECE // p.source.ne[0]))
    ]
    with ThreadPoolExecutor(_N_THREADS, thread_name_prefix="moegraph-draft") as pool:
        begun: deque[Future[npt.NDArray[np.uint8]]] = deque()
        for i, (p, row, _) in enumerate(pieces):
            for piece in pieces[i + len(begun) : i + 2 * _N_THREADS]:
                begun.append(pool.submit(_rows, file, *piece))
            raw = begun.popleft().result()
            data = ffi.from_buffer(raw)
            C.ggml_backend_tensor_set(tensors[p.name], data, row * p.row_bytes, raw.nbytes)


def _rows(file: DraftFile, p: PlannedTensor, row: int, n: int) -> npt.NDArray[np.uint8]:
    """Return n rows as they will be on the device, U8 numpy [n, row_bytes]."""
    block, size = GGML_QUANT_SIZES[p.source.type]
    raw = np.empty((n, p.source.ne[0] // block * size), np.uint8)
    file.source.read(p.source, raw.reshape(-1), row * raw.shape[1])
    first, last = (column // block * size for column in (p.first, p.first + p.ne[0]))
    cut = np.ascontiguousarray(raw[:, first:last])
    if p.type is p.source.type:
        return cut
    wide = _as_f32(cut, p.source)
    return wide.view(np.uint8) if p.type is _Q.F32 else np.ascontiguousarray(quantize(wide, p.type))


def _as_f32(raw: npt.NDArray[np.uint8], info: TensorInfo) -> npt.NDArray[np.float32]:
    if info.type is _Q.BF16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if info.type is _Q.F16:
        return raw.view(np.float16).astype(np.float32)
    raise UnsupportedModel(f"tensor {info.name}: moegraph reads BF16, F16 and F32 here")


class DraftHead(Owner):
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
        shapes = {
            "output": (info.ne[0], n, int(info.type)),
            "zeros": (device.alignment // 4, 1),  # on CUDA, the argmax of NaN is -1
            "table": (1, n, I32),
        }
        block = self.own(Block(device, shapes, f"a draft head of {n} tokens", "lower it"))
        C.ggml_backend_buffer_set_usage(block.buffer.ptr, C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        self.output: Tensor = block.tensors["output"]
        self.table: Tensor = block.tensors["table"]
        self.n_bytes = block.n_bytes
        block.set("table", ids.astype(np.int32))
        for at, first, m in runs_of(ids):
            rows = np.empty(m * row_bytes, dtype=np.uint8)
            model.read(info, rows, first * row_bytes)
            block.set("output", rows, at * row_bytes)
