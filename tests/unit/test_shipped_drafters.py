"""The shipped drafters fit the shipped model, and the MTP block merges into a copy of it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers.shipped import TINY, TINY_DFLASH, TINY_MTP, merged_tiny

from moegraph.arch import open_model
from moegraph.arch.draftfile import open_drafter
from moegraph.errors import UnsupportedModel


def test_dflash_fits_the_model() -> None:
    draft = open_drafter(TINY_DFLASH)
    with open_model(TINY) as target:
        draft.require_target(target)
    assert draft.warnings == ()
    hp = draft.hparams
    assert hp.target_layers == (1, 3, 5, 6)
    assert hp.block_size == 12
    assert not hp.is_causal


def test_the_merged_model_has_its_old_tensors_and_a_block(tmp_path: Path) -> None:
    path = merged_tiny(tmp_path)
    with open_model(TINY) as old, open_model(path) as new:
        assert (new.hparams.n_layer, new.hparams.n_layer_nextn) == (old.hparams.n_layer, 1)
    before, after = ({t.name: t for t in gguf.GGUFReader(str(p)).tensors} for p in (TINY, path))
    for name, tensor in before.items():
        assert tensor.tensor_type == after[name].tensor_type
        np.testing.assert_array_equal(tensor.data, after[name].data)
    block = {t.name for t in gguf.GGUFReader(str(TINY_MTP)).tensors}
    assert set(after) - set(before) == block


def test_a_block_alone_is_neither_a_model_nor_a_drafter() -> None:
    with pytest.raises(UnsupportedModel, match=r"a prediction \(MTP\) block alone; it drafts only"):
        open_model(TINY_MTP)
    with pytest.raises(UnsupportedModel, match=r"a prediction \(MTP\) block alone; it drafts only"):
        open_drafter(TINY_MTP)
