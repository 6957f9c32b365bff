"""What a model needs of a device beside its weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from moegraph.arch import ModelFile, open_model
from moegraph.config import EngineConfig
from moegraph.placement import footprint
from moegraph.placement.footprint import (
    ENCODER_BYTES,
    captured_graphs,
    context_within,
    needed_bytes,
    sweep_rows,
)

TINY = Path(__file__).resolve().parents[2] / "moegraph" / "models" / "tiny.gguf"


@pytest.fixture(scope="module")
def model() -> Iterator[ModelFile]:
    with open_model(TINY) as found:
        yield found


def captured(model: ModelFile, n_ctx: int = 512, **given: int) -> int:
    hp = model.hparams
    return captured_graphs(hp, EngineConfig(**given), n_ctx, range(hp.n_layer))


def test_each_usual_width_of_passes_has_captured_graphs(model: ModelFile) -> None:
    one = captured(model)
    widths = {n: captured(model, n_seq=n) - one for n in (2, 4, 8, 32)}
    each = widths[2]
    assert each > 0
    # 2, 3, 4, 6, 8, 12, 16, 24 and 32 sequences
    assert {n: found / each for n, found in widths.items()} == {2: 1, 4: 3, 8: 5, 32: 9}
    assert captured(model, n_draft=2) - one == 2 * each
    # trees of more rows come in few widths
    assert captured(model, n_draft=15) == captured(model, n_draft=30) > captured(model, n_draft=2)


@pytest.mark.parametrize(
    "device, encoder, first, second",
    [
        ("auto", "auto", 0, 0), ("auto", "cpu", 0, 0), ("auto", "cuda:0", 1, 0),
        ("auto", "cuda:1", 0, 1), ("cuda", "cuda:0", 1, 0), ("cuda:1,cuda:0", "cuda:1", 1, 0),
        ("cuda:1,cuda:0", "cuda:0", 0, 1), ("cuda:0,cuda:1", "cuda:2", 0, 0),
    ],
)  # fmt: skip
def test_an_encoder_has_room_on_its_device(
    model: ModelFile, device: str, encoder: str, first: int, second: int
) -> None:
    config, n_layer = EngineConfig(device=device, mmproj_device=encoder), model.hparams.n_layer
    for at, n in enumerate((first, second)):
        layers = range(1, n_layer) if at else range(1)
        plain = needed_bytes(model, EngineConfig(), 512, layers=layers)
        need = needed_bytes(model, config, 512, layers=layers, at=at)
        assert need.fixed - plain.fixed == n * ENCODER_BYTES


@pytest.mark.parametrize("is_own", [False, True])
def test_a_context_by_memory_takes_little_from_experts(model: ModelFile, is_own: bool) -> None:
    hp = replace(model.hparams, n_ctx_train=1 << 18)
    long = cast(ModelFile, SimpleNamespace(hparams=hp, tensors=model.tensors))
    config = EngineConfig(n_seq=4, n_kv=-1)
    least, whole = (needed_bytes(long, config, n, is_own=is_own) for n in (4096, 1 << 18))
    sizes = [least.fixed, least.fixed + least.experts, 1 << 30, 4 << 30, 64 << 30]
    found = [context_within(long, config, size, is_own) for size in sizes]
    assert found == sorted(found) and {found[0], found[-1]} == {4096, 1 << 18}
    assert all((1 << 18) % n == 0 for n in found) and len(set(found)) > 2
    for size, n_ctx in zip(sizes, found):
        more = needed_bytes(long, config, n_ctx, is_own=is_own).fixed - least.fixed
        left = size - least.fixed - least.experts
        assert more <= max(size // 16, left // 2), (size, n_ctx)
        if n_ctx < 1 << 18:  # twice as many would be too many
            twice = needed_bytes(long, config, 2 * n_ctx, is_own=is_own).fixed - least.fixed
            assert twice > max(size // 16, left // 2)
    assert whole.fixed - least.fixed > sizes[1] // 16
    assert context_within(model, config, 1 << 40, is_own) == 4096  # it was trained with 2,048


def test_rows_of_attention_that_are_planned_are_those_that_the_kernel_computes_at_once() -> None:
    cuda = Path(__file__).parents[2] / "native" / "ggml" / "src" / "ggml-cuda"
    planned = re.search(
        r"#define MOEGRAPH_ATTN_PLANNED (\d+)", (cuda / "moegraph-attn-plan.cuh").read_text()
    )
    together = re.search(
        r"MOEGRAPH_ATTN_TOGETHER = (\d+)\*MOEGRAPH_ATTN_PLANNED;",
        (cuda / "moegraph-attn.cu").read_text(),
    )
    assert planned and together
    assert int(planned[1]) * int(together[1]) == footprint._PLANNED_ROWS


def test_stages_divide_the_weights_and_the_last_has_the_head(model: ModelFile) -> None:
    n, config = model.hparams.n_layer, EngineConfig()
    parts = range(n), range(n // 2), range(n // 2, n)
    whole, first, last = (needed_bytes(model, config, 512, layers=part) for part in parts)
    assert first.weights + last.weights == whole.weights
    head = model.tensors.get("output.weight", model.tensors["token_embd.weight"]).nbytes
    assert last.weights > head and (first.slot_bytes + last.slot_bytes) == whole.slot_bytes


def test_limits_of_contexts_sweeps_and_captured_chunks(model: ModelFile) -> None:
    assert [sweep_rows(*one) for one in ((512, 100), (512, 4096), (512, 1 << 20))] == [
        512, 4096, 8192,
    ]  # fmt: skip
    assert captured(model, 1 << 22) == captured(model, 1 << 23), "the cache drops some"
    hp = replace(model.hparams, n_ctx_train=1 << 24)
    long = cast(ModelFile, SimpleNamespace(hparams=hp, tensors=model.tensors))
    assert context_within(long, EngineConfig(), 1 << 60) == 1 << 22
