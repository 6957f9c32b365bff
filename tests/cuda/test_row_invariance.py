"""A row's bits depend neither on the rows beside it, nor on the tree, nor on where experts are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers.company import RAGGED, WIDTHS, Alone, Company, open_company, settings_for
from helpers.fetching_engines import fetch_layers
from helpers.row_cases import OPERATIONS, OTHER_OPERATIONS, differing
from helpers.row_cases import WIDTHS as SEVERAL
from helpers.scripted_drafts import AnyController, ScriptedDrafter
from helpers.shared import prompt
from regression.harness import FAMILIES, WITH_PAGES

from moegraph.config import EngineConfig
from moegraph.draft.lookup import LookUp
from moegraph.engine import Engine
from moegraph.errors import ConfigError
from moegraph.ggml.device import Device
from moegraph.passes.speculation import Speculation
from moegraph.sampling import SamplingParams

PRESETS = ("mini35b", "kquant40", "iq64")
SHARES = (None, 60, 25, 0)


@pytest.mark.parametrize("name", [*OPERATIONS, *OTHER_OPERATIONS])
def test_rows_that_are_kept_apart_have_the_bits_that_they_have_alone(
    name: str, device: Device
) -> None:
    build = {**OPERATIONS, **OTHER_OPERATIONS}[name]
    assert differing(device, build, apart=True) == dict.fromkeys(SEVERAL, 0)


@pytest.fixture(scope="module")
def alone(model_file: Callable[[str], Path]) -> Iterator[Callable[[str, bool], Alone]]:
    """Return a function that loads what computes rows of a model alone, once."""
    found: dict[tuple[str, bool], Alone] = {}
    with ExitStack() as stack:

        def get(preset: str, deterministic: bool) -> Alone:
            key = preset, deterministic
            if key not in found:
                settings = settings_for(None, 0, deterministic=deterministic)
                engine = Engine.load(model_file(preset), EngineConfig(**settings))
                stack.callback(engine.close)
                found[key] = Alone(engine)
            return found[key]

        yield get


def check(company: Company) -> None:
    """Require that all rows of all forms have the bits that they have alone."""
    bad = [f"{form} {n}: {r}, {r.first}" for form, n, r in company.all_forms() if r.n_differ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("preset", "share"), [*product(PRESETS, SHARES), *product(WITH_PAGES, (None, 25))]
)
def test_deterministic_rows_have_the_bits_that_they_have_alone(
    preset: str, share: int | None, alone: Callable[[str, bool], Alone],
    model_file: Callable[[str], Path],
) -> None:  # fmt: skip
    single = alone(preset, True)
    hp = single.engine.hparams
    config = settings_for(share, len(hp.routed_layers) * hp.n_expert)
    with ExitStack() as stack:
        check(open_company(stack, model_file(preset), config, single))


@pytest.mark.parametrize("preset", sorted({*FAMILIES} - {*WITH_PAGES}))
def test_without_pages_it_is_refused(
    preset: str, model_file: Callable[[str], Path]
) -> None:  # fmt: skip
    with pytest.raises(ConfigError, match="--deterministic needs attention over pages"):
        Engine.load(model_file(preset), EngineConfig(**settings_for(None, 0)))


@pytest.mark.parametrize("host_pin", ["all", "none"])
def test_experts_that_the_host_streams_change_no_bit(
    host_pin: str, alone: Callable[[str, bool], Alone], model_file: Callable[[str], Path]
) -> None:
    single = alone("mini35b", True)
    hp = single.engine.hparams
    config = settings_for(25, hp.n_layer * hp.n_expert, host_pin=host_pin)
    with ExitStack() as stack:
        company = open_company(stack, model_file("mini35b"), config, single)
        fetches = fetch_layers(company.engine)
        assert bool(fetches) == (host_pin == "all"), "not what this test is about"
        check(company)


SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "defaults": {"seed": 1},
    "penalties": {"repeat_penalty": 1.3, "presence_penalty": 0.5, "repeat_last_n": 20, "seed": 3},
}


def answer(engine: Engine, ids: list[int], params: SamplingParams) -> list[int | None]:
    """Return the tokens of an answer."""
    return [e.token for e in engine.generate(ids, params, max_tokens=120, text=False)]


@pytest.mark.parametrize("place", [{}, {"host_pin": "all"}, {"host_pin": "none"}], ids=str)
def test_generated_text_with_drafts_is_that_without(
    place: dict[str, Any], model_file: Callable[[str], Path]
) -> None:
    """Chains and trees of all widths, from a script, from what was said, and from the MTP block."""
    config = settings_for(25 if place else None, 4 * 32, n_draft=15, spec="mtp", **place)
    with Engine.load(model_file("mini35b"), EngineConfig(**config)) as engine:
        (block,) = engine._loaded.drafters
        ids = prompt(engine, 20).tolist()
        n_accepted = 0
        for name, values in SAMPLERS.items():
            engine.speculation = None
            plain = answer(engine, ids, SamplingParams(**values))
            for seed in range(3):
                known = ScriptedDrafter([*ids, *plain], engine.hparams.n_vocab, 0.8, seed=seed)
                drafters = (known, LookUp(), block)
                controller = AnyController([drafter.name for drafter in drafters], seed=seed)
                engine.speculation = Speculation(drafters, controller, engine.hparams.n_vocab, 16)
                assert answer(engine, ids, SamplingParams(**values)) == plain, f"{name} {seed}"
                n_accepted += sum(step.n_accepted for step in controller.steps)
        assert n_accepted > 100


def test_the_cpu_computes_no_expert(model_file: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="drop --miss cpu or --deterministic"):
        Engine.load(model_file("mini35b"), EngineConfig(**settings_for(25, 128, miss="cpu")))


def test_the_forms_are_as_wide_as_a_pass_may_be() -> None:
    assert max(WIDTHS) == 32
    assert max(n_seqs * n_rows for n_seqs, n_rows, _ in RAGGED) == 32
