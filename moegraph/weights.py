"""Model weights where a device can use them: mapped in place on the CPU, copied once on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ModelFileError
from .ggml.device import Device
from .ggml.handles import Buffer, Context
from .ggml.lib import C, ffi
from .ggml.ops import Tensor
from .modelfile import ModelFile, TensorInfo

Progress = Callable[[str, int, int], None]

# Tensor data in host memory must be aligned for the CPU kernels (ggml's TENSOR_ALIGNMENT).
_HOST_ALIGNMENT = 32
# Large enough for full PCIe speed, small enough that pinning it takes a few milliseconds.
_STAGING_BYTES = 32 << 20
_REMEDY = "lower -c or -ub, choose a smaller quantization, or use --device cpu"


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple that is not below n."""
    return -(-n // multiple) * multiple


class TensorSet:
    """Tensors of a model file on one device, by GGUF name.

    `n_bytes` counts the memory they take there, padding included.
    """

    def __init__(self, context: Context, buffers: Sequence[Buffer], tensors: dict[str, Tensor]) -> None:
        self._context = context
        self._buffers = buffers
        self.tensors = tensors
        self.n_bytes = sum(buffer.size for buffer in buffers)

    def close(self) -> None:
        """Free the memory."""
        for buffer in self._buffers:
            buffer.close()
        self._context.close()


class Loader:
    """Brings tensors of one model file onto one device and reports progress over all of them."""

    def __init__(self, device: Device, model: ModelFile, progress: Progress | None = None) -> None:
        self._device = device
        self._model = model
        self._progress = progress
        self._done = 0
        self._total = sum(info.nbytes for info in model.tensors.values())
        self._staging = None if device.is_cpu else _Staging(device, self._report)

    def _report(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._progress:
            self._progress("load", min(self._done, self._total), self._total)

    def load(self, infos: Iterable[TensorInfo], what: str) -> TensorSet:
        """Make tensors resident.

        Raises:
            OutOfDeviceMemory: they do not fit.
            ModelFileError: the file is shorter than its header says.
        """
        infos = list(infos)
        context = Context(len(infos) + 1)
        tensors = {}
        for info in infos:
            tensor = C.ggml_new_tensor(
                context.ptr, int(info.type), info.n_dims, list(info.ne[: info.n_dims])
            )
            C.ggml_set_name(tensor, info.name.encode())
            tensors[info.name] = tensor
        aligned = all(info.offset % _HOST_ALIGNMENT == 0 for info in infos)
        if self._device.is_cpu and aligned:
            buffers = self._map(infos, tensors)
        else:
            buffers = [self._copy(infos, tensors, what)]
        return TensorSet(context, buffers, tensors)

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
                self._report(info.nbytes)
            buffers.append(buffer)
        return buffers

    def _copy(self, infos: list[TensorInfo], tensors: dict[str, Tensor], what: str) -> Buffer:
        device = self._device
        offsets, size = [], 0
        for info in infos:
            offsets.append(size)
            needed = C.ggml_backend_buft_get_alloc_size(device.buft, tensors[info.name])
            size = round_up(size + needed, device.alignment)
        buffer = device.buffer(size, what, _REMEDY)
        C.ggml_backend_buffer_set_usage(buffer.ptr, C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        for info, offset in zip(infos, offsets):
            # clears the padding behind a quantized row, so it comes before any data
            place(buffer, tensors[info.name], offset)
        for info in infos:
            if self._staging:
                self._staging.send(self._model, info, tensors[info.name])
            else:
                data = self._model.map(info)
                C.ggml_backend_tensor_set(
                    tensors[info.name], ffi.cast("void *", data.ctypes.data), 0, info.nbytes
                )
                self._report(info.nbytes)
        return buffer

    def close(self) -> None:
        """Wait for the copies and free the staging memory."""
        if self._staging:
            self._staging.close()


class _Staging:
    """Two pinned blocks: one is filled from the file while the other goes to the device."""

    def __init__(self, device: Device, report: Callable[[int], None]) -> None:
        self._device = device
        self._report = report
        self._blocks = [device.host_buffer(_STAGING_BYTES) for _ in range(2)]
        self._sent = [device.event() for _ in range(2)]
        self._turn = 0

    def send(self, model: ModelFile, info: TensorInfo, tensor: Tensor) -> None:
        copy = self._device.copy.ptr
        for start in range(0, info.nbytes, _STAGING_BYTES):
            size = min(_STAGING_BYTES, info.nbytes - start)
            block, sent = self._blocks[self._turn], self._sent[self._turn]
            sent.wait()
            model.read(info, block.array[:size], start)
            C.ggml_backend_tensor_set_async(copy, tensor, block.address(), start, size)
            C.ggml_backend_event_record(sent.ptr, copy)
            self._turn = 1 - self._turn
            self._report(size)

    def close(self) -> None:
        self._device.synchronize()
        for handle in (*self._sent, *self._blocks):
            handle.close()


def place(buffer: Buffer, tensor: Tensor, offset: int) -> None:
    """Give a tensor its memory inside a buffer."""
    address = ffi.cast("void *", buffer.base + offset)
    status = C.ggml_backend_tensor_alloc(buffer.ptr, tensor, address)
    if status != C.GGML_STATUS_SUCCESS:
        raise MemoryError(f"ggml refused to place a tensor (status {status})")


class TokenEmbedding:
    """Rows of token_embd.weight as F32, looked up on the host.

    The table (1 GB in F16 for the 35B) is read a row at a time, so it need not take device memory.
    """

    def __init__(self, model: ModelFile) -> None:
        info = model.tensors["token_embd.weight"]
        self.n_embd, self.n_vocab = info.ne[0], info.ne[1]
        self._model = model
        self._data = model.map(info)
        self._row_bytes = info.nbytes // self.n_vocab
        self._base = self._data.ctypes.data
        traits = C.ggml_get_type_traits(int(info.type))
        self._to_float = traits.to_float
        self._is_f32 = self._to_float == ffi.NULL
        if self._is_f32 and info.type.name != "F32":
            raise ModelFileError(f"{model.path}: cannot read embeddings of type {info.type.name}")

    def rows(self, tokens: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
        """Write the embeddings of tokens [n] into out, numpy shape [n, n_embd]."""
        if self._is_f32:
            out[:] = self._data.view(np.float32).reshape(self.n_vocab, self.n_embd)[tokens]
            return
        target = out.ctypes.data
        for i, token in enumerate(tokens.tolist()):
            self._to_float(
                ffi.cast("void *", self._base + token * self._row_bytes),
                ffi.cast("float *", target + i * self.n_embd * 4),
                self.n_embd,
            )


class Weights:
    """Everything but the routed experts, resident: attention, delta net, routers, shared experts, head."""

    def __init__(self, loader: Loader, model: ModelFile) -> None:
        hp = model.hparams
        infos = [info for info in model.tensors.values() if _is_dense(info.name, hp.n_layer)]
        tied = "output.weight" not in model.tensors
        if tied:
            infos.append(model.tensors["token_embd.weight"])
        self._set = loader.load(infos, "the dense weights")
        self.n_bytes = self._set.n_bytes
        tensors = self._set.tensors
        self.output_norm = tensors["output_norm.weight"]
        self.output = tensors["token_embd.weight" if tied else "output.weight"]
        self._layers = [_layer_view(tensors, il) for il in range(hp.n_layer)]
        self.embedding = TokenEmbedding(model)

    def layer(self, il: int) -> dict[str, Any]:
        """Return a layer's tensors by their name behind `blk.N.`, for example `attn_norm.weight`."""
        return self._layers[il]

    def close(self) -> None:
        """Free the weights."""
        self._set.close()


def _is_dense(name: str, n_layer: int) -> bool:
    if name == "token_embd.weight" or "_exps." in name:
        return False
    if name.startswith("blk."):
        return int(name.split(".")[1]) < n_layer  # the blocks behind are MTP, which is not run
    return name in ("output_norm.weight", "output.weight")


def _layer_view(tensors: dict[str, Any], il: int) -> dict[str, Any]:
    prefix = f"blk.{il}."
    return {name[len(prefix):]: t for name, t in tensors.items() if name.startswith(prefix)}
