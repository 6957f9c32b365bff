"""Greedy texts of one model, computed in many ways that should not change a token of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from helpers.clients import Client, serving, together
from helpers.scripted_drafts import AnyController, ScriptedDrafter
from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.draft.lookup import LookUp
from moegraph.engine import Engine
from moegraph.passes.speculation import Speculation
from moegraph.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
N_CLIENTS = 8
CHUNKS = (64, 512)
ON_GPU: dict[str, Any] = {"device": "cuda", "deterministic": True}
# Prompts around the widths at which kernels change, and of several chunks.
LENGTHS = (
    5, 9, 20, 31, 33, 40, 48, 64, 65, 80, 100, 129,
    130, 150, 200, 230, 257, 300, 350, 400, 450, 513, 600, 700,
)  # fmt: skip
Texts = list[list[int]]


def places(n_layer: int, n_expert: int) -> dict[str, dict[str, Any]]:
    """Return settings that decide where experts are, by name."""
    n_all = n_layer * n_expert
    slots = {"mode": "layered", "pin_layers": 0, "host_pin": "all"}
    return {
        "all": {"mode": "whole"},
        "60 %": {**slots, "cache_slots": n_all * 60 // 100},
        "25 %": {**slots, "cache_slots": n_all * 25 // 100},
        "streamed": {**slots, "cache_slots": n_all * 25 // 100, "host_pin": "none"},
        "pinned layers": {**slots, "pin_layers": n_layer // 2, "cache_slots": n_all // 8},
    }


@dataclass
class Wanted:
    """What texts should be: of prompts, and of prompts that go on after an answer."""

    prompts: Texts
    answers: Texts
    longer: Texts
    longer_answers: Texts


@dataclass
class Found:
    """How many texts of a way were compared, and which of them differ.

    n_hits: prompts that began with what was computed for another one, its answer included.
    """

    name: str
    n: int = 0
    n_hits: int = 0
    differ: list[str] = field(default_factory=list)

    def add(self, what: str, got: Texts, wanted: Texts) -> None:
        """Compare texts with what they should be."""
        self.n += len(wanted)
        for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
            if one != other:
                at = next((j for j, (a, b) in enumerate(zip(one, other)) if a != b), len(one))
                self.differ.append(f"{what} {i} from token {at}")


def prompts_of(source: Sequence[int], lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Texts:
    """Return parts of a text, one of each length."""
    rng = np.random.default_rng(seed)
    return [
        list(source[at : at + n]) for n in lengths for at in [int(rng.integers(0, len(source) - n))]
    ]


def config_of(base: dict[str, Any], n_ubatch: int, n_ctx: int, **more: Any) -> EngineConfig:
    """Return the settings of an engine; base: what all have in common."""
    shared = {"n_threads": 4, "profile": "none", "n_ctx": n_ctx, "n_ubatch": n_ubatch}
    return EngineConfig(**{**shared, **base, **more})


def answers(engine: Engine, prompts: Texts, n: int) -> Texts:
    """Return the answers to prompts one after the other, each read from its beginning."""
    found = []
    for ids in prompts:
        engine.reset()
        settings = {"max_tokens": n, "text": False, "ignore_eos": True, "reuse": False}
        events = engine.generate(ids, GREEDY, **settings)
        found.append([e.token for e in events if e.token is not None])
    return found


def drafting(engine: Engine, known: Texts, seed: int) -> Speculation:
    """Return what drafts in all shapes: right and wrong ones from a script, and look-up."""
    n_vocab = engine.hparams.n_vocab
    scripted = ScriptedDrafter(known[0], n_vocab, 0.8, seed=seed)
    controller = AnyController([scripted.name, "lookup"], seed=seed)
    return Speculation((scripted, LookUp()), controller, n_vocab, 16)


def drafted_answers(engine: Engine, prompts: Texts, wanted: Texts, n: int) -> Texts:
    """Return the answers with drafts of all widths, most of them right."""
    found = []
    for seed, (ids, answer) in enumerate(zip(prompts, wanted)):
        engine.speculation = drafting(engine, [[*ids, *answer]], seed)
        found += answers(engine, [ids], n)
    engine.speculation = None
    return found


def company_answers(
    engine: Engine, first: Texts, n: int, second: Texts
) -> tuple[Texts, Texts, int]:
    """Return the answers to prompts that arrive together, and to those that go on from them.

    The last number is how many of the second ones went on from an answer.
    """
    found: list[Texts] = []
    n_hits = 0
    with serving(engine) as service:
        for prompts in (first, second):
            with together(service):
                clients = [
                    Client(service, ids, max_tokens=n, sampling=GREEDY, ignore_eos=True)
                    for ids in prompts
                ]
            for client in clients:
                client.wait()
            found.append([list(client.tokens) for client in clients])
        n_hits = sum(
            client.last.usage.n_cached > len(ids)
            for client, ids in zip(clients, first, strict=True)
        )
    return found[0], found[1], n_hits


def reference(
    path: Path, base: dict[str, Any], prompts: Texts, n: int, n_ctx: int, more: Sequence[int]
) -> Wanted:
    """Return the texts of an engine with all experts, one sequence, chunks of 512 and no drafts.

    more: what follows the answers in the longer prompts.
    """
    with Engine.load(path, config_of(base, 512, n_ctx, mode="whole")) as engine:
        plain = answers(engine, prompts, n)
        longer = [[*ids, *text, *more] for ids, text in zip(prompts, plain)]
        return Wanted(prompts, plain, longer, answers(engine, longer, n))


def all_ways(
    path: Path, base: dict[str, Any], texts: Wanted, n: int, n_ctx: int, names: Sequence[str] = (),
    chunks: Sequence[int] = CHUNKS,
) -> Iterator[Found]:  # fmt: skip
    """Yield what was found of each place of experts, and each length of chunks.

    Texts alone, with drafts, in company of `N_CLIENTS`, and after a prefix hit on an answer.
    names: places; empty: all.
    """
    with open_model(path) as file:
        each = places(file.hparams.n_layer, file.hparams.n_expert)
    for name in names or each:
        for n_ubatch in chunks:
            found = Found(f"{name}, chunks of {n_ubatch}")
            with ExitStack() as stack:
                config = config_of(base, n_ubatch, n_ctx, n_draft=15, **each[name])
                engine = stack.enter_context(Engine.load(path, config))
                found.add("alone", answers(engine, texts.prompts, n), texts.answers)
                drafted = drafted_answers(engine, texts.prompts, texts.answers, n)
                found.add("drafted", drafted, texts.answers)
                found.add("longer", answers(engine, texts.longer, n), texts.longer_answers)
            with ExitStack() as stack:
                config = config_of(base, n_ubatch, n_ctx, n_seq=N_CLIENTS, **each[name])
                engine = stack.enter_context(Engine.load(path, config))
                got = company_answers(engine, texts.prompts, n, texts.longer)
                found.add("company", got[0], texts.answers)
                found.add("prefix hit", got[1], texts.longer_answers)
                found.n_hits = got[2]
            yield found
