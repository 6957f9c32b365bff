"""Drafter files: every format says the same, and what does not fit or is damaged is refused."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafters import SMALL, write_small
from helpers.shared import model_writer
from modelgen.drafter import FORMATS, PRESETS, hf_config, tensor_shapes, values

from moegraph.arch import open_model
from moegraph.arch.dflash import DFlashHParams, expected_tensors
from moegraph.arch.dflashgguf import read_hparams
from moegraph.arch.dflashhf import translated
from moegraph.arch.draftfile import open_drafter
from moegraph.errors import ModelFileError, UnsupportedModel

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_writer(tmp_path_factory.mktemp("target"), seed=7)("legacy32")


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_says_the_same(kind: str, target: Path, tmp_path: Path) -> None:
    path = write_small(tmp_path, kind, yarn_factor=8.0)
    with open_model(target) as model:
        draft = open_drafter(path if kind != "safetensors" else tmp_path)
        draft.require_target(model)
        assert draft.warnings == ()
    hp = draft.hparams
    assert replace(hp, dialect="", f_norm_rms_eps=0.0) == DFlashHParams(
        dialect="", n_vocab=1024, n_vocab_draft=0, n_embd=256, n_layer=2, n_head=4, n_head_kv=2,
        n_embd_head=64, n_ff=320, f_norm_rms_eps=0.0, target_layers=(1, 4, 6), mask_id=990,
        block_size=8, rope=hp.rope, n_swa=24, sliding=(True, False),
    )  # fmt: skip
    assert hp.f_norm_rms_eps == pytest.approx(1e-6)
    assert (hp.rope.rope_freq_scale, hp.rope.rope_ext_factor) == (1 / 8, 1.0)
    assert hp.rope.n_ctx_orig == 4096 and hp.rope.rope_attn_factor == 1.0
    for name, data in values(replace(SMALL, yarn_factor=8.0), seed=3):
        raw = np.empty(draft.tensors[name].nbytes, np.uint8)
        draft.source.read(draft.tensors[name], raw)
        np.testing.assert_array_equal(raw.view(np.float32), data.reshape(-1), err_msg=name)
    draft.close()


@pytest.mark.parametrize("kind", ["dflash", "safetensors"])
def test_dspark_with_a_reduced_vocabulary(kind: str, target: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "markov_rank": 32,
        "n_vocab_draft": 300,
        "samples_anchor": kind == "dflash",
    }
    path = write_small(tmp_path, kind, **changes)
    wanted = dict(values(replace(SMALL, **changes), seed=3))["d2t"]
    with open_model(target) as model:
        draft = open_drafter(path)
        draft.require_target(model)
    hp = draft.hparams
    assert (hp.name, hp.markov_rank, hp.n_vocab_draft) == ("dspark", 32, 300)
    assert hp.samples_anchor == (kind == "dflash")
    assert hp.max_draft == (8 if hp.samples_anchor else 7)
    np.testing.assert_array_equal(draft.d2t(1024), wanted)
    with pytest.raises(ModelFileError, match="d2t does not name different tokens of 500"):
        draft.d2t(500)
    draft.close()


@pytest.mark.parametrize("name", PRESETS)
def test_the_published_revisions(name: str) -> None:
    """The configurations of peers' files: target layers, masks, windows, rope and parameters."""
    shape = PRESETS[name]
    hp = read_hparams(translated(Path("config.json"), hf_config(shape), {}), {})
    n_params = sum(int(np.prod(ne)) for ne in tensor_shapes(shape).values())
    assert hp.target_layers == shape.target_layers and hp.mask_id == shape.mask_id
    assert hp.block_size == shape.block_size and hp.n_layer == len(shape.windows)
    assert (hp.n_swa, hp.rope.rope_ext_factor) == (shape.n_swa, 1.0 if shape.yarn_factor else 0.0)
    if name == "35b-current":
        assert n_params == 385_906_176 and len(tensor_shapes(shape)) == 69
        assert hp.sliding == (True,) * 5 + (False,) and hp.n_swa == 4096
        assert hp.rope.text == "plain"
    if name == "35b-april":
        assert hp.target_layers == (1, 10, 19, 28, 37) and not any(hp.sliding)
        assert hp.rope.text == "YaRN, factor 64 of 4096 positions"
    plain = replace(shape, markov_rank=0)
    assert expected_tensors(hp, 248_320).keys() >= tensor_shapes(plain).keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_embd": 512}, "made for a target of width 512, and this one has 256"),
        ({"target_layers": (1, 8)}, "reads the output of layer 8, and there are 8 layers"),
        ({"n_vocab": 1000}, "made for 1000 tokens, and there are 1024"),
    ],
)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_drafter_of_another_model_is_refused(
    kind: str, changes: dict[str, Any], words: str, target: Path, tmp_path: Path
) -> None:
    draft = open_drafter(write_small(tmp_path, kind, **changes))
    with open_model(target) as model, pytest.raises(UnsupportedModel, match=re.escape(words)):
        draft.require_target(model)
    draft.close()


def test_a_mask_token_that_the_target_lacks_is_refused(target: Path, tmp_path: Path) -> None:
    draft = open_drafter(write_small(tmp_path, "dflash-draft", mask_id=1024))
    with open_model(target) as model, pytest.raises(UnsupportedModel, match="mask token is 1024"):
        draft.require_target(model)
    draft.close()


def test_another_tokenizer_is_refused(target: Path, tmp_path: Path) -> None:
    path = write_small(tmp_path)
    raw = path.read_bytes()
    at = raw.index(b"return")  # in a token, not in a merge: tokens come first
    path.write_bytes(raw[:at] + b"RETURN" + raw[at + 6 :])
    draft = open_drafter(path)
    with open_model(target) as model, pytest.raises(UnsupportedModel, match="'RETURN'"):
        draft.require_target(model)
    draft.close()


def test_a_missing_tensor_is_named(target: Path, tmp_path: Path) -> None:
    path = write_small(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    draft = open_drafter(path)
    with open_model(target) as model, pytest.raises(ModelFileError, match=r"blk.1.ffn_up.weight"):
        draft.require_target(model)
    draft.close()


def edit_config(path: Path, change: Change) -> None:
    """Change config.json beside a file."""
    file = path.with_name("config.json")
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


CONFIGS: list[tuple[Change, type[Exception], str]] = [
    (lambda c: c.pop("hidden_size"), ModelFileError, "hidden_size is missing"),
    (lambda c: c.update(hidden_size="2048"), ModelFileError, "hidden_size is a string"),
    (lambda c: c.update(rope_theta=float("inf")), ModelFileError, "rope_theta is inf"),
    (
        lambda c: c.update(num_key_value_heads=3),
        ModelFileError,
        "num_key_value_heads is 3, which does not divide n_head 4",
    ),
    (
        lambda c: c.update(layer_types=["full_attention"]),
        ModelFileError,
        "layer_types has 1 elements; expected 2",
    ),
    (lambda c: c.update(rope_scaling=7), ModelFileError, "rope_scaling is not an object"),
    (lambda c: c.update(rope_scaling={"rope_type": "llama3"}), UnsupportedModel, "llama3"),
    (lambda c: c.update(hidden_act="gelu"), UnsupportedModel, "moegraph runs silu"),
    (lambda c: c.update(attention_bias=True), UnsupportedModel, "biased drafters"),
    (lambda c: c["dflash_config"].update(selector_rank=8), UnsupportedModel, "DFlash2"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[]), ModelFileError, "target_layer_ids"),
    (lambda c: c["dflash_config"].update(block_size=1), ModelFileError, "block_size is 1"),
    (lambda c: c["dflash_config"].pop("mask_token_id"), ModelFileError, "mask_token_id is missing"),
    (lambda c: c.update(draft_vocab_size=10), ModelFileError, "there is no d2t"),
    (lambda c: c.update(partial_rotary_factor=0.02), ModelFileError, "rotates 1 of 64"),
]


@pytest.mark.parametrize(("change", "kind", "words"), CONFIGS, ids=[c[2] for c in CONFIGS])
def test_a_config_that_cannot_be(
    change: Change, kind: type[Exception], words: str, tmp_path: Path
) -> None:
    path = write_small(tmp_path, "safetensors")
    edit_config(path, change)
    with pytest.raises(kind, match=re.escape(words)):
        open_drafter(path)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"without model.safetensors"):
        open_drafter(tmp_path)
    path = write_small(tmp_path, "safetensors")
    path.with_name("config.json").unlink()
    with pytest.raises(ModelFileError, match=r"a drafter in safetensors needs it"):
        open_drafter(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="in several files"):
        open_drafter(tmp_path)


def test_a_model_is_no_drafter(target: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'qwen35moe' is no DFlash drafter"):
        open_drafter(target)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return header and data of a safetensors file."""
    raw = path.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + n]), raw[8 + n :]


def with_header(path: Path, header: object, data: bytes) -> None:
    """Write a safetensors file with another header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


NAME = "fc.weight"
HEADERS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda h: b"[]", "not an object"),
    (lambda h: b"{]", "not JSON"),
    (lambda h: b"\xff\xfe", "not JSON"),
    (lambda h: b"[" * 100_000, "not JSON"),
    (lambda h: h | {NAME: 7}, "not described by an object"),
    (lambda h: h | {NAME: h[NAME] | {"dtype": 1}}, "lacks a type"),
    (lambda h: h | {NAME: h[NAME] | {"shape": [-1, 2]}}, "lacks a type"),
    (lambda h: h | {NAME: h[NAME] | {"shape": [1 << 39, 1 << 39]}}, "has shape"),
    (lambda h: h | {NAME: h[NAME] | {"shape": [2, 2]}}, "bytes"),
    (lambda h: h | {NAME: h[NAME] | {"data_offsets": [9, 3]}}, "bytes"),
    (lambda h: h | {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "begins at byte"),
    (lambda h: {k: v for k, v in h.items() if k != "norm.weight"}, "begins at byte"),
]


@pytest.mark.parametrize(("change", "words"), HEADERS, ids=[str(i) for i in range(len(HEADERS))])
def test_damaged_safetensors(
    change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path
) -> None:
    path = write_small(tmp_path, "safetensors")
    header, data = header_of(path)
    with_header(path, change(header), data)
    with pytest.raises(ModelFileError, match=re.escape(words)):
        open_drafter(path)


def test_other_damage_of_safetensors(tmp_path: Path) -> None:
    path = write_small(tmp_path, "safetensors")
    raw = path.read_bytes()
    for data, words in (
        (raw[:-1], "is truncated"),
        (raw + b"x", "has bytes after"),
        (b"", "header of 0"),
        (struct.pack("<Q", 1 << 62) + raw[8:], "cannot have a header"),
    ):
        path.write_bytes(data)
        with pytest.raises(ModelFileError, match=words):
            open_drafter(path)
    path.write_bytes(raw)
    header, data = header_of(path)
    header[NAME]["dtype"] = "F8_E4M3"
    with_header(path, header, data)
    with pytest.raises(UnsupportedModel, match="F8_E4M3: moegraph reads"):
        open_drafter(path)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = write_small(tmp_path, "safetensors")
    draft = open_drafter(path)
    draft.source.check_unchanged()
    info = draft.tensors["fc.weight"]
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelFileError, match="written to"):
        draft.source.check_unchanged()
    last = max(draft.tensors.values(), key=lambda t: t.offset)
    with pytest.raises(ModelFileError, match="shrank"):
        draft.source.read(last, np.empty(last.nbytes, np.uint8))
    draft.source.read(info, np.empty(8, np.uint8), 4)
    draft.close()
    draft.close()
