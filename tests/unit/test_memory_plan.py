"""What is loaded to draft tokens: priced against the experts whose slots it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from helpers import shared  # noqa: F401 - it finds the scripts
from modelgen import drafter
from modelgen.build import write_model
from modelgen.drafter import PRESETS as DRAFTERS
from modelgen.drafter import write_drafter
from modelgen.fill import Filler
from modelgen.presets import PRESETS

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.placement.drafters import open_draft_file, price_of, with_drafts
from moegraph.placement.memory import Budget, Choice, choose
from moegraph.placement.planner import Footprint, Plan, make_plan

GIB = 1 << 30
# About a 35B-A3B: 19.5 GB of experts.
NEED = Footprint(
    256, 8, (1_900_000,) * 40, weights=2 * GIB, kv=GIB // 8, state=GIB // 8, compute=GIB // 2,
    other=GIB // 4, staging=GIB // 4,
)  # fmt: skip


def plans(gib: float, drafter: int) -> tuple[Plan, Plan]:
    """Return the plans of a budget without and with a drafter of so many bytes."""
    budget = round(gib * GIB)
    return make_plan(NEED, budget), make_plan(replace(NEED, drafters=drafter), budget)


@pytest.mark.parametrize("name", ["mtp", "dflash", "dspark"])
def test_a_drafter_costs_more_the_fewer_experts_are_resident(name: str) -> None:
    prices = [price_of(NEED, *plans(gib, GIB // 2), {name: 15}) for gib in (24, 16, 10, 6)]
    assert [price.idle for price in prices] == sorted((p.idle for p in prices), reverse=True)
    assert [price.drafting for price in prices] == sorted(
        (p.drafting for p in prices), reverse=True
    )
    assert prices[0].idle == 1.0 and prices[0].n_slots == 0 and prices[0].is_worth_it
    assert 1.3 < prices[0].drafting < 2.0
    assert prices[-1].n_slots == pytest.approx(GIB / 2 / 1.9e6, abs=41)
    assert not prices[-1].is_worth_it


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A 35B-A3B with an MTP block, and its DFlash drafter; all weights are holes in the files."""
    folder = tmp_path_factory.mktemp("choice")
    preset = PRESETS["35b-a3b"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "write_tensor_data", skip_tensor)
        patch.setattr(Filler, "data", lambda *_: b"")
        patch.setattr(drafter, "encoded", lambda *_: b"")
        patch.setattr(drafter, "values", lambda s, seed: repeat(("", None)))
        shape = replace(preset.shape, n_layer_nextn=1)
        write_model(folder / "m.gguf", shape, preset.mix)
        write_drafter(folder / "d.gguf", DRAFTERS["35b-current"], "dflash", "BF16")
    yield folder / "m.gguf", folder / "d.gguf"
    for path in folder.iterdir():
        path.unlink()


def skip_tensor(writer: Any, tensor: Any) -> None:
    part = next(part for part in writer.tensors if part)
    n_bytes, (file,) = part.pop(next(iter(part))).nbytes, writer.fout
    file.seek((-(-file.tell() // 32) - -n_bytes // 32) * 32)
    file.truncate()


def chosen(
    files: tuple[Path, Path], gib: float | None, is_own: bool = True, **settings: Any
) -> Choice:
    config = with_drafts(EngineConfig(draft=str(files[1]), **settings).validate())
    n_bytes = None if gib is None else round(gib * GIB)
    with ExitStack() as stack:
        model = stack.enter_context(closing(open_model(files[0])))
        draft = open_draft_file(model, config, stack)
        return choose(model, config, config.n_ctx, draft, Budget(n_bytes, is_own=is_own))


def test_all_that_fits_beside_the_experts_is_loaded(files: tuple[Path, Path]) -> None:
    choice = chosen(files, 24, spec="auto")
    assert choice.sources.mtp and choice.sources.draft and choice.sources.n_kept is None
    assert choice.price and choice.price.idle == 1.0 and choice.plan.all_resident
    assert choice.plan.bytes["drafters"] == choice.price.n_bytes > GIB
    assert choice.notes == ()


def test_auto_loads_nothing_that_costs_too_much_and_says_so(files: tuple[Path, Path]) -> None:
    choice = chosen(files, 5, spec="auto")
    assert not choice.sources.mtp and not choice.sources.draft and choice.price is None
    assert "drafters" not in choice.plan.bytes
    assert choice.plan == chosen(files, 5, spec="lookup").plan
    block, file = sorted(choice.notes, key=lambda line: line.endswith("--spec dflash loads it"))
    assert block.startswith("the MTP block: not loaded: its ") and "experts" in block
    assert file.startswith(f"{files[1]}: not loaded: its ") and "\n" not in block + file
    assert block.endswith("; --spec mtp loads it")


def test_auto_loads_what_is_worth_its_slots(files: tuple[Path, Path]) -> None:
    """At about 9 GiB a block with a quarter of its experts; the file costs more slots."""
    choices = (chosen(files, gib, spec="auto") for gib in (9.25, 8.5, 10, 7.75, 10.75))
    choice = next(choice for choice in choices if choice.sources.mtp)
    assert choice.sources.mtp and choice.sources.n_kept == 64 and not choice.sources.draft
    assert choice.price and choice.price.is_worth_it and choice.price.n_slots > 100
    (line,) = choice.notes
    assert line.startswith(str(files[1])) and "would have 0.9" in line
