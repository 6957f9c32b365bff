"""Models of published shapes, from their headers alone: they open, and plans for cards add up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.shared import PRESETS
from helpers.sparse import file_of, preset_contents

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import plan_cards

from moegraph.arch import open_model
from moegraph.arch.summary import kv_bytes
from moegraph.config import EngineConfig
from moegraph.experts.machines import MACHINES
from moegraph.placement.footprint import needed_bytes, slot_bytes, token_work
from moegraph.placement.planner import make_plan

N_CTX, GIB = 4096, 1 << 30
LONG_CTX = 32_768
PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
# Bytes a second out of a card's memory, and tokens a second that users of an RTX 3090 report of
# llama.cpp and of programs that contain it, with all experts on the card.
RATES = {"rtx4060": 272e9, "rtx4060ti": 288e9, "desktop": 936e9, "h200": 4.9e12}
LLAMA_CPP = {"35b-a3b": (137, 158), "30b-a3b": (130, 150), "gpt-oss-20b": (147, 200)}
LARGE = [name for name, preset in PRESETS.items() if preset.shape.n_layer > 8]


def test_the_page_says_what_the_simulator_predicts(tmp_path: Path) -> None:
    path = plan_cards.header("30b-a3b", tmp_path)
    text, n_bytes = plan_cards.cell(path, 12)
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith("| Qwen3-30B-A3B"))
    assert row.split(" | ")[1:4:2] == [f"{n_bytes / GIB:.1f}", text]


@pytest.mark.parametrize("name", LARGE)
def test_a_plan_divides_the_memory_of_each_card(name: str, tmp_path: Path) -> None:
    path, shape = tmp_path / "m.gguf", PRESETS[name].shape
    file_of(*preset_contents(name)).write_sparse(path)
    with open_model(path) as model:
        assert model.warnings == ()
        hp, config = model.hparams, EngineConfig(device="cpu", n_ctx=N_CTX, n_ubatch=512)
        need, sizes = needed_bytes(model, config, N_CTX), slot_bytes(model)
        token = token_work(model)
        n_bytes = sum(one.nbytes for one in model.tensors.values())
        embedding = model.tensors["token_embd.weight"].nbytes * (not shape.tied)
    assert (hp.n_layer, hp.n_expert, hp.n_ff_exp) == (shape.n_layer, shape.n_expert, shape.n_ff_exp)
    if shape.arch in ("qwen3moe", "olmoe") or shape.is_qwen35:
        n_attention = sum(not shape.is_recurrent(il) for il in range(shape.n_layer))
        assert need.kv == 4 * n_attention * shape.n_head_kv * shape.head_dim * (N_CTX + 1)
    for machine, rate in RATES.items():
        whole = MACHINES[machine].scaled(hp.n_layer, max(sizes), token).whole
        assert 0.1 * rate < token[0] / whole < 0.7 * rate, machine
        least, most = LLAMA_CPP.get(name, (0, 1e6)) if machine == "desktop" else (0, 1e6)
        assert least < 1 / whole < 1.4 * most, "a card like an RTX 3090"
    experts = sum(n * hp.n_expert for n in sizes)
    assert experts == need.experts
    # rows of slots are padded; nothing of the file is forgotten
    if not shape.n_layer_nextn:
        assert 0 <= experts + need.weights - (n_bytes - embedding) < 0.01 * n_bytes
    floor = need.fixed + need.staging + need.ring
    shares = []
    for budget in (floor + 4 * sum(sizes), floor + experts // 2, 4 * n_bytes):
        plan = make_plan(need, budget, pin_layers=None)
        assert plan.total <= budget and len(plan.n_slots) == shape.n_layer
        taken = sum(n * size for n, size in zip(plan.n_slots, sizes))
        assert taken == plan.bytes["pinned"] + plan.bytes["slots"]
        shares.append(plan.resident_share)
    assert 0 < shares[0] < shares[1] < 0.6 and shares[2] == 1.0


@pytest.mark.parametrize(
    ("name", "n_window", "row", "ring", "gib"),
    [("gemma-4-26b-a4b", 25, 8192, 1536, 0.92), ("gpt-oss-20b", 12, 2048, 768, 0.77)],
)
def test_layers_with_a_window_take_no_memory_for_a_longer_context(
    name: str, n_window: int, row: int, ring: int, gib: float, tmp_path: Path
) -> None:
    file_of(*preset_contents(name)).write_sparse(tmp_path / "m.gguf")
    with open_model(tmp_path / "m.gguf") as model:
        config = EngineConfig(device="cpu", n_ubatch=512)
        kv = {n: needed_bytes(model, config, n).kv for n in (N_CTX, LONG_CTX)}
        layers = [model.hparams.layer(il) for il in range(model.hparams.n_layer)]
    assert sum(layer.window is not None for layer in layers) == n_window
    others = sum(kv_bytes(layer) for layer in layers if not layer.window)
    assert kv[LONG_CTX] == n_window * row * (ring + 1) + others * (LONG_CTX + 1)
    assert kv[LONG_CTX] - kv[N_CTX] == others * (LONG_CTX - N_CTX)
    assert round(kv[LONG_CTX] / GIB, 2) == gib
