"""Prediction (MTP) blocks of model files: whole ones can draft, others are refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers import shared  # noqa: F401 - it finds the scripts
from helpers.ggufbytes import Q, Shape, Tensor, add, drop, edit, model_file
from helpers.modelfiles import Write, write

from moegraph.arch import open_model
from moegraph.arch.mtp import require_nextn
from moegraph.config import EngineConfig
from moegraph.errors import ModelFileError, UnsupportedModel
from moegraph.placement.drafters import mtp_bytes, wants_mtp

__all__ = ["write"]

Edit = Callable[[list[Tensor]], list[Tensor]]


@pytest.mark.parametrize(("change", "error", "words"), [
    (drop("blk.4.nextn.eh_proj.weight"), ModelFileError, "block 4 lacks nextn.eh_proj.weight"),
    (drop("blk.4.ffn_down_exps.weight"), ModelFileError, "block 4 lacks ffn_down_exps.weight"),
    (drop("blk.4.attn_q.weight"), ModelFileError, "block 4 lacks attn_q.weight"),
    (edit("blk.4.nextn.hnorm.weight", ne=(16,)), ModelFileError, "hnorm.weight has shape [16]"),
    (edit("blk.4.nextn.enorm.weight", kind=Q.F16), UnsupportedModel, "has type F16"),
    (add(Tensor("blk.4.nextn.shared_head_norm.weight", (8,))), ModelFileError, "has shape [8]"),
    (add(Tensor("blk.4.nextn.embed_tokens.weight", (8, 8))), ModelFileError, "has shape [8, 8]"),
])  # fmt: skip
def test_a_damaged_block_cannot_draft(
    write: Write, change: Edit, error: type[ModelFileError], words: str
) -> None:
    with open_model(write(model_file(Shape(n_nextn=1), tensors=change))) as model:
        with pytest.raises(error) as caught:
            require_nextn(model.path, model.hparams, model.tensors)
        assert words in str(caught.value) and "\n" not in str(caught.value)
        assert type(caught.value) is error
        with pytest.raises(error):
            wants_mtp(model, EngineConfig(spec="mtp"))
        assert not wants_mtp(model, EngineConfig(spec="auto"))


@pytest.mark.parametrize(("n", "error"), [(0, ModelFileError), (2, UnsupportedModel)])
def test_drafting_needs_one_block(write: Write, n: int, error: type[ModelFileError]) -> None:
    with open_model(write(model_file(Shape(n_nextn=n)))) as model:
        with pytest.raises(error, match=f"has {n} prediction"):
            require_nextn(model.path, model.hparams, model.tensors)


def test_settings_say_whether_a_whole_block_drafts(write: Write) -> None:
    with open_model(write(model_file(Shape(n_nextn=1)))) as model:
        for spec, wanted in (("off", False), ("auto", True), ("mtp", True)):
            assert wants_mtp(model, EngineConfig(spec=spec)) == wanted
        small, large = (
            mtp_bytes(model, EngineConfig(n_seq=n_seq), n_ctx)
            for n_seq, n_ctx in ((1, 512), (4, 4096))
        )
        experts = sum(t.nbytes for n, t in model.tensors.items() if "blk.4" in n and "exps" in n)
        assert experts < small < large
