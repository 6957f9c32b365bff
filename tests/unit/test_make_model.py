"""The synthetic model writer: blocks, quant mixes, files, and what their weights look like."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "make_model.py"
sys.path.insert(0, str(SCRIPT.parent))

import make_model
from modelgen.blocks import TYPES
from modelgen.build import write_model
from modelgen.calibrate import Calibration
from modelgen.fill import Filler
from modelgen.presets import PRESETS, Mix
from modelgen.shape import Shape, shape_options
from modelgen.tensors import Plan

from moegraph.arch import open_model

gguf = pytest.importorskip("gguf")

SMALL = PRESETS["legacy32"].shape
MIX = PRESETS["legacy32"].mix


def dequantize(raw: np.ndarray, name: str) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[name]
    if name == "F32":
        return raw.reshape(-1).view("<f4")
    return np.asarray(gguf.quants.dequantize(raw.reshape(-1), kind), np.float32).reshape(-1)


def weights(shape: Shape, mix: str, name: str, seed: int = 0) -> np.ndarray:
    """Return a tensor of a model as the writer would dump it, dequantized, [rows, ne0]."""
    cal = Calibration.of(shape)
    tensor = {t.name: t for t in Plan(shape, Mix(mix), cal).tensors()}[name]
    filler = Filler(shape, cal, Mix(mix).type_of("embd", None), seed)
    raw = np.frombuffer(filler.data(tensor), np.uint8)
    return dequantize(raw, tensor.type).reshape(tensor.n_rows, tensor.ne[0])


@pytest.mark.parametrize("std", (0.02, 1.3))
@pytest.mark.parametrize("name", TYPES)
def test_random_blocks_have_mean_zero_and_the_asked_deviation(name: str, std: float) -> None:
    n = 60_000 // TYPES[name].n_elem
    values = dequantize(TYPES[name].fill(np.random.default_rng(1), n, std), name)
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 0.03 * std
    assert values.std() == pytest.approx(std, rel=0.03)


@pytest.mark.parametrize("name", [n for n, p in PRESETS.items() if p.shape.n_embd <= 512])
def test_a_preset_reads_back_as_it_was_asked_for(name: str, tmp_path: Path) -> None:
    shape, mix = PRESETS[name].shape, Mix(PRESETS[name].mix)
    (path,) = write_model(tmp_path / "m.gguf", shape, PRESETS[name].mix)
    with open_model(path) as model:
        hp = model.hparams
        names = ("n_vocab", "n_embd", "n_layer", "n_layer_nextn", "n_head", "n_head_kv", "n_rot",
                 "n_expert", "n_expert_used", "n_ff_exp", "n_ff_shexp")  # fmt: skip
        if shape.is_qwen35:
            names += ("n_k_heads", "n_v_heads", "key_dim", "value_dim", "conv_dim")
        for field in names:
            assert getattr(hp, field) == getattr(shape, field), field
        layers = range(shape.n_layer)
        assert [hp.layer(il).kv is None for il in layers] == [
            shape.is_recurrent(il) for il in layers
        ]
        assert hp.routed_layers == list(layers)[shape.n_layer_dense_lead :]
        down = {il: model.tensors[f"blk.{il}.ffn_down_exps.weight"] for il in hp.routed_layers}
        assert {il: t.type.name for il, t in down.items()} == {
            il: mix.type_of("down", il) for il in down
        }
        assert ("output.weight" in model.tensors) != shape.tied
        assert ("blk.1.ffn_gate_up_exps.weight" in model.tensors) == shape.merged_gate_up


def test_a_seed_gives_the_same_bytes_and_another_gives_others(tmp_path: Path) -> None:
    files = [
        write_model(tmp_path / f"{i}.gguf", SMALL, MIX, seed)[0].read_bytes()
        for i, seed in enumerate((5, 5, 6))
    ]
    assert files[0] == files[1]
    assert files[0] != files[2]
    assert len(files[0]) == len(files[2])


def test_splits_hold_the_same_tensors(tmp_path: Path) -> None:
    (single,) = write_model(tmp_path / "one.gguf", SMALL, MIX)
    parts = write_model(tmp_path / "three.gguf", SMALL, MIX, n_splits=3)
    assert [p.name for p in parts] == [f"three-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    with open_model(single) as a, open_model(parts[0]) as b:
        assert len(b.paths) == 3
        assert a.tensors.keys() == b.tensors.keys()
        for name in a.tensors:
            assert np.array_equal(a.map(a.tensors[name]), b.map(b.tensors[name])), name


def test_the_command_line_changes_a_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    changes = ("--n-layer", "4", "--n-expert", "16", "--tied", "1", "--mix", "all=Q8_0")
    assert make_model.main([str(path), "--preset", "legacy32", *changes]) == 0
    with open_model(path) as model:
        assert (model.hparams.n_layer, model.hparams.n_expert) == (4, 16)
        assert "output.weight" not in model.tensors
    assert str(path) in capsys.readouterr().out


def test_it_runs_as_a_script_and_every_hyper_parameter_is_an_option() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True
    )
    for name, _, about in shape_options():
        assert "--" + name.replace("_", "-") in done.stdout
        assert about
