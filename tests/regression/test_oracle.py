"""The judge itself: it is unpatched, it repeats itself, and watching it does not change it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle.client import Oracle, OracleError, Step
from regression.harness import ROOT, Models, Upstream, random_ids

NAME = "legacy32"
N_VOCAB = 1024


def test_the_libraries_are_those_of_the_oracle_folder(upstream: Upstream) -> None:
    info = upstream.oracle.info()
    for name, files in info["libraries"].items():
        assert len(files) == 1, f"{name}: {files}"
        assert Path(files[0]).resolve().is_relative_to(upstream.oracle.folder.resolve())
    assert info["commit"].startswith("0c1e570")


def test_patched_libraries_are_refused(upstream: Upstream, tmp_path: Path) -> None:
    """A folder of ours posing as upstream must not become the judge."""
    with pytest.raises(OracleError, match="exports moegraph_patchset"):
        Oracle(ROOT / "moegraph" / "lib")


def test_a_folder_without_libraries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OracleError, match=r"FileNotFoundError|has no llama_cpp"):
        Oracle(tmp_path)


def test_the_same_request_gives_the_same_bits(models: Models, upstream: Upstream) -> None:
    path, ids = models.path(NAME), random_ids(N_VOCAB, 50)
    first = upstream.oracle.logits(path, ids, n_ctx=512)
    upstream.oracle.request("unload")
    again = upstream.oracle.logits(path, ids, n_ctx=512)
    assert np.array_equal(first, again)
    assert np.isfinite(first).all()


def test_keeping_nodes_changes_nothing(models: Models, upstream: Upstream) -> None:
    path, ids = models.path(NAME), random_ids(N_VOCAB, 50)
    plain = upstream.oracle.logits(path, ids, n_ctx=512)
    (kept,) = upstream.oracle.run(path, [Step(ids, nodes=["*"])], n_ctx=512)
    assert kept.logits is not None
    assert np.array_equal(kept.logits, plain)
    assert np.array_equal(kept.nodes["result_output", -1].reshape(plain.shape), plain)
    ids_kept = kept.nodes["ffn_moe_topk", 3]
    assert ids_kept.dtype == np.int32
    assert ids_kept.shape == (1, 1, 50, 4)
    assert all(len(set(row)) == 4 for row in ids_kept[0, 0].tolist())


@pytest.mark.parametrize("fields, words", [
    ({"model": "/nowhere.gguf", "steps": []}, "cannot load"),
    ({"model": "m", "cfg": {"n_contexts": 3}, "steps": []}, "unknown settings"),
])  # fmt: skip
def test_a_wrong_request_is_an_error_and_the_process_lives(
    fields: dict[str, object], words: str, upstream: Upstream
) -> None:
    with pytest.raises(OracleError, match=words):
        upstream.oracle.request("run", out="/dev/null", **fields)
    assert upstream.oracle.info()["ok"]
