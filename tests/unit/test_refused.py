"""What every family refuses or names, in files of the small presets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.ggufbytes import Q, Tensor
from helpers.shared import PRESETS
from helpers.sparse import file_of, preset_contents

from moegraph.arch import ModelFile, open_model
from moegraph.arch.model import ARCHITECTURES
from moegraph.errors import ModelFileError, UnsupportedModel

SMALL = {preset.shape.arch: name for name, preset in PRESETS.items() if preset.shape.n_embd < 600}
NEXTN = ("qwen35moe", "qwen3next", "glm4moe", "deepseek2")
Open = Callable[..., ModelFile]


@pytest.fixture(params=ARCHITECTURES)
def arch(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def opened(arch: str, tmp_path: Path) -> Open:
    keys, tensors = preset_contents(SMALL[arch])

    def write(added: tuple[Tensor, ...] = (), without: str = "", **more: Any) -> ModelFile:
        """Open a file with other keys and tensors."""
        values = keys | {f"{arch}.{key.replace('__', '.')}": value for key, value in more.items()}
        kept = [one for one in tensors if one.name != without]
        file_of(values, [*kept, *added]).write_sparse(tmp_path / "m.gguf")
        return open_model(tmp_path / "m.gguf")

    return write


def test_attention_that_is_not_causal_is_refused(opened: Open) -> None:
    opened(attention__causal=True).close()
    with pytest.raises(UnsupportedModel, match="attention.causal is false"):
        opened(attention__causal=False)


def test_layers_are_no_prediction_blocks_where_these_are_not_run(arch: str, opened: Open) -> None:
    if arch not in NEXTN:
        with pytest.raises(UnsupportedModel, match="nextn_predict_layers is 1; moegraph does not"):
            opened(nextn_predict_layers=1)


def test_every_unknown_tensor_is_named(arch: str, opened: Open) -> None:
    with opened() as model:
        hp = model.hparams
        assert model.warnings == ()
    last = hp.n_layer + hp.n_layer_nextn - 1
    for name in (f"blk.{last}.unknown.weight", "blk.0.attn_norm.bias", "unknown.weight"):
        with opened((Tensor(name, (64,), Q.F32),)) as model:
            (warning,) = model.warnings
        assert name in warning and "not part of this architecture" in warning


def test_the_embedding_is_the_head_only_where_llama_cpp_has_it_so(arch: str, opened: Open) -> None:
    if arch in ("gpt-oss", "olmoe"):
        with pytest.raises(ModelFileError, match="output.weight missing"):
            opened(without="output.weight")
    else:
        opened(without="output.weight").close()
