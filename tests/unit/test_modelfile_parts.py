"""Model files in several parts: which are found, which are refused and how."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ggufbytes import File, Shape, T, kv, model_file, model_pairs, model_tensors
from helpers.modelfiles import Write, refused, write

from moegraph.arch import open_model
from moegraph.errors import ModelFileError

__all__ = ["write"]


def _message(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_model(path)
    return str(caught.value)


def split(write: Write, n: int = 3, **changes: int) -> list[Path]:
    """Write a model in n parts; changes replaces split keys of the second part or the total."""
    tensors = model_tensors(Shape())
    total = changes.get("total", len(tensors))
    paths = []
    for no in range(n):
        wrong = changes if no == 1 else {}
        pairs = list(model_pairs(Shape()).values()) if no == 0 else []
        pairs += [
            kv("split.no", T.UINT16, wrong.get("no", no)),
            kv("split.count", T.UINT16, wrong.get("count", n)),
            kv("split.tensors.count", T.INT32, total),
        ]
        mine = tensors[no * len(tensors) // n : (no + 1) * len(tensors) // n]
        mine = mine + [tensors[0]] * wrong.get("repeat", 0)
        paths.append(write(File(pairs, mine), f"m-{no + 1:05}-of-{n:05}.gguf"))
    return paths


def test_parts_are_followed_from_the_first(write: Write) -> None:
    paths = split(write)
    with open_model(paths[0]) as model:
        assert model.paths == tuple(paths)
        assert [t.part for t in model.tensors.values()][:: len(model.tensors) - 1] == [0, 2]
        for tensor in model_tensors(Shape()):
            assert model.map(model.tensors[str(tensor.name)]).tobytes() == tensor.payload()


def test_what_is_wrong_with_parts_is_said(write: Write, tmp_path: Path) -> None:
    paths = split(write)
    assert "this is part 2 of 3; open the first part, m-00001-of-00003.gguf" in refused(paths[1])
    paths[2].rename(tmp_path / "away")
    assert "part 3 of the model is missing" in _message(paths[0])
    (tmp_path / "away").rename(paths[2])
    renamed = paths[0].rename(tmp_path / "model.gguf")
    assert "give the parts their original names" in refused(renamed)
    wrong = renamed.rename(tmp_path / "m-00001-of-00004.gguf")
    assert "the file name says part 1 of 4" in refused(wrong)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no": 2}, "split.no is 2, but the file name says 1"),
        ({"count": 4}, "split.count is 4, but the first part says 3"),
        ({"total": 5}, "split.tensors.count is 5 but the 3 parts hold"),
        ({"repeat": 1}, "tensor token_embd.weight is also in"),
    ],
)
def test_parts_that_disagree_are_refused(write: Write, changes: dict[str, int], words: str) -> None:
    total = {"total": len(model_tensors(Shape())) + 1} if "repeat" in changes else {}
    assert words in _message(split(write, **(changes | total))[0])


def test_a_huge_part_count_is_refused_before_any_name_is_tried(write: Write) -> None:
    pairs = {
        "split.count": kv("split.count", T.UINT16, 65_535),
        "split.no": kv("split.no", T.UINT16, 0),
    }
    path = write(model_file(pairs=pairs), "m-00001-of-65535.gguf")
    assert "allowed are 1 to 1024" in refused(path)
