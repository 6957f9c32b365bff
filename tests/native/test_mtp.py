"""The MTP block: its K and V follow the model's, and a chain of drafts is its steps one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.mtp import MtpModel

from moegraph.arch import open_model
from moegraph.arch.mtp import require_nextn
from moegraph.config import EngineConfig
from moegraph.draft.mtp import MtpDrafter
from moegraph.errors import ModelFileError, OutOfDeviceMemory
from moegraph.ggml.lib import C, ffi
from moegraph.kinds import MOST_BEHIND
from moegraph.placement.drafters import kept_experts, mtp_bytes
from moegraph.placement.footprint import needed_bytes
from moegraph.resident.layout import MTP_ROWS
from moegraph.resident.mtp import open_mtp
from moegraph.runner import Batch

ModelPath = Callable[[str], Path]
EXACT: dict[str, Any] = {"cpu_reference": True}


def random_ids(n: int, seed: int = 1, n_vocab: int = 1000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, n_vocab, n).astype(np.int32)


def assert_same(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def commit(model: MtpModel, tokens: np.ndarray, parents: list[int], path: list[int]) -> None:
    """Verify a tree of rows, take a path of it, and tell the drafter."""
    model.runner.submit(Batch.verify(tokens[None], (0,), [parents]))
    model.runner.collect()
    model.runner.commit({0: path})
    model.drafter.committed([(0, model.state.n_past[0] - len(path), tokens[path].tolist())])


@pytest.mark.parametrize(("preset", "n_seq"), [("mini35b", 2), ("float32", 1)])
def test_a_prompt_gives_the_same_keys_in_any_pieces(
    model_path: ModelPath, no_leak: None, preset: str, n_seq: int
) -> None:
    path, ids, slot = model_path(preset), random_ids(100), n_seq - 1
    settings = {**EXACT, "n_seq": n_seq}
    with MtpModel(path, **settings) as model:
        model.read(ids, slot)
        wanted = model.cache(slot)
        draft = model.drafter.draft(slot, 5, 6, 3)
        assert np.any(wanted[0][1:] != wanted[0][:-1]) and len(wanted[0]) == 100
    for max_rows, cuts in ((7, []), (64, [30, 31, 90]), (16, [64])):
        with MtpModel(path, max_rows, **settings) as model:
            for first, end in zip([0, *cuts], [*cuts, 100]):
                model.read(ids[first:end], slot)
            assert_same(model.cache(slot), wanted)
            again = model.drafter.draft(slot, 5, 6, 3)
            np.testing.assert_array_equal(again.tokens, draft.tokens)
            np.testing.assert_array_equal(again.log_p, draft.log_p)


def test_accepted_tokens_give_the_same_keys_as_a_prompt(
    model_path: ModelPath, no_leak: None
) -> None:
    ids = random_ids(60)
    with MtpModel(model_path("mini35b"), **EXACT) as model:
        model.read(ids)
        wanted = model.cache()
    with MtpModel(model_path("mini35b"), **EXACT) as model:
        model.read(ids[:40])
        for token in ids[40:44].tolist():
            model.drafter.draft(0, token, 5, 1)  # what it leaves behind the known rows is rewritten
            model.decode(token)
        model.drafter.draft(0, int(ids[44]), 3, 1)
        commit(model, ids[44:49], [-1, 0, 1, 2, 3], [0, 1, 2])
        # rows 1 and 3 are drafts that were wrong
        tree = np.array([ids[47], 3, ids[48], 9, ids[49]], dtype=np.int32)
        commit(model, tree, [-1, 0, 0, 2, 2], [0, 2, 4])
        commit(model, ids[50:60], list(range(-1, 9)), list(range(10)))
        assert_same(model.cache(), wanted)


@pytest.mark.parametrize("n_each", [1, MOST_BEHIND])
def test_tokens_without_drafts_are_caught_up_with(
    model_path: ModelPath, no_leak: None, n_each: int
) -> None:
    """Of two sequences in turn, so many tokens at once; the ring of hidden states wraps around."""
    ids, other = random_ids(188), random_ids(80, seed=2)
    settings = {**EXACT, "n_seq": 2}
    with MtpModel(model_path("mini35b"), **settings) as model:
        model.read(ids, 0)
        model.read(other, 1)
        wanted = model.cache(0), model.cache(1)
    with MtpModel(model_path("mini35b"), **settings) as model:
        model.read(ids[:20], 0)
        model.read(other[:20], 1)
        known, texts, tell = [20, 20], [ids.tolist(), other.tolist()], model.drafter.committed
        model.drafter.committed = lambda *args: None  # type: ignore[method-assign]
        for at in range(20, len(ids)):
            for slot, text in enumerate(texts):
                if at < len(text):
                    model.decode(text[at], slot)
                n = min(at + 1, len(text))
                if n - known[slot] == n_each or n == len(text) > known[slot]:
                    tell([(slot, known[slot], text[known[slot] : n])])
                    known[slot] = n
        assert_same(model.cache(1), wanted[1])
        assert_same(model.cache(0), wanted[0])
        # of a sequence that holds something else nothing is computed
        tell([(1, 81, [5, 6])])
        assert_same(model.cache(1), wanted[1])


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_a_chain_begins_with_the_shorter_ones(model_path: ModelPath, kv: str) -> None:
    with MtpModel(model_path("mini35b"), type_k=kv, type_v=kv, n_seq=2) as model:
        model.read(random_ids(300), 1)
        model.drafter.reserve()
        longest = model.drafter.draft(1, 7, 99, 4)
        assert longest.n_depth == model.drafter.max_draft == 16
        rows = model.logits(16)
        assert (longest.tokens[:, 0] == rows.argmax(axis=1)).all()
        for n in (1, 2, 7):
            shorter = model.drafter.draft(1, 7, n, 4)
            np.testing.assert_array_equal(shorter.tokens, longest.tokens[:n])
            np.testing.assert_array_equal(model.logits(n), rows[:n])


def test_a_chain_stops_at_the_end_of_the_context(model_path: ModelPath) -> None:
    with MtpModel(model_path("mini35b"), n_ctx=256) as model:
        model.read(random_ids(253))
        assert model.drafter.draft(0, 1, 8, 1).n_depth == 3
        for token in (1, 2, 3):
            model.decode(token)
        assert model.drafter.draft(0, 4, 8, 1).n_depth == 0


@pytest.mark.parametrize("preset", ["mini35b", "float32"])
def test_a_part_of_the_vocabulary_drafts_as_the_whole(
    model_path: ModelPath, no_leak: None, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    path, ids = model_path(preset), random_ids(40)
    with MtpModel(path) as model:
        model.read(ids)
        wanted = model.drafter.draft(0, 3, 4, 1).tokens[:, 0]
        rows, n_bytes = model.logits(4), model.drafter.n_bytes
    part = np.unique([*wanted, *range(1, 1000, 3)]).astype(np.int32)
    monkeypatch.setattr("moegraph.resident.mtp.frequent_ids", lambda *_: part)
    with MtpModel(path, n_vocab=len(part)) as model:
        model.read(ids)
        draft = model.drafter.draft(0, 3, 4, 5)
        found = model.logits(4)
        np.testing.assert_array_equal(found, rows[:, part])
        np.testing.assert_array_equal(draft.tokens[:, 0], wanted)
        order = np.argsort(-found, axis=1, kind="stable")[:, :5]
        np.testing.assert_array_equal(draft.tokens, part[order])
        assert draft.problem(model.hp.n_vocab) == ""
        assert model.drafter.n_bytes < n_bytes + len(part) * 4 * (model.hp.n_embd + 64)


@pytest.mark.parametrize(("preset", "n_kept"), [("mini35b", 5), ("float32", 0)])
def test_experts_that_are_fetched_change_no_draft(
    model_path: ModelPath, no_leak: None, preset: str, n_kept: int
) -> None:
    path, ids = model_path(preset), random_ids(60)
    found = []
    for kept in (None, n_kept):
        with MtpModel(path, n_kept=kept) as model:
            model.read(ids)
            rows = []
            for turn in range(40):  # experts are exchanged meanwhile
                model.drafter.draft(0, 3 + turn % 2, 1 + turn % 5, 1)
                rows.append(model.logits(1 + turn % 5))
            found.append(np.concatenate(rows))
            experts, n_bytes = model.block.experts, model.drafter.n_bytes
            assert (experts is None) == (kept is None)
            if experts:
                assert (experts.n_exchanged > 0) == (n_kept > 0)
    np.testing.assert_array_equal(*found)
    with MtpModel(path) as model:
        assert n_bytes < model.drafter.n_bytes


@pytest.mark.parametrize("n_vocab", [0, 300])
def test_drafts_of_nan_are_told_from_others(model_path: ModelPath, n_vocab: int) -> None:
    """Of a model without quantized products, because those hide NaN."""
    with MtpModel(model_path("float32"), n_vocab=n_vocab) as model:
        model.read(random_ids(30))
        wanted = model.drafter.draft(0, 3, 4, 2)
        snapshot = model.state.snapshot(0)
        bad = np.full(model.hp.n_embd, np.nan, dtype=np.float32)
        C.ggml_backend_tensor_set(model.stage.state.last_out, ffi.from_buffer(bad), 0, bad.nbytes)
        draft = model.drafter.draft(0, 3, 4, 2)
        assert draft.problem(model.hp.n_vocab) == "its probabilities are not numbers"
        model.state.restore(snapshot)
        again = model.drafter.draft(0, 3, 4, 2)
        np.testing.assert_array_equal(again.tokens, wanted.tokens)
        np.testing.assert_array_equal(again.log_p, wanted.log_p)
        snapshot.close()


def test_a_block_that_is_not_whole_is_refused(model_path: ModelPath, no_leak: None) -> None:
    with open_model(model_path("legacy32")) as file:
        with pytest.raises(ModelFileError, match=r"0 prediction \(MTP\) blocks"):
            require_nextn(file.path, file.hparams, file.tensors)
    with MtpModel(model_path("mini35b")) as model, open_model(model_path("mini35b")) as file:
        file.tensors.pop(f"blk.{model.hp.n_layer}.nextn.enorm.weight")
        with pytest.raises(ModelFileError, match="lacks nextn.enorm.weight"):
            open_mtp(model.stage, file)


@pytest.mark.parametrize(("preset", "n_seq", "n_vocab", "n_kept"), [
    ("mini35b", 3, 0, None), ("float32", 1, 700, None), ("mini35b", 1, 0, 8), ("float32", 1, 0, 0),
])  # fmt: skip
def test_the_plan_counts_what_it_takes(
    model_path: ModelPath, preset: str, n_seq: int, n_vocab: int, n_kept: int | None
) -> None:
    settings = {"n_seq": n_seq, "n_ubatch": 256, "n_vocab": n_vocab, "n_kept": n_kept}
    with MtpModel(model_path(preset), MTP_ROWS, **settings) as model:
        model.drafter.reserve()
        taken = model.drafter.n_bytes + model.stage.hidden_states.n_bytes
        before = model.drafter.n_bytes
        model.read(random_ids(400))
        model.drafter.draft(0, 1, 16, 8)
        model.decode(1)
        assert model.drafter.n_bytes == before
        with open_model(model_path(preset)) as file:
            config = EngineConfig(n_seq=n_seq, n_ctx=512, draft_vocab=n_vocab)
            planned = mtp_bytes(file, config, 512, n_kept)
    assert taken <= planned <= 1.7 * taken


def has_block(engine: Any) -> bool:
    """Return whether an engine has the MTP block."""
    return any(isinstance(drafter, MtpDrafter) for drafter in engine._loaded.drafters)


def test_an_engine_loads_the_block_if_asked(open_engine: Callable[..., Any]) -> None:
    plain = open_engine("mini35b", spec="off")
    assert plain.memory()["drafters_bytes"] == 0
    asked = open_engine("mini35b", spec="mtp", n_draft=3)
    [drafter] = asked._loaded.drafters
    assert isinstance(drafter, MtpDrafter) and asked.stage.hidden_states.n_rows == 32
    taken, planned = asked.memory(), asked.plan.bytes
    assert 0 < taken["drafters_bytes"] <= planned["drafters"]
    assert taken["kv_bytes"] == plain.memory()["kv_bytes"] <= planned["kv"]
    ids = random_ids(50)
    np.testing.assert_array_equal(asked.forward_logits(ids), plain.forward_logits(ids))
    assert has_block(open_engine("mini35b", spec="auto"))
    assert not has_block(open_engine("legacy32", spec="auto"))
    with pytest.raises(ModelFileError, match=r"0 prediction \(MTP\) blocks"):
        open_engine("legacy32", spec="mtp")


def test_auto_leaves_the_block_where_experts_need_the_memory(
    model_path: ModelPath, open_engine: Callable[..., Any]
) -> None:
    with open_model(model_path("mini35b")) as file:
        config = EngineConfig(n_ctx=512, n_ubatch=64, n_draft=15)
        need = needed_bytes(file, config, 512, is_own=False)
        kept = kept_experts(file.hparams.n_expert)
        drafters, fewer = (mtp_bytes(file, config, 512, n) for n in (None, kept))
    assert fewer < drafters
    least, quarter = need.fixed + need.staging, need.experts // 4
    for n_bytes, settings, loaded in (
        (need.fixed + need.experts + drafters, {"spec": "auto"}, None),
        (need.fixed + need.experts + drafters - 1, {"spec": "auto"}, kept),
        (need.fixed + need.experts + fewer - 1, {"spec": "auto"}, False),
        (least + quarter, {"spec": "auto"}, False),
        (least + quarter + fewer, {"spec": "mtp"}, kept),
        (least + quarter + drafters, {"spec": "mtp", "host_pin": "none"}, None),
    ):
        settings = {"vram": f"{n_bytes}B", "miss": "stream", "host_pin": "all", **settings}
        engine = open_engine("mini35b", **settings)
        assert has_block(engine) == (loaded is not False)
        if loaded is not False:
            experts = engine._loaded.drafters[0]._block.experts
            assert (experts and experts.n_kept) == loaded
            assert 0 < engine.memory()["drafters_bytes"] <= engine.plan.bytes["drafters"]
        assert engine.plan.total <= n_bytes
        engine.close()


@pytest.mark.parametrize("part", ["Weights"])
def test_auto_goes_on_without_a_block_that_cannot_be_loaded(
    open_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    ids = random_ids(30)
    wanted = open_engine("mini35b").forward_logits(ids)

    def fails(*_: object, **__: object) -> None:
        raise OutOfDeviceMemory("no room for it")

    monkeypatch.setattr(f"moegraph.resident.mtp.{part}", fails)
    engine = open_engine("mini35b", spec="auto")
    assert not has_block(engine) and engine.stage.hidden_states.layers == ()
    assert engine.warnings == ["no drafts by a model: no room for it"]
    np.testing.assert_array_equal(engine.forward_logits(ids), wanted)
    with pytest.raises(OutOfDeviceMemory):
        open_engine("mini35b", spec="mtp")
