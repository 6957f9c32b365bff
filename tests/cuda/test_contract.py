"""The CUDA side of the exactness contract: within twice what upstream differs from itself.

Upstream's own differences are measured in the same test, on the same file and tokens: between
everything on the device and the experts of all layers on the CPU (-ncmoe), prompts with everything
on the CPU (-ngl 0), and between single rows and the same tokens in a prompt. With -ncmoe the CPU
computes the experts at every width, or nothing would differ for 32 rows and more. For experts that
add little, or whose products the CPU rounds as the device does, -ncmoe says too little; -ngl 0
changes all the rest as well.

With MOEGRAPH_REPORT_DIR set, all numbers and every row that parts, with its margin, are written to
cuda-contract.jsonl in that folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.cache_rules import check_cache
from helpers.shared import greedy_tokens
from oracle.client import Step
from regression.compare import (
    FORCED_POSITIONS,
    FREE_PROMPTS,
    FREE_TOKENS,
    PROMPT_LENGTHS,
    Difference,
    first_differences,
    margins,
    nmse,
)
from regression.contract import Report, Rows, judge_rows, parted_rows, parting_difference
from regression.harness import (
    FAMILIES,
    KV_TYPES,
    MODELS,
    MODES,
    Models,
    Upstream,
    held_out_text,
    open_engine,
    our_logits,
    random_ids,
    start_oracle,
)

if TYPE_CHECKING:
    from moegraph.engine import Engine

THREADS = 4
RESIDENT = {"n_cpu_moe": 0}
EXPERTS_ON_CPU = {"n_cpu_moe": 999, "op_offload": False}
# For f16 alone: with quantized K, upstream's CPU also rounds queries to eight bits.
ALL_ON_CPU = {"device": "cpu"}
# Decode steps after the longest prompt: enough for a mean that a few flips do not decide.
SINGLE_ROWS = 256


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("contract-models"))


@pytest.fixture(scope="module")
def upstream(request: pytest.FixtureRequest) -> Iterator[Upstream]:
    with start_oracle() as oracle:
        upstream = Upstream(oracle)
        if not upstream.has_gpu():
            reason = f"the upstream build in {oracle.folder} has no CUDA"
            must = any("cuda" in given for given in request.config.getoption("require"))
            (pytest.fail if must else pytest.skip)(reason)
        yield upstream


@pytest.fixture(scope="module")
def report() -> Report:
    folder = os.environ.get("MOEGRAPH_REPORT_DIR")
    return Report(Path(folder) if folder else None)


def settings(n_ctx: int = 1024, kv: str = "f16") -> dict[str, Any]:
    """Return what both upstream runs have in common."""
    return {"device": "gpu", "n_ctx": n_ctx, "threads": THREADS, "type_k": kv, "type_v": kv}


def tokens(n_vocab: int) -> tuple[list[list[int]], list[int]]:
    """Return the prompts, and the tokens decoded after the last."""
    prompts = [random_ids(n_vocab, n, seed=n) for n in PROMPT_LENGTHS]
    return prompts, random_ids(n_vocab, SINGLE_ROWS, seed=1)


def our_rows(engine: Engine, kv: str) -> dict[tuple[str, str], np.ndarray]:
    """Return our logits: of the prompts, and of single rows, a prompt of one token among them."""
    prompts, more = tokens(engine.hparams.n_vocab)
    rows = [our_logits(engine, ids) for ids in prompts]
    at = len(prompts[-1])
    single = [engine.forward_logits([token], pos0=at + i) for i, token in enumerate(more)]
    return split(rows, single, kv)


def upstream_rows(
    upstream: Upstream, path: Path, n_vocab: int, kv: str, **cfg: Any
) -> dict[tuple[str, str], np.ndarray]:
    """Return the same of upstream."""
    prompts, more = tokens(n_vocab)
    cfg = {**settings(kv=kv), **cfg}
    rows = [upstream.logits(path, ids, **cfg) for ids in prompts]
    return split(rows, [upstream.decode_steps(path, prompts[-1], more, **cfg)], kv)


def together(
    upstream: Upstream, path: Path, n_vocab: int, kv: str
) -> dict[tuple[str, str], np.ndarray]:
    """Return upstream's rows of the same single tokens, read as a part of a prompt.

    Its kernel for one row rounds queries to eight bits where K is quantized, and its kernel for
    prompts does not; ours never does. So upstream differs from itself by what it differs from us.
    """
    prompts, more = tokens(n_vocab)
    rows = upstream.logits(path, [*prompts[-1], *more], **settings(kv=kv), **RESIDENT)
    alone = next(ids for ids in prompts if len(ids) == 1)
    first = upstream.logits(path, [*alone, *alone], **settings(kv=kv), **RESIDENT)[:1]
    return {("single", kv): np.concatenate([first, rows[len(prompts[-1]) :]])}


def others(upstream: Upstream, path: Path, n_vocab: int) -> list[Rows]:
    """Return upstream's rows of its other runs."""
    experts, prompt = {}, {}
    for kv in KV_TYPES:
        experts |= upstream_rows(upstream, path, n_vocab, kv, **EXPERTS_ON_CPU)
        prompt |= together(upstream, path, n_vocab, kv)
    cfg = {**settings(), **ALL_ON_CPU}
    rows = [upstream.logits(path, ids, **cfg) for ids in tokens(n_vocab)[0] if len(ids) > 1]
    return [experts, prompt, {("prompt", "f16"): np.concatenate(rows)}]


def split(
    prompts: list[np.ndarray], single: list[np.ndarray], kv: str
) -> dict[tuple[str, str], np.ndarray]:
    """Sort rows by kind: a prompt of one row is computed as a decode step is."""
    alone = [rows for rows in prompts if len(rows) == 1]
    together = [rows for rows in prompts if len(rows) > 1]
    return {
        ("prompt", kv): np.concatenate(together),
        ("single", kv): np.concatenate([*alone, *single]),
    }


def judge(report: Report, what: str, ours: Rows, theirs: Rows, others: Sequence[Rows]) -> None:
    """List the rows that part and hold all of ours to upstream's own differences.

    others: upstream's other runs; the first has all rows.
    """
    for (kind, kv), rows in ours.items():
        for row in parted_rows(rows, theirs[kind, kv], others[0][kind, kv]):
            report.add(what, kind=kind, kv=kv, **row)
    report.judge(what, judge_rows(ours, theirs, *others))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_prompts_and_single_rows_stay_within_twice_upstreams_own_difference(
    name: str, mode: str, models: Models, upstream: Upstream, report: Report
) -> None:
    path = models.path(name)
    ours: dict[tuple[str, str], np.ndarray] = {}
    theirs: dict[tuple[str, str], np.ndarray] = {}
    for kv in KV_TYPES:
        with open_engine(path, device="cuda", mode=mode, type_k=kv, type_v=kv) as engine:
            ours |= our_rows(engine, kv)
            n_vocab = engine.hparams.n_vocab
        theirs |= upstream_rows(upstream, path, n_vocab, kv, **RESIDENT)
    judge(report, f"{name} {mode}", ours, theirs, others(upstream, path, n_vocab))


@pytest.mark.parametrize("name", MODELS)
def test_with_experts_missing_and_default_settings_the_bound_is_the_same(
    name: str, models: Models, upstream: Upstream, report: Report
) -> None:
    """Half of the experts have slots; who computes the others is decided while it runs."""
    path = models.path(name)
    with open_engine(path, device="cuda") as whole:
        hp = whole.hparams
    slots = len(hp.routed_layers) * hp.n_expert // 2
    ours: dict[tuple[str, str], np.ndarray] = {}
    theirs: dict[tuple[str, str], np.ndarray] = {}
    for kv in KV_TYPES:
        placed = {"pin_layers": 0, "cache_slots": slots, "type_k": kv, "type_v": kv}
        with open_engine(path, device="cuda", **placed) as engine:
            assert engine.config.miss == "auto"
            ours |= our_rows(engine, kv)
            check_cache(engine.runner.cache)
            assert engine.runner.cache.stats.misses.sum() > 0
        theirs |= upstream_rows(upstream, path, hp.n_vocab, kv, **RESIDENT)
    what = f"{name} with half of the experts"
    judge(report, what, ours, theirs, others(upstream, path, hp.n_vocab))


@pytest.mark.parametrize("name", MODELS)
def test_argmax_of_held_out_text_differs_at_most_twice_as_often_as_upstreams_own(
    name: str, models: Models, upstream: Upstream, report: Report
) -> None:
    path = models.path(name)
    ids = upstream.oracle.tokenize(path, held_out_text())[:FORCED_POSITIONS]
    gpu = upstream.logits(path, ids, **settings(2048), **RESIDENT)
    ways = (EXPERTS_ON_CPU, ALL_ON_CPU)
    runs = [upstream.logits(path, ids, **{**settings(2048), **way}) for way in ways]
    with open_engine(path, device="cuda", n_ctx=2048) as engine:
        ours = our_logits(engine, ids, 512)
    what = f"{name} {FORCED_POSITIONS} positions"
    for row in parted_rows(ours, gpu, runs[0]):
        report.add(what, **row)
    flips, *most = (int((rows.argmax(1) != gpu.argmax(1)).sum()) for rows in (ours, *runs))
    error = Difference(nmse(ours, gpu), max(nmse(rows, gpu) for rows in runs))
    report.judge(what, [error, Difference(flips, max(most), "argmax flips")])


def test_free_running_texts_part_from_upstreams_at_most_twice_as_often_as_its_own(
    models: Models, upstream: Upstream, report: Report
) -> None:
    """Over all models together: see parting_difference."""
    every: list[list[list[list[int]]]] = [[], [], []]
    for name in MODELS:
        path = models.path(name)
        text = upstream.oracle.tokenize(path, held_out_text())
        prompts = [text[97 * i : 97 * i + 1 + 5 * i] for i in range(FREE_PROMPTS)]
        gpu, _ = upstream.oracle.greedy(path, prompts, FREE_TOKENS, **settings(), **RESIDENT)
        cpu, _ = upstream.oracle.greedy(path, prompts, FREE_TOKENS, **settings(), **EXPERTS_ON_CPU)
        with open_engine(path, device="cuda") as engine:
            ours = [greedy_tokens(engine, prompt, FREE_TOKENS) for prompt in prompts]
        for texts, kept in zip((ours, gpu, cpu), every, strict=True):
            kept.append(texts)
        for who, texts in (("ours", ours), ("upstream's other setting", cpu)):
            for i, at in first_differences(texts, gpu):
                # as a prompt: within what a decode step differs from it by
                step = Step([*prompts[i], *gpu[i][:at]], "last")
                (result,) = upstream.oracle.run(path, [step], **settings(), **RESIDENT)
                gap = float(margins(result.logits)[0])
                report.add(f"{name} text", who=who, prompt=i, token=at, margin=gap)
    report.judge("all texts", [parting_difference(*every)])


@pytest.mark.parametrize("name", ("tiny", "tiny-oss", "kquant40", "mini35b", *FAMILIES))
def test_the_cpu_and_the_device_agree_as_upstreams_do(
    name: str, models: Models, upstream: Upstream, report: Report
) -> None:
    """CUDA against CPU: both ours and upstream's, the same two devices."""
    path = models.path(name)
    with open_engine(path, device="cuda") as engine:
        ids = random_ids(engine.hparams.n_vocab, 300)
        ours = our_logits(engine, ids)
    cpu = upstream.logits(path, ids, n_ctx=1024, threads=THREADS)
    gpu = upstream.logits(path, ids, **settings(), **RESIDENT)
    report.judge(f"{name}, the CPU and the device", [Difference(nmse(ours, cpu), nmse(gpu, cpu))])
