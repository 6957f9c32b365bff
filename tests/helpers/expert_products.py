"""mul_mat_id with absent and repeated ids on any device, judged against float64 row by row."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, I32, Builder

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.blocks import TYPES

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Choice = Callable[[np.random.Generator, int], Ids]

N_IN, N_OUT, N_EXPERT, N_USED = 512, 96, 12, 8
N_FEW = 3  # experts of a stack smaller than N_USED
ABSENT = np.array([-1, -5, -(2**31), N_EXPERT, N_EXPERT + 9, 2**31 - 1], np.int32)
FLOATS = ("F32", "F16", "BF16")
QUANTIZED = (
    "Q4_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip

# Relative squared error of one row: float weights round the activations at most to their own type
# (on CUDA F32 means TF32), quantized weights meet activations of 8 bits.
LIMITS = {"F32": 1e-6, "F16": 1e-6, "BF16": 1e-4}
# Up to 6.6e-4 on an H200 with unique ids (Q4_K, 200 rows); a wrong row is off by 1 or more.
LIMIT_QUANTIZED = 2e-3


def unique(rng: np.random.Generator, n_tokens: int) -> Ids:
    rows = [rng.permutation(N_EXPERT)[:N_USED] for _ in range(n_tokens)]
    return np.array(rows, np.int32)


def some_absent(rng: np.random.Generator, n_tokens: int) -> Ids:
    ids = unique(rng, n_tokens)
    return np.where(rng.random(ids.shape) < 0.4, rng.choice(ABSENT, ids.shape), ids)


def all_absent(rng: np.random.Generator, n_tokens: int) -> Ids:
    return rng.choice(ABSENT, (n_tokens, N_USED))


def all_equal(rng: np.random.Generator, n_tokens: int) -> Ids:
    return np.full((n_tokens, N_USED), rng.integers(N_EXPERT), np.int32)


def repeated(rng: np.random.Generator, n_tokens: int) -> Ids:
    return rng.integers(0, N_EXPERT, (n_tokens, N_USED), np.int32)


def skewed(rng: np.random.Generator, n_tokens: int) -> Ids:
    ids = np.where(rng.random((n_tokens, N_USED)) < 0.5, 3, repeated(rng, n_tokens))
    return np.where(rng.random(ids.shape) < 0.1, -1, ids).astype(np.int32)


def few_experts(rng: np.random.Generator, n_tokens: int) -> Ids:
    """Ids for a stack of N_FEW: some are absent below, some behind it."""
    return rng.integers(-1, N_FEW + 1, (n_tokens, N_USED), np.int32)


CHOICES: tuple[Choice, ...] = (
    unique, some_absent, all_absent, all_equal, repeated, skewed, few_experts,
)  # fmt: skip


def stack(kind: str, n_expert: int) -> tuple[bytes, npt.NDArray[np.float64]]:
    """Return valid random weights as bytes and dequantized: [n_expert, N_OUT, N_IN]."""
    block = TYPES[kind]
    n_blocks = n_expert * N_OUT * N_IN // block.n_elem
    raw = block.fill(np.random.default_rng(block.ggml_id), n_blocks, 0.5)
    values = quants.dequantize(raw.reshape(-1, block.row_bytes(N_IN)), GGMLQuantizationType[kind])
    return raw.tobytes(), values.reshape(n_expert, N_OUT, N_IN).astype(np.float64)


def compute(device: Device, kind: str, weights: bytes, x: Floats, ids: Ids) -> Floats:
    """Run mul_mat_id over x [n_tokens, 1 or N_USED, N_IN]: [n_tokens, N_USED, N_OUT]."""
    n_tokens, n_rows, _ = x.shape
    n_expert = len(weights) // (N_OUT * TYPES[kind].row_bytes(N_IN))
    result = np.full((n_tokens, N_USED, N_OUT), np.nan, np.float32)
    with Context(8, 8) as context:
        build = Builder(context, 8)
        experts = build.leaf(TYPES[kind].ggml_id, (N_IN, N_OUT, n_expert), "experts")
        rows = build.leaf(F32, (N_IN, n_rows, n_tokens), "x")
        chosen = build.leaf(I32, (N_USED, n_tokens), "ids")
        out = build.expand(build.mul_mat_id(experts, rows, chosen))
        inputs = ((experts, weights), (rows, x.tobytes()), (chosen, ids.tobytes()))
        with Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, device.buft)):
            for tensor, data in (*inputs, (out, result.tobytes())):
                C.ggml_backend_tensor_set(tensor, data, 0, len(data))
            device.check(C.mg_launch(device.compute.ptr, build.graph, ffi.NULL, 0), "mul_mat_id")
            device.synchronize()
            C.ggml_backend_tensor_get(out, ffi.from_buffer(result), 0, result.nbytes)
    return result


def check_products(device: Device, kind: str, choose: Choice, n_tokens: int, n_rows: int) -> None:
    """Assert that rows are right and those of absent ids zero; n_rows of x a token: 1 or N_USED."""
    rng = np.random.default_rng([n_tokens, n_rows])
    n_expert = N_FEW if choose is few_experts else N_EXPERT
    weights, values = stack(kind, n_expert)
    limit = LIMITS.get(kind, LIMIT_QUANTIZED)
    ids = choose(rng, n_tokens)
    x = rng.standard_normal((n_tokens, n_rows, N_IN)).astype(np.float32)
    y = compute(device, kind, weights, x, ids)
    for token, slot in np.ndindex(ids.shape):
        where = f"{n_tokens} tokens, {n_rows} rows each: token {token} slot {slot}"
        row, expert = y[token, slot], ids[token, slot]
        if not 0 <= expert < n_expert:
            assert not row.any(), f"{where}: the row of absent id {expert} is not zero"
            continue
        exact = values[expert] @ x[token, slot % n_rows].astype(np.float64)
        error = np.sum((row - exact) ** 2) / np.sum(exact**2)
        assert error < limit, f"{where} id {expert}: relative squared error {error}"
