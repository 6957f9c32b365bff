"""Sizes of a model's caches."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ggufbytes import Shape, model_file

from moegraph.arch import open_model
from moegraph.arch.summary import kv_bytes
from moegraph.errors import ConfigError


def test_cache_types_that_cannot_hold_a_row_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_file(Shape(head_dim=8, n_rot=8)).build())
    with open_model(path) as model:
        layer = model.hparams.layer(3)
    with pytest.raises(ConfigError, match="type_k is 'q8_0', whose blocks of 32"):
        kv_bytes(layer, "q8_0")
    with pytest.raises(ConfigError, match="type_v is 'bf17'; allowed: f16"):
        kv_bytes(layer, "f16", "bf17")
