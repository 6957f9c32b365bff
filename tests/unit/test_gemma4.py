"""gemma4: what its keys give for each layer, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from helpers.ggufbytes import T, kv, vocab_pairs
from modelgen.presets import PRESETS

from moegraph.arch.gemma4 import Gemma4
from moegraph.errors import ModelFileError, UnsupportedModel
from moegraph.gguf.metadata import Metadata
from moegraph.gguf.reader import Reader
from moegraph.gguf.scan import _read_metadata
from moegraph.gguf.vocab import check_vocab


def read(preset: str = "gemma4", **changes: Any) -> Gemma4:
    """Read the keys of a preset with some replaced; None: dropped."""
    keys = PRESETS[preset].shape.metadata() | {"general.architecture": "gemma4"}
    keys |= {f"gemma4.{name.replace('__', '.')}": value for name, value in changes.items()}
    values = {k: np.array(v) if isinstance(v, list) else v for k, v in keys.items()}
    kept = {k: v for k, v in values.items() if v is not None}
    return Gemma4.read(Metadata("a.gguf", kept, {}), 1024)


@pytest.mark.parametrize("own, kind, words", [
    # llama.cpp begins each text with it, and ends the process if there is none
    (Gemma4.tokenizer, ModelFileError, "bos_token_id is missing"),
    ("gpt2", UnsupportedModel, "is 'gemma4'; moegraph runs byte-level BPE"),
])  # fmt: skip
def test_a_vocabulary_without_bos_or_of_another_model_is_refused(
    own: str, kind: type[Exception], words: str, tmp_path: Path
) -> None:
    path, model = tmp_path / "a.gguf", "tokenizer.ggml.model"
    pairs = vocab_pairs(40) | {model: kv(model, T.STRING, "gemma4")}
    path.write_bytes(b"".join(pairs.values()))
    with path.open("rb") as file:
        meta = _read_metadata(Reader(file.fileno(), path, path.stat().st_size), len(pairs))
    with pytest.raises(kind, match=words):
        check_vocab(meta, 40, own)


def test_layers_with_a_window_have_heads_and_rope_of_their_own() -> None:
    hp = read()
    wide, window = hp.at(5), hp.at(0)
    assert (window.n_embd_head_k, window.n_head_kv, window.n_rot) == (64, 2, 64)
    assert (wide.n_embd_head_k, wide.n_head_kv, wide.n_rot) == (128, 1, 128)
    assert (window.rope_freq_base, wide.rope_freq_base) == (1e4, 1e6)
    plain = read(rope__freq_base_swa=None, rope__scaling__factor=4.0)
    assert (plain.at(0).rope_freq_base, plain.at(5).rope_freq_base) == (1e4, 1e6)
    assert (plain.at(0).rope_freq_scale, plain.at(5).rope_freq_scale) == (1.0, 0.25)
    assert [hp.layer(il).window for il in range(6)] == [32] * 5 + [None]
    assert [hp.layer(il).kv for il in (0, 5)] == [(128, 128), (128, 128)]
    assert (hp.embedding_scale, hp.attention_scale, hp.logit_softcap) == (16.0, 1.0, 30.0)


def test_what_a_layer_has_says_of_others_what_the_model_says() -> None:
    hp = read(attention__head_count_kv=[2] * 6)
    assert [hp.layer(il).kv for il in (0, 5)] == [(128, 128), (256, 256)]
    for at in map(hp.at, range(6)):
        assert [at.layer(il) for il in range(6)] == [hp.layer(il) for il in range(6)]
        assert [at.at(il) for il in range(6)] == [hp.at(il) for il in range(6)]
        assert (at.model_tensors(), at.mixer_width) == (hp.model_tensors(), hp.mixer_width)


@pytest.mark.parametrize("changes, kind, words", [
    ({"expert_count": None}, UnsupportedModel, "the model is dense"),
    ({"embedding_length_per_layer_input": 64}, UnsupportedModel, "per-layer embeddings"),
    ({"attention__shared_kv_layers": 2}, UnsupportedModel, "layers that share K and V"),
    ({"nextn_predict_layers": 1}, UnsupportedModel, "prediction"),
    ({"attention__key_length_swa": 96}, UnsupportedModel, "is 96; moegraph runs multiples of 64"),
    ({"attention__value_length": 64}, ModelFileError, "is 64 but key heads have 128"),
    ({"attention__head_count_kv": [2, 2, 3, 2, 2, 1]}, ModelFileError, "has 3, which does not"),
    ({"attention__head_count_kv": [2, 2]}, ModelFileError, "has 2 elements; expected 6"),
    ({"rope__dimension_count_swa": 66}, ModelFileError, "is 66; it must be even and at most"),
    ({"attention__sliding_window": 0}, ModelFileError, "allowed are 1 to"),
    ({"feed_forward_length": 0}, ModelFileError, "allowed are 1 to"),
])  # fmt: skip
def test_what_cannot_run_is_refused(changes: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        read(**changes)


def test_the_shape_of_gemma_4_26b_a4b_is_read() -> None:
    hp = read("gemma-4-26b-a4b")
    assert (hp.n_layer, hp.window, hp.n_expert, hp.n_expert_used) == (30, 1024, 128, 8)
    assert [il for il in range(30) if not hp.layer(il).window] == [5, 11, 17, 23, 29]
    assert [hp.layer(il).kv for il in (0, 5)] == [(2048, 2048), (1024, 1024)]
    assert (hp.at(5).n_embd_head_k, hp.n_ff_exp, hp.n_ff_shexp) == (512, 704, 2112)
