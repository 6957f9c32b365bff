"""qwen3moe, whose layers keep no recurrent states: whatever is resident, upstream's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle.client import Step
from regression.compare import assert_logits_equal
from regression.harness import THREADS, Models, Upstream, open_engine, our_logits, random_ids

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, Builder
from moegraph.placement.footprint import needed_bytes

NAME = "qwen3moe"
RESIDENCY: dict[str, dict[str, Any]] = {
    "resident": {},
    "a part": {"mode": "layered", "cache_slots": 40, "policy": "lru", "miss": "stream"},
    "streamed": {"mode": "layered", "cache_slots": 0, "miss": "stream"},
    "on the CPU": {"mode": "layered", "cache_slots": 0, "miss": "cpu"},
}


@pytest.mark.parametrize("settings", RESIDENCY.values(), ids=list(RESIDENCY))
def test_a_prompt_in_any_chunks_has_upstreams_logits(
    settings: dict[str, Any], models: Models, upstream: Upstream
) -> None:
    path = models.path(NAME)
    with open_engine(path, **settings) as engine:
        ids = random_ids(engine.hparams.n_vocab, 150)
        for width in (1, 7, 64, 150):
            steps = [Step(ids[at : at + width]) for at in range(0, len(ids), width)]
            results = upstream.oracle.run(path, steps, n_ctx=1024, threads=THREADS)
            theirs = np.concatenate([r.logits for r in results if r.logits is not None])
            assert_logits_equal(our_logits(engine, ids, width), theirs, f"{width} rows")


@pytest.mark.parametrize("spec", ["off", "lookup"])
@pytest.mark.parametrize("settings", RESIDENCY.values(), ids=list(RESIDENCY))
def test_greedy_text_is_upstreams(
    settings: dict[str, Any], spec: str, models: Models, upstream: Upstream
) -> None:
    path = models.path(NAME)
    with open_engine(path, spec=spec, **settings) as engine:
        prompt = random_ids(engine.hparams.n_vocab, 40) * 3  # repeats itself: look-up drafts
        ((theirs,), _) = upstream.oracle.greedy(path, [prompt], 24, n_ctx=1024, threads=THREADS)
        events = engine.generate(prompt, max_tokens=24, text=False)
        assert [event.token for event in events if event.token is not None] == theirs


def test_what_is_planned_covers_what_is_taken(models: Models) -> None:
    path, config = models.path(NAME), EngineConfig(device="cpu", n_ctx=512)
    with open_model(path) as model:
        assert model.warnings == ()
        hp = model.hparams
        assert (hp.name, hp.n_layer, {hp.layer(il).mixer for il in range(3)}) == (
            NAME, 3, {"attention"},
        )  # fmt: skip
        needed = needed_bytes(model, config, 512)
    with open_engine(path, n_ctx=512) as engine:
        memory = engine.memory()
        assert memory["state_bytes"] == 0
        assert memory["kv_bytes"] == needed.kv


def test_a_layer_without_routed_experts_yet_ends_with_its_residual(models: Models) -> None:
    """On devices that add missing experts later, the layer's output is the residual at first."""
    values = np.arange(24, dtype=np.float32).reshape(3, 8)
    with open_model(models.path(NAME)) as model, Context(16, 16) as context:
        device = Device("cpu")
        b = Builder(context, 16)
        residual = b.leaf(F32, (8, 3), "residual")
        out = model.hparams.layer_end(b, None, residual, residual, None, 0)
        with Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, device.buft)):
            C.ggml_backend_tensor_set(residual, ffi.from_buffer(values), 0, values.nbytes)
            device.check(C.mg_launch(device.compute.ptr, b.graph, ffi.NULL, 0), "the end")
            device.synchronize()
            found = np.empty_like(values)
            C.ggml_backend_tensor_get(out, ffi.from_buffer(found), 0, found.nbytes)
        device.close()
    np.testing.assert_array_equal(found, values)
