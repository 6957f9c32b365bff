"""Runs a pass in which every named node keeps its value, for tests and for locating faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, OutOfDeviceMemory
from ..ggml.handles import Buffer, Context
from ..ggml.lib import C, ffi
from ..ggml.ops import F16, F32, I32, Builder, Tensor, shape
from ..graphs.head import Results
from ..kinds import Kind
from .base import Runner
from .batch import Batch
from .staged import AnyRunner, StagedRunner
from .whole import build_whole, n_nodes_whole

# Rows of a pass when a sequence is computed again: every node takes memory of its own.
_REPLAY_ROWS = 16
_DTYPES = {F32: np.float32, I32: np.int32, F16: np.float16}


def node_values(runner: AnyRunner, batch: Batch) -> dict[tuple[str, int], npt.NDArray[Any]]:
    """Run one pass as one graph whose tensors share no memory; return named nodes by (name, il).

    With several stages it is one graph for each. Arrays have numpy shapes: ggml's reversed, without
    leading dimensions of 1, but at least two dimensions. On CUDA, a node that is part of another's
    kernel is NaN. KV cache and states advance as in any pass. The states after it are in the
    result under upstream's names conv_state_last and new_state.
    """
    if not all(part.stage.is_full for part in runner.parts):
        raise ConfigError(
            "forward_nodes needs every expert on the device; drop --cache-slots and --vram"
        )
    found: dict[tuple[str, int], npt.NDArray[Any]] = {}
    for i, part in enumerate(runner.parts):
        if isinstance(runner, StagedRunner) and i:
            runner.hand_over(i, batch.tokens.size)
        found |= _nodes_of(part, batch)
    return found


def _nodes_of(runner: Runner, batch: Batch) -> dict[tuple[str, int], npt.NDArray[Any]]:
    """Run a pass over one stage, whose rows are there; see `node_values`."""
    device, stage = runner.device, runner.stage
    at = runner.shapes.of(batch)
    n_nodes = n_nodes_whole(stage)
    with Context(4 * n_nodes, 2 * n_nodes) as context:
        builder = Builder(context, n_nodes)
        build_whole(builder, stage, runner._inputs, runner.hidden, at, Results.ARGMAX)
        if device.is_invariant:
            C.moegraph_keep_rows_apart(builder.graph)
        raw = C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, device.buft)
        if raw == ffi.NULL:
            raise OutOfDeviceMemory(
                f"{device.name} cannot hold every node of a pass; use fewer rows"
            )
        with Buffer(raw, device.compute):
            C.ggml_backend_buffer_clear(raw, 0xFF)
            runner.fill(batch, at)
            device.check(C.mg_launch(device.compute.ptr, builder.graph, ffi.NULL, 0), "a pass")
            device.synchronize()
            runner.advance(batch)
            found = {key: read_tensor(tensor) for key, tensor in builder.named.items()}
    rows = list(batch.slots)
    for il, tensors in stage.state.layer_states.items():
        for (name, ne), tensor in zip(stage.hp.layer(il).states, tensors):
            found[name, il] = _squeezed(read_tensor(tensor)[rows].reshape(-1, *reversed(ne)))
    return found


def first_bad_place(runner: AnyRunner, tokens: list[int], seq: int) -> str | None:
    """Compute a sequence again; return where the first value that is not finite appears.

    None if all values are finite this time.
    """
    for part in runner.parts:
        part.device.synchronize()
    runner.sequences.reset(seq)
    for start in range(0, len(tokens), _REPLAY_ROWS):
        rows = np.array([tokens[start : start + _REPLAY_ROWS]], dtype=np.int32)
        nodes = node_values(runner, Batch(rows, (seq,), Kind.PREFILL, all_rows=True))
        for il in range(runner.hp.n_layer):
            if not np.isfinite(nodes["l_out", il]).all():
                return f"the output of layer {il}"
        if not np.isfinite(nodes["result_output", -1]).all():
            return "the output head"
    return None


def read_tensor(tensor: Tensor) -> npt.NDArray[Any]:
    """Copy a tensor to a contiguous array, numpy shape as in `node_values`; the device is idle.

    F32, F16 and I32 keep their type; other types come as raw bytes U8.
    """
    n_bytes = C.ggml_nbytes(tensor)
    raw = np.empty(n_bytes, dtype=np.uint8)
    C.ggml_backend_tensor_get(tensor, ffi.from_buffer(raw), 0, n_bytes)
    if tensor.type not in _DTYPES:
        return raw
    flat = raw.view(_DTYPES[tensor.type])
    ne, nb = shape(tensor), [tensor.nb[i] for i in range(4)]
    return np.array(_squeezed(np.lib.stride_tricks.as_strided(flat, ne[::-1], nb[::-1])))


def _squeezed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Drop leading dimensions of 1, but keep two dimensions."""
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    return array
