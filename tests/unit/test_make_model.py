"""The synthetic model writer: blocks, quant mixes, files, and what their weights look like."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
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
from modelgen.gguf_write import TensorEntry, split_tensors
from modelgen.mix import Mix
from modelgen.presets import PRESETS
from modelgen.shape import Shape, shape_options
from modelgen.tensors import Plan, Tensor
from modelgen.vocab import SPECIALS, vocabulary

from moegraph.arch import open_model
from moegraph.errors import MoegraphError

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
    cal = Calibration()
    tensor = {t.name: t for t in Plan(shape, Mix(mix), cal).tensors()}[name]
    filler = Filler(shape, cal, Mix(mix).type_of("embd", None), seed)
    raw = np.frombuffer(b"".join(bytes(p) for p in filler.pieces(tensor)), np.uint8)
    return dequantize(raw, tensor.type).reshape(tensor.n_rows, tensor.ne[0])


@pytest.mark.parametrize("name", TYPES)
def test_a_type_has_ggmls_number_and_block_size(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    assert TYPES[name].ggml_id == kind
    assert (TYPES[name].n_elem, TYPES[name].n_bytes) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("std", (0.02, 1.3))
@pytest.mark.parametrize("name", TYPES)
def test_random_blocks_have_mean_zero_and_the_asked_deviation(name: str, std: float) -> None:
    n = 60_000 // TYPES[name].n_elem
    values = dequantize(TYPES[name].fill(np.random.default_rng(1), n, std), name)
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 0.03 * std
    assert values.std() == pytest.approx(std, rel=0.03)


@pytest.mark.parametrize("name", TYPES)
def test_a_constant_block_holds_one_value(name: str) -> None:
    values = dequantize(TYPES[name].constant(0.37), name)
    assert len(values) == TYPES[name].n_elem
    assert (values == values[0]).all()
    # MXFP4 has powers of two only.
    assert values[0] == pytest.approx(0.37, rel=0.25 if name == "MXFP4" else 0.01)


def test_the_last_rule_of_a_mix_wins_and_layers_narrow_it() -> None:
    mix = Mix("all=Q8_0,experts=Q4_K,down@2-3=Q6_K,embd=F16")
    assert mix.type_of("down", 1) == "Q4_K"
    assert mix.type_of("down", 3) == "Q6_K"
    assert mix.type_of("gate_up", 3) == "Q4_K"
    assert mix.type_of("embd", None) == "F16"
    assert mix.type_of("attn", 0) == "Q8_0"


@pytest.mark.parametrize("text, word", [
    ("wings=Q4_K", "wings"), ("down=Q9_K", "Q9_K"), ("down@x=Q4_K", "layers"),
])  # fmt: skip
def test_a_wrong_mix_is_named(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Mix(text)


@pytest.mark.parametrize("change", [
    {"n_head": 3}, {"n_expert_used": 33}, {"n_k_heads": 3}, {"ssm_d_state": 48}, {"n_rot": 66},
    {"layers": "dd"}, {"rope_scaling": "cubic"}, {"n_layer_nextn": 2}, {"ssm_d_conv": 7},
])  # fmt: skip
def test_a_wrong_shape_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has words of its own
        write_model(tmp_path / "m.gguf", replace(SMALL, **change), MIX)
    assert list(tmp_path.iterdir()) == []


def test_rows_that_are_not_whole_blocks_are_refused_with_the_tensors_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_down_exps.*Q4_K"):
        write_model(tmp_path / "m.gguf", SMALL, MIX + ",down=Q4_K")


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "35b-a3b"])
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
        down = {il: model.tensors[f"blk.{il}.ffn_down_exps.weight"] for il in range(shape.n_layer)}
        assert {il: t.type.name for il, t in down.items()} == {
            il: mix.type_of("down", il) for il in down
        }
        assert ("output.weight" in model.tensors) != shape.tied
        assert ("blk.0.ffn_gate_up_exps.weight" in model.tensors) == shape.merged_gate_up


def test_the_benchmark_preset_has_the_full_shape() -> None:
    shape = PRESETS["35b-a3b"].shape
    entries = [t.entry() for t in Plan(shape, Mix(PRESETS["35b-a3b"].mix), Calibration()).tensors()]
    assert sum(e.n_bytes for e in entries) == pytest.approx(22.5e9, rel=0.01)
    assert sum(shape.is_recurrent(il) for il in range(shape.n_layer)) == 30
    experts = [np.prod(e.ne) for e in entries if "exps" in e.name]
    assert sum(experts) == 40 * 256 * 3 * 2048 * 512
    assert shape.rope_sections() == [11, 11, 10, 0]


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


@pytest.mark.parametrize("n_parts", (1, 2, 5, 9, 10))
def test_no_part_of_a_split_is_empty(n_parts: int) -> None:
    table = [TensorEntry(f"t{i}", (1,), 0, 10 if i else 1000) for i in range(10)]
    parts = split_tensors(table, n_parts)
    assert len(parts) == n_parts
    assert all(parts)
    assert [t for part in parts for t in part] == table


def test_more_parts_than_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot split"):
        split_tensors([TensorEntry("t", (1,), 0, 4)], 2)


def test_no_two_rows_of_a_large_head_are_equal() -> None:
    """The pool is smaller than the tensor; equal rows would tie in every argmax."""
    shape = replace(SMALL, n_vocab=25_000)
    rows = weights(shape, "all=Q8_0,head=Q4_0", "output.weight")
    assert len(np.unique(rows[:, :64], axis=0)) == len(rows)


def test_experts_differ() -> None:
    rows = weights(SMALL, MIX, "blk.0.ffn_up_exps.weight").reshape(SMALL.n_expert, -1)
    assert len(np.unique(rows, axis=0)) == SMALL.n_expert


def test_the_router_reads_its_static_part_from_the_constant_dimensions() -> None:
    """Scores of random embeddings: a fixed part for each expert, and one for each token."""
    shape = replace(SMALL, n_embd=512, n_expert=256)
    embd = weights(shape, MIX, "token_embd.weight")
    router = weights(shape, MIX, "blk.4.ffn_gate_inp.weight")
    n_const = Calibration().const_dims(shape, "F16")
    assert (embd[:, :n_const] == embd[0, 0]).all()
    assert np.sqrt(np.mean(embd**2)) == pytest.approx(1, rel=0.02)
    energy = Calibration().stream_energy(shape, 4)
    scores = embd @ router.T / np.sqrt(energy)
    static = scores.mean(axis=0)
    assert 0.4 < static.std() < 0.75
    assert scores.std() < 1.1


def test_a_tied_head_does_not_predict_the_token_it_reads() -> None:
    shape = replace(SMALL, tied=True)
    embd = weights(shape, MIX, "token_embd.weight")
    norm = weights(shape, MIX, "output_norm.weight")[0]
    logits = (embd * norm) @ embd.T
    assert (logits.argmax(axis=1) == np.arange(len(embd))).mean() < 0.1


def test_the_vocabulary_has_every_byte_and_no_token_twice() -> None:
    keys = {kv.key: kv.value for kv in vocabulary(1000, "qwen35")}
    tokens = keys["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == len(keys["tokenizer.ggml.token_type"]) == 1000
    assert tokens[ord("a")] == "a"
    assert len(tokens[0]) == 1
    assert tokens[-len(SPECIALS) :] == [text for text, _ in SPECIALS]
    assert tokens[keys["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    for merge in keys["tokenizer.ggml.merges"]:
        assert merge.replace(" ", "") in tokens


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="n_vocab is 100"):
        vocabulary(100, "qwen35")


def test_a_tensor_of_the_wrong_size_never_becomes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "entry", lambda t: TensorEntry(t.name, t.ne, 0, 1))
    with pytest.raises(ValueError, match="declared"):
        write_model(tmp_path / "m.gguf", SMALL, MIX)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_changes_a_preset_and_checks_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    changes = ("--n-layer", "4", "--n-expert", "16", "--tied", "1", "--mix", "all=Q8_0")
    assert make_model.main([str(path), "--preset", "legacy32", *changes, "--check"]) == 0
    with open_model(path) as model:
        assert (model.hparams.n_layer, model.hparams.n_expert) == (4, 16)
        assert "output.weight" not in model.tensors
    out = capsys.readouterr().out
    assert str(path) in out
    assert "n_expert=16" in out


@pytest.mark.parametrize("args, words", [
    (("--n-head", "3"), "n_head must be a multiple"),
    (("--mix", "down=Q9"), "unknown type 'Q9'"),
    (("--splits", "999"), "cannot split"),
])  # fmt: skip
def test_a_mistake_is_one_line(
    args: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_model.main([str(tmp_path / "m.gguf"), "--preset", "legacy32", *args]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_it_runs_as_a_script_and_every_hyper_parameter_is_an_option() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True
    )
    for name, _, about in shape_options():
        assert "--" + name.replace("_", "-") in done.stdout
        assert about


def test_a_foreign_file_is_not_taken_for_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(MoegraphError):
        open_model(path)
