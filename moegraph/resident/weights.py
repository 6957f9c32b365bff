"""Loads weights: the CPU uses them in the mapped file, CUDA gets a copy, read by all cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arch import ModelFile
from ..errors import ModelFileError
from ..events import Progress
from ..ggml.device import Device
from ..ggml.handles import Buffer, Context, Owner
from ..ggml.lib import C, cpu_converter, ffi
from ..ggml.memory import place
from ..ggml.ops import Tensor
from ..gguf import TensorInfo
from ..gguf.tensorfile import TensorFile
from ..threads import usable_cpus
from ..units import round_up
from .layout import HEAD, is_dense

# More threads do not copy faster out of the page cache than memory can be written.
_MAX_THREADS = 16
# A thread reads about this many bytes at a time: large enough that Python's part does not show, and
# small enough that the last pieces end together.
PIECE_BYTES = 8 << 20


class Readers:
    """Threads that read one model file.

    The memory that they read into must live until `close` returns.
    """

    def __init__(self, model: ModelFile) -> None:
        self._model = model
        n_threads = min(_MAX_THREADS, usable_cpus())
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="moegraph-read")

    def read(self, info: TensorInfo, out: npt.NDArray[np.uint8], start: int) -> Future[None]:
        """Begin what `ModelFile.read` does; the result has its errors."""
        return self._pool.submit(self._model.read, info, out, start)

    def close(self) -> None:
        """Drop what has not begun, and wait for the rest."""
        self._pool.shutdown(wait=True, cancel_futures=True)


# Tensor data in host memory must be aligned for the CPU kernels (ggml's TENSOR_ALIGNMENT).
_HOST_ALIGNMENT = 32
# Blocks for pieces of a file: one for each thread that reads, the others are being sent.
_N_READING = 16
_N_BLOCKS = 20
_REMEDY = "lower -c or -ub, choose a smaller quantization, or use --device cpu"


@dataclass(eq=False)
class TensorSet(Owner):
    """Tensors of a model file on one device.

    tensors: by GGUF name. joined: groups of adjacent matrices, each as one matrix of all their
    rows. n_bytes: their device memory, padding included; for a mapped file, their bytes in it.
    """

    tensors: dict[str, Tensor]
    joined: dict[tuple[str, ...], Tensor]
    n_bytes: int


class Loader(Owner):
    """Loads tensors of one model file onto one device; reports progress in bytes of all tensors.

    in_place: the names of the tensors that stay in the mapped file.
    """

    def __init__(self, device: Device, model: ModelFile, progress: Progress | None = None) -> None:
        self._device = device
        self._model = model
        self._progress = progress
        self._done = 0
        self.in_place: frozenset[str] = frozenset()
        self._total = sum(info.nbytes for info in model.tensors.values())
        self._staging: _Staging | None = None
        if device.can.own_memory:  # closing it ends the copies that were begun
            self._staging = self.own(_Staging(device, model, self.report))

    def report(self, n_bytes: int) -> None:
        """Count bytes of the file that were read, also by others than this loader."""
        self._done += n_bytes
        if self._progress:
            self._progress("load", min(self._done, self._total), self._total)

    def load(
        self, infos: Iterable[TensorInfo], what: str, join: Sequence[tuple[str, ...]] = ()
    ) -> TensorSet:
        """Load tensors onto the device; their bytes are there once the loader is closed.

        what: what they are, for error messages. join: groups of matrices of the same type and input
        width to place next to each other; ignored for a mapped file, which has its own order.
        """
        infos = list(infos)
        aligned = all(info.offset % _HOST_ALIGNMENT == 0 for info in infos)
        in_place = not self._device.can.own_memory and aligned
        if in_place or self._device.is_invariant:  # joined, sums would be divided otherwise
            join = ()
        context = Context(len(infos) + len(join) + 1)
        tensors = {info.name: new_tensor(context, info.name, info) for info in infos}
        joined = {names: _join(context, [tensors[name] for name in names]) for names in join}
        if in_place:
            # the spans of different sets overlap in the file
            buffers, n_bytes = self._map(infos, tensors), sum(info.nbytes for info in infos)
            self.in_place |= tensors.keys()
        else:
            buffers = [self._copy(infos, tensors, joined, what)]
            n_bytes = buffers[0].size
        found = TensorSet(tensors, joined, n_bytes)
        for part in (context, *buffers):
            found.own(part)
        return found

    def _map(self, infos: list[TensorInfo], tensors: dict[str, Tensor]) -> list[Buffer]:
        buffers = []
        for part in sorted({info.part for info in infos}):
            spans = [
                (self._model.map(info).ctypes.data, info) for info in infos if info.part == part
            ]
            start = min(address for address, _ in spans)
            end = max(address + info.nbytes for address, info in spans)
            raw = C.ggml_backend_cpu_buffer_from_ptr(ffi.cast("void *", start), end - start)
            buffer = Buffer(raw, self._model)
            C.ggml_backend_buffer_set_usage(raw, C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
            for address, info in spans:
                place(buffer, tensors[info.name], address - buffer.base)
                self.report(info.nbytes)
            buffers.append(buffer)
        return buffers

    def _copy(
        self, infos: list[TensorInfo], tensors: dict[str, Tensor],
        joined: dict[tuple[str, ...], Tensor], what: str,
    ) -> Buffer:  # fmt: skip
        device = self._device
        inside = {name for names in joined for name in names}
        blocks = [([info.name], tensors[info.name]) for info in infos if info.name not in inside]
        blocks += [(list(names), tensor) for names, tensor in joined.items()]
        offsets, size = [], 0
        for _, tensor in blocks:
            offsets.append(size)
            needed = C.ggml_backend_buft_get_alloc_size(device.buft, tensor)
            size = round_up(size + needed, device.alignment)
        buffer = device.buffer(size, what, _REMEDY)
        C.ggml_backend_buffer_set_usage(buffer.ptr, C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        # place all before copying any data: placing clears the padding after a tensor
        for (names, tensor), offset in zip(blocks, offsets):
            if len(names) > 1:
                place(buffer, tensor, offset)
            for name in names:
                place(buffer, tensors[name], offset)
                offset += C.ggml_nbytes(tensors[name])
        for info in infos:
            if self._staging:
                self._staging.send(info, tensors[info.name])
            else:
                data = self._model.map(info)
                C.ggml_backend_tensor_set(
                    tensors[info.name], ffi.cast("void *", data.ctypes.data), 0, info.nbytes
                )
                self.report(info.nbytes)
        return buffer


def new_tensor(context: Context, name: str, info: TensorInfo) -> Tensor:
    """Make a tensor of the type and shape that a file has."""
    ne = list(info.ne[: info.n_dims])
    tensor = C.ggml_new_tensor(context.ptr, int(info.type), info.n_dims, ne)
    C.ggml_set_name(tensor, name.encode())
    return tensor


def _join(context: Context, parts: list[Tensor]) -> Tensor:
    """Return a matrix [ne0, rows of all parts]."""
    rows = sum(part.ne[1] for part in parts)
    return C.ggml_new_tensor_2d(context.ptr, parts[0].type, parts[0].ne[0], rows)


class _Staging(Owner):
    """Blocks of pinned memory: threads fill some from the file while others go to the device."""

    def __init__(self, device: Device, model: ModelFile, report: Callable[[int], None]) -> None:
        self._device, self._report = device, report
        self._memory = self.own(device.transfer_memory(_N_BLOCKS * PIECE_BYTES))
        self._sent = [self.own(device.event()) for _ in range(_N_BLOCKS)]
        self._readers = Readers(model)
        # what is being read, in order: the tensor, its first byte, their number, and the block
        self._begun: deque[tuple[Tensor, int, int, int, Future[None]]] = deque()
        self._turn = 0

    def send(self, info: TensorInfo, tensor: Tensor) -> None:
        """Begin to copy a tensor's bytes to the device; `close` waits for the end."""
        for start in range(0, info.nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, info.nbytes - start)
            if len(self._begun) == _N_READING:
                self._upload()
            at, sent = self._turn * PIECE_BYTES, self._sent[self._turn]
            if sent:
                sent.wait()
            read = self._readers.read(info, self._memory.array[at : at + size], start)
            self._begun.append((tensor, start, size, self._turn, read))
            self._turn = (self._turn + 1) % _N_BLOCKS

    def _upload(self) -> None:
        tensor, start, size, turn, read = self._begun.popleft()
        try:
            read.result()
        except BaseException:
            self._begun.clear()  # nothing more is sent
            raise
        upload, sent = self._device.upload.ptr, self._sent[turn]
        data = self._memory.address(turn * PIECE_BYTES)
        C.ggml_backend_tensor_set_async(upload, tensor, data, start, size)
        if sent:
            C.ggml_backend_event_record(sent.ptr, upload)
        self._report(size)

    def close(self) -> None:
        """Send what is being read, wait, and free the blocks."""
        try:
            while self._begun:
                self._upload()
        finally:
            self._readers.close()
            self._device.synchronize()
            super().close()


class TokenEmbedding:
    """Rows of token_embd.weight as F32, times a scale, read on the host.

    A pass needs only a few rows, so the table (1 GB in F16 for the 35B) takes no device memory.
    """

    def __init__(
        self, file: TensorFile, tensors: Mapping[str, TensorInfo], scale: float = 1.0
    ) -> None:
        self._scale = np.float32(scale)
        info = tensors["token_embd.weight"]
        self.name = info.name
        self.n_embd, self.n_vocab = info.ne[0], info.ne[1]
        self._data = file.map(info)
        self._row_bytes = info.nbytes // self.n_vocab
        self._table = ffi.cast("void *", self._data.ctypes.data)
        traits = C.ggml_get_type_traits(int(info.type))
        # what the CPU backend has for F16 takes a third of the time
        is_f16 = info.type.name == "F16"
        self._to_float = cpu_converter("ggml_cpu_fp16_to_fp32") if is_f16 else traits.to_float
        self._is_f32 = self._to_float == ffi.NULL
        if self._is_f32 and info.type.name != "F32":
            raise ModelFileError(f"{file.path}: cannot read embeddings of type {info.type.name}")

    def rows(self, tokens: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
        """Write the embeddings of tokens [n] into out, F32, numpy shape [n, n_embd]."""
        if self._is_f32:
            table = self._data.view(np.float32).reshape(self.n_vocab, self.n_embd)
            out[:] = table[tokens] * self._scale
            return
        chosen = np.ascontiguousarray(tokens, dtype=np.int32)
        C.mg_rows_to_float(
            self._to_float, self._table, self._row_bytes,
            ffi.from_buffer("int32_t *", chosen), len(chosen), self.n_embd,
            ffi.from_buffer("float *", out),
        )  # fmt: skip
        if self._scale != 1.0:
            out *= self._scale


@dataclass(frozen=True)
class HeadWeights:
    """norm: F32 [n_embd]. output: the matrix [n_embd, n_vocab]. softcap: of logits, 0 for none."""

    norm: Tensor
    output: Tensor
    softcap: float = 0.0


class Weights(Owner):
    """All weights of some layers except routed experts: attention, DeltaNet, routers, shared ones.

    head: with the last layer, else None. embedding: with the first layer, else None.
    """

    def __init__(self, loader: Loader, model: ModelFile, layers: range) -> None:
        has_head = layers.stop == model.hparams.n_layer
        dense = [info for info in model.tensors.values() if is_dense(info.name, layers)]
        infos = [info for info in dense if has_head or info.name not in HEAD]
        tied = "output.weight" not in model.tensors
        if tied and has_head:
            infos.append(model.tensors["token_embd.weight"])
        join = [group for il in layers for group in _groups(model, il)]
        found = self.own(loader.load(infos, "the dense weights", join))
        self.n_bytes = found.n_bytes
        self._layers = {il: LayerWeights(found, il) for il in layers}
        scale = model.hparams.embedding_scale
        self.embedding = None if layers.start else TokenEmbedding(model, model.tensors, scale)
        self.head: HeadWeights | None = None
        if has_head:
            tensors = found.tensors
            output = tensors["token_embd.weight" if tied else "output.weight"]
            norm = tensors["output_norm.weight"]
            self.head = HeadWeights(norm, output, model.hparams.logit_softcap)

    def layer(self, il: int) -> LayerWeights:
        """Return the tensors of a layer."""
        return self._layers[il]


class LayerWeights(dict[str, Tensor]):
    """A layer's tensors by their name after `blk.N.`, for example `attn_norm.weight`.

    Those of no layer are among them by their own names. joined: matrices with the same input,
    joined into one, by the names of the parts.
    """

    def __init__(self, source: TensorSet, il: int) -> None:
        prefix = f"blk.{il}."
        n = len(prefix)
        own = (k for k in source.tensors if k.startswith(prefix) or not k.startswith("blk."))
        super().__init__({k.removeprefix(prefix): source.tensors[k] for k in own})
        self.joined: dict[tuple[str, ...], Tensor] = {
            tuple(name[n:] for name in names): tensor
            for names, tensor in source.joined.items()
            if names[0].startswith(prefix)
        }


def _groups(model: ModelFile, il: int) -> list[tuple[str, ...]]:
    """Return the groups of a layer's projections that have the same type.

    For one row, one product with all of them saves up to three launches and as many quantizations
    of that vector.
    """
    groups = []
    for names in model.hparams.same_input:
        by_type: dict[object, list[str]] = {}
        for name in (f"blk.{il}.{name}" for name in names):
            if name in model.tensors:
                by_type.setdefault(model.tensors[name].type, []).append(name)
        groups += [tuple(same) for same in by_type.values() if len(same) > 1]
    return groups
