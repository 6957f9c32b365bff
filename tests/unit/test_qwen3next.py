"""qwen3next: the forms of its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import shared  # noqa: F401 - it finds the scripts
from helpers.ggufbytes import Q, Tensor
from helpers.sparse import file_of, preset_contents

from moegraph.arch import open_model
from moegraph.errors import ModelFileError, UnsupportedModel

# Projections of a DeltaNet that may stand in for each other, and their rows.
ROWS = {"attn_qkv": 640, "attn_gate": 384, "ssm_in": 1024}


def write(path: Path, names: Sequence[str], *more: Tensor) -> Path:
    """Write a model whose layer 1 has these projections."""
    keys, tensors = preset_contents("qwen3next")
    forms = {f"blk.1.{name}.weight": (256, n) for name, n in ROWS.items()}
    kept = [t for t in tensors if t.name not in forms]
    asked = [Tensor(name, ne, Q.Q8_0) for name, ne in forms.items() if name.split(".")[2] in names]
    file_of(keys, [*kept, *asked, *more]).write_sparse(path)
    return path


@pytest.mark.parametrize("names", [("ssm_in",), ("attn_qkv", "attn_gate"), tuple(ROWS)])
def test_a_layer_has_its_projections_in_one_form_or_the_other(
    tmp_path: Path, names: Sequence[str]
) -> None:
    with open_model(write(tmp_path / "m.gguf", names)) as model:
        assert model.warnings == () and model.hparams.families.startswith("Qwen3-Next")


@pytest.mark.parametrize("names, missing", [
    ((), "attn_qkv.weight and 1 more"), (("attn_qkv",), "attn_gate"), (("attn_gate",), "attn_qkv"),
])  # fmt: skip
def test_a_layer_without_either_form_is_refused(
    tmp_path: Path, names: Sequence[str], missing: str
) -> None:
    with pytest.raises(ModelFileError, match=f"tensor blk.1.{missing}.* missing"):
        open_model(write(tmp_path / "m.gguf", names))


@pytest.mark.parametrize(
    "name, words",
    [
        ("blk.3.attn_qkv.weight", "needs attn_q, attn_k and attn_v, convert it again"),
        ("blk.3.attn_q.bias", "attention biases"),
        ("blk.0.ssm_ba.scale", "per-tensor scales"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, name: str, words: str) -> None:
    path = write(tmp_path / "m.gguf", ("ssm_in",), Tensor(name, (256, 2), Q.F32))
    with pytest.raises(UnsupportedModel, match=words):
        open_model(path)


@pytest.mark.parametrize("n, kind, words", [
    (65, UnsupportedModel, "65 value heads a key head; moegraph runs 64"),
    (64, ModelFileError, "has shape"),  # the tensors are of other heads
])  # fmt: skip
def test_heads_that_graphs_have_no_room_to_repeat_are_refused(
    tmp_path: Path, n: int, kind: type[Exception], words: str
) -> None:
    keys, tensors = preset_contents("qwen3next")
    many = {"time_step_rank": n, "inner_size": n * 64, "group_count": 1}
    keys |= {f"qwen3next.ssm.{key}": value for key, value in many.items()}
    file_of(keys, tensors).write_sparse(tmp_path / "m.gguf")
    with pytest.raises(kind, match=words):
        open_model(tmp_path / "m.gguf")
