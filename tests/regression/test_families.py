"""The contract of a family, beside test_matched.py and test_invariance.py.

Upstream's bits wherever the experts are; requests in company, and beginnings that are not computed
anew, give what a cold engine gives; what is planned covers what is taken. A family is a preset of
scripts/modelgen whose name is in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.device_books import Books, keep_books, planned
from helpers.drafters import write_small
from helpers.shared import PRESETS, greedy_tokens
from regression.compare import assert_logits_equal
from regression.harness import FAMILIES, THREADS, Models, Upstream, open_engine, random_ids

from moegraph.arch import open_model
from moegraph.sampling import SamplingParams

if TYPE_CHECKING:
    from moegraph.engine import Engine

# Slots are for a third of the experts.
SLOTS = {"pin_layers": 0, "cache_slots": 1 / 3, "policy": "lru"}
WAYS: dict[str, dict[str, Any]] = {
    "resident": {},
    "uploaded": {**SLOTS, "miss": "stream", "host_pin": "none"},
    "fetched": {**SLOTS, "miss": "stream", "host_pin": "all"},
    "on the CPU": {**SLOTS, "miss": "cpu", "n_threads": THREADS},
    "streamed": {"pin_layers": 0, "cache_slots": 0, "miss": "stream"},
    "pinned layers": {**SLOTS, "pin_layers": 1, "miss": "cpu"},
    "two devices": {"device": "cpu,cpu"},
    "two devices, fetched": {**SLOTS, "device": "cpu,cpu", "miss": "stream", "host_pin": "all"},
}
CFG = {"n_ctx": 1024, "n_ubatch": 48, "threads": 1}
# Passes of a sequence, and lengths of prompts, which are read in chunks of 48.
WIDTHS = (48, 7, *([1] * 12), 40, 1)
LENGTHS = (2, 9, 17, 40)
# A text of two tokens repeats itself, and look-up drafts.
TWO = {5: 100.0, 6: 100.0}


def settings_of(path: Path, way: str) -> dict[str, Any]:
    """Return the settings of a way, with slots as a number."""
    settings = {"n_ctx": 1024, "n_ubatch": 48, "n_threads": 1, **WAYS[way]}
    with open_model(path) as model:
        hp = model.hparams
        assert model.warnings == ()
    if settings.get("cache_slots"):
        settings["cache_slots"] = len(hp.routed_layers) * hp.n_expert // 3
    return settings


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_wherever_experts_are_bits_and_texts_are_upstreams_within_the_plan(
    name: str, way: str, models: Models, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, books = models.path(name), keep_books(monkeypatch)
    with open_engine(path, **settings_of(path, way)) as engine:
        n_vocab, at = engine.hparams.n_vocab, np.cumsum(WIDTHS)
        parts = [p.tolist() for p in np.split(np.array(random_ids(n_vocab, at[-1])), at[:-1])]
        theirs = upstream.parts(path, parts, **CFG)
        rows = [engine.forward_logits(p, pos0=end - len(p)) for p, end in zip(parts, at)]
        assert_logits_equal(np.concatenate(rows), theirs, f"{name} {way}")
        prompts = [random_ids(n_vocab, n, seed=n) * 3 for n in LENGTHS]
        texts = upstream.texts(path, prompts, 12, **CFG)
        assert [greedy_tokens(engine, prompt, 12) for prompt in prompts] == texts
        stats = engine.expert_stats()
        if "cache_slots" in WAYS[way]:
            assert stats is not None and stats.cache.missing.sum() > 0
            assert (stats.n_fetching > 0) == ("fetched" in way)
            assert (stats.n_cpu_experts > 0) == (WAYS[way]["miss"] == "cpu")
        memory, plan = engine.memory(), engine.plan.bytes
        assert memory["kv_bytes"] == plan["kv"]
        experts = sum(plan[part] for part in ("pinned", "slots", "staging"))
        assert memory["weights_bytes"] <= plan["weights"] + experts
        assert_planned(engine, books)


def assert_planned(engine: Engine, books: Books) -> None:
    """Fail if buffers and graphs ever had more bytes than the plan grants."""
    graphs = sum(part.graphs.n_bytes for part in engine.runner.parts)
    assert books.peak + graphs <= planned(engine)


def answer(
    engine: Engine, ids: Sequence[int], marks: Sequence[int] = (), reuse: bool = True
) -> tuple[list[int], np.ndarray, int]:
    """Return tokens, logits of the first, and how many prompt tokens were not computed."""
    kept = {"keep_logits": True, "reuse": reuse, "marks": marks}
    events = list(engine.generate(ids, max_tokens=4, text=False, ignore_eos=True, **kept))
    logits = events[0].logits
    assert logits is not None
    return [event.token for event in events], logits[-1], events[0].n_reused


def drafts_of(name: str, folder: Path) -> dict[str, Any]:
    """Return settings that draft with the file's MTP block, or else with a DFlash drafter."""
    shape = PRESETS[name].shape
    if shape.n_layer_nextn:
        return {"spec": "mtp"}
    sizes = {"n_vocab": shape.n_vocab, "n_embd": shape.n_embd, "target_layers": (0, 2)}
    return {"spec": "dflash", "draft": str(write_small(folder, "safetensors", **sizes))}


@pytest.mark.parametrize("way", ["on the CPU", "two devices, fetched"])
@pytest.mark.parametrize("name", FAMILIES)
def test_company_drafts_and_kept_beginnings_change_nothing_in_reference_mode(
    name: str, way: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from helpers.clients import Client, alone, serving, together

    from moegraph.passes import prefixes

    monkeypatch.setattr(prefixes, "_WORTH", 1)  # short prompts have marks near each other
    path, books, reference = models.path(name), keep_books(monkeypatch), {"cpu_reference": True}
    settings = {**settings_of(path, way), **reference, "n_seq": 3}
    settings |= drafts_of(name, tmp_path / "drafter") if "two" in way else {"spec": "lookup"}
    ids = random_ids(512, 300)
    asked = {100: [*ids[:150], 5], 240: ids}
    with open_engine(path, **settings) as engine:
        engine.keep_prefixes(tmp_path, 1 << 30)
        with serving(engine) as service:
            with together(service):
                clients = [
                    Client(service, random_ids(512, n, seed=n) * 3, max_tokens=16,
                           sampling=SamplingParams(temperature=t, seed=n, logit_bias=bias))
                    for n, t, bias in ((3, 1.0, TWO), (10, 0.0, {}), (24, 0.0, TWO), (53, 1.0, {}))
                ]  # fmt: skip
            for client in clients:
                client.wait()
            service.drain()
            counts, drafts = service.status().counts, engine.spec_stats()
        assert counts.pass_rows > counts.passes + 10  # passes were shared
        assert drafts is not None and drafts.drafted > 0
        answer(engine, ids[:250], (100, 240))
        warm = {n: answer(engine, prompt) for n, prompt in asked.items()}
        assert_planned(engine, books)
    with open_engine(path, n_threads=1, **reference) as cold:
        for client in clients:
            assert client.tokens == alone(cold, client.request)[0]
        wanted = {n: answer(cold, prompt, reuse=False) for n, prompt in asked.items()}
    with open_engine(path, **settings) as engine:
        engine.keep_prefixes(tmp_path, 1 << 30)
        for n in asked:
            compare(warm[n], wanted[n], n)
            compare(answer(engine, asked[n]), wanted[n], n)
            engine.prefixes.store.clear()
            engine.reset()


def compare(got: Any, cold: Any, n_reused: int) -> None:
    """Fail unless an answer is a cold one's, and so many tokens were not computed."""
    assert (got[0], got[2], cold[2]) == (cold[0], n_reused, 0)
    np.testing.assert_array_equal(got[1], cold[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_command_takes_its_file(
    name: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from moegraph.bench import machine
    from moegraph.cli import main

    monkeypatch.setattr(machine, "_COPY_BYTES", 1 << 20)  # 256 MiB say nothing of a family
    path, trace, cpu = models.path(name), tmp_path / "trace", ("--device", "cpu", "-t", 1)
    for args in (
        ("inspect", path),
        ("plan", path),
        ("run", path, "-p", "def f(", "-n", 4, *cpu),
        ("chat", path, "-p", "hello", "-n", 4, *cpu),
        ("bench", path, "-p", 40, "-n", 2, "-r", 1, "--run", 4, *cpu),
        ("doctor", "--measure", path, "--device", "cpu"),
        ("trace", path, "-p", "def", "-n", 8, "-o", trace, *cpu),
        ("simulate", trace, "--model", path, "--resident", 25),
    ):
        done = CliRunner().invoke(main, [str(arg) for arg in args])
        assert done.exit_code == 0 and done.output.strip(), (args, done.output)


def test_a_layer_without_routed_experts_yet_ends_with_its_residual(models: Models) -> None:
    """On devices that add missing experts later, the layer's output is the residual at first."""
    values = np.arange(24, dtype=np.float32).reshape(3, 8)
    from moegraph.ggml.device import Device
    from moegraph.ggml.handles import Buffer, Context
    from moegraph.ggml.lib import C, ffi
    from moegraph.ggml.ops import F32, Builder

    with open_model(models.path("qwen3moe")) as model, Context(16, 16) as context:
        device = Device("cpu")
        b = Builder(context, 16)
        residual = b.leaf(F32, (8, 3), "residual")
        out = model.hparams.layer_end(b, None, residual, residual, None, 0)
        with Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, device.buft)):
            C.ggml_backend_tensor_set(residual, ffi.from_buffer(values), 0, values.nbytes)
            device.check(C.mg_launch(device.compute.ptr, b.graph, ffi.NULL, 0), "the end")
            device.synchronize()
            found = np.empty_like(values)
            C.ggml_backend_tensor_get(out, ffi.from_buffer(found), 0, found.nbytes)
        device.close()
    np.testing.assert_array_equal(found, values)
