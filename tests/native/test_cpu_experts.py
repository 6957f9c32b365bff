"""Cold experts of a model file: our kernel and ggml's graph agree in every bit."""

from __future__ import annotations

import numpy as np
import pytest

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.ggml.device import Device
from moegraph.resident.stage import open_stage
from moegraph.runner.cpu_experts import CpuExperts, GraphCpuExperts, KernelCpuExperts

MAX_ROWS = 4
PRESETS = ["legacy32", "kquant40", "iq64", "mxfp256", "float32", "mini35b"]


def floats(cpu_experts: CpuExperts, name: str) -> np.ndarray:
    """Return host memory from x, weights or y on."""
    return cpu_experts._host.array[cpu_experts._offsets[name] :].view(np.float32)


@pytest.mark.parametrize("preset", PRESETS)
def test_kernel_and_graph_agree_on_every_layer(model_path, no_leak, preset):
    rng = np.random.default_rng(2)
    with open_model(model_path(preset)) as model:
        hp, config = model.hparams, EngineConfig(device="cpu")
        k, layers, n_slots = hp.n_expert_used, range(hp.n_layer), [0] * hp.n_layer
        stage = open_stage(Device("cpu", 1), model, layers, n_slots, config, n_ctx=256)
        own = KernelCpuExperts(stage, 2, MAX_ROWS)
        graph = GraphCpuExperts(stage, MAX_ROWS)
        for il in layers:
            for n_rows in (1, MAX_ROWS):
                ids = np.concatenate([rng.permutation(hp.n_expert)[:k] for _ in range(n_rows)])
                ids = ids.astype(np.int32)
                missing = rng.choice(np.unique(ids), min(5, np.unique(ids).size), replace=False)
                x = rng.standard_normal(hp.n_embd * n_rows)
                weights = rng.uniform(0, 0.4, k * n_rows).astype(np.float32)
                for cpu_experts in (own, graph):
                    floats(cpu_experts, "x")[: x.size] = x
                    floats(cpu_experts, "weights")[: weights.size] = weights
                    cpu_experts.compute(il, ids, missing.tolist(), n_rows)
                rows = floats(graph, "y")[: k * n_rows * hp.n_embd].reshape(n_rows, k, -1)
                expected = rows[:, 0].copy()
                for i in range(1, k):
                    expected += rows[:, i]
                got = floats(own, "y")[: n_rows * hp.n_embd].reshape(n_rows, -1)
                np.testing.assert_array_equal(got, expected, err_msg=f"layer {il}, {n_rows} rows")
                assert got.any()
        assert 0 < own.measure(2) < 1
        for part in (own, graph, stage):
            part.close()
