"""Drafting on the command line, over a scripted engine."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.cli_page import json_tables
from helpers.fake_engine import FakeEngine, ids_file

from moegraph.bench.scripted import ScriptedAccept
from moegraph.cli import models
from moegraph.config import EngineConfig
from moegraph.draft.plan import SpecStats
from moegraph.errors import RequestError

if TYPE_CHECKING:
    from conftest import Cli

STATS = SpecStats(
    steps=4, tokens=11, plain_steps=3, drafted=16, accepted=7, verified_at=(4, 4, 2),
    accepted_at=(4, 2, 1), timed_steps=4, drafter_s=2e-3, verify_s=16e-3, commit_s=1e-3,
    seconds=0.02, plain_seconds=0.03, chosen={("mtp", 5): 3, ("lookup", 5): 1},
)  # fmt: skip
LINES = [
    "[mtp] generated 3 tokens in 0.500 s  ->  4.00 tok/s",
    "[mtp] 4 draft steps, accepted=7/16 (43.8% per step), avg commit/step=2.75",
    "[mtp] accepted by position, %: 100 50 50; ms a step: "
    "drafter 0.500, verify 4.000, commit 0.250",
    "[mtp] about 1.50x the speed without drafts; 3 steps without drafts",
]


KV = {"tokenizer.chat_template": "{{ messages[-1].content }}"}


class TestSettings:
    def test_the_options_reach_the_engine(self, cli: Cli) -> None:
        cli("run", "m", "-p", "x", "--spec", "dflash", "-md", "d.gguf", "--draft-max", 7,
            "--draft-p-min", "0.5", "--budget", 6, "--ddtree", "--ddtree-budget", 22,
            "--ddtree-temp", "0.8", "--ddtree-no-chain-seed", "--draft-vocab", 32000,
            "--max-ctx", 256)  # fmt: skip
        assert cli.engine.config == EngineConfig(
            spec="dflash", draft="d.gguf", draft_max=7, draft_p_min=0.5, budget=6, ddtree=True,
            ddtree_budget=22, ddtree_temp=0.8, ddtree_no_chain_seed=True, draft_vocab=32000,
            n_ctx=256,
        )  # fmt: skip

    def test_nothing_is_drafted_unless_asked_for_or_with_a_drafter(self, cli: Cli) -> None:
        cli.engine = FakeEngine("hi", kv=KV)
        for command in ("run", "chat"):
            for args, spec in (
                ((), "off"), (("--spec", "auto"), "auto"), (("--draft", "d"), "auto"),
                (("--draft", "d", "--spec", "off"), "off"),
                (("--draft", "d", "--deterministic"), "dflash"),
            ):  # fmt: skip
                cli(command, "m", "-p", "x", *args)
                assert cli.engine.config.spec == spec
        line = cli.refused("run", "m", "-p", "x", "--spec", "auto", "--deterministic")
        assert "goes by measured times" in line

    def test_settings_of_drafts_that_change_nothing_are_named(self) -> None:
        assert models.idle_drafts(EngineConfig(spec="lookup", budget=6)) == []
        assert models.idle_drafts(EngineConfig()) == []
        assert models.idle_drafts(EngineConfig(budget=6, ddtree=True)) == [
            "--budget, --ddtree have no effect: nothing drafts; choose what does with --spec"
        ]
        assert models.idle_drafts(EngineConfig(spec="lookup", draft="d.gguf")) == [
            "--draft has no effect: --spec lookup needs no file"
        ]
        assert models.idle_drafts(EngineConfig(spec="dflash", draft="d.gguf")) == []

    def test_what_is_measured_or_recorded_is_not_drafted(self, cli: Cli) -> None:
        line = cli.refused("trace", "m", "-md", "d.gguf")
        assert "only run, chat, serve, daemon and bench draft" in line
        assert "--spec-type" in cli.refused("run", "m", "-p", "x", "--spec-type", "draft-mtp")


class TestReferenceForm:
    def test_a_drafter_may_stand_after_the_model(self, cli: Cli, tmp_path: Path) -> None:
        ids, out = ids_file(tmp_path / "in", 97, 98), tmp_path / "out"
        cli.engine = FakeEngine("xyz")
        assert cli("run", "m", "d.gguf", ids, 2, out, "--budget=6").exit_code == 0
        config = cli.engine.config
        assert (config.draft, config.budget, config.spec) == ("d.gguf", 6, "auto")
        assert out.read_bytes() == struct.pack("<4i", 97, 98, *b"xy")
        cli("run", "m", ids, 2, out)
        assert cli.engine.config.draft == ""

    def test_flags_without_effect_are_taken_and_explained(self, cli: Cli) -> None:
        args = ("run", "m", "-p", "x", "--fast-rollback", "--seq-verify", "--draft-gpu", "1")
        result = cli(*args)
        assert result.exit_code == 0
        lines = [line for line in result.stderr.splitlines() if "has no effect" in line]
        assert [line.split()[1] for line in lines] == [
            "--fast-rollback", "--seq-verify", "--draft-gpu"
        ]  # fmt: skip
        assert "has no effect" not in cli(*args, "-q").stderr

    def test_tokens_are_streamed_to_a_descriptor(self, cli: Cli, tmp_path: Path) -> None:
        cli.engine = FakeEngine("hi")
        path = tmp_path / "stream"
        with path.open("wb") as file:
            assert cli("run", "m", "-p", "x", "--stream-fd", file.fileno()).exit_code == 0
        assert path.read_bytes() == struct.pack("<4i", *b"hi", 0, -1)

    def test_a_descriptor_that_cannot_be_written(self, cli: Cli) -> None:
        fd = os.open(os.devnull, os.O_RDONLY)
        os.close(fd)
        assert f"--stream-fd {fd}: cannot write" in cli.refused(
            "run", "m", "-p", "x", "--stream-fd", fd
        )
        assert cli.loaded == []


class TestFigures:
    def test_run_prints_the_reference_s_summary(self, cli: Cli) -> None:
        cli.engine = FakeEngine("hi")
        cli.engine.spec, cli.engine.drafter_lines = STATS, ("target layers: 1, 6", "mask: 248077")
        lines = cli("run", "m", "-p", "x").stderr.splitlines()
        assert lines[-4:] == LINES
        assert "target layers: 1, 6" in lines and "mask: 248077" in lines

    def test_json_has_an_object(self, cli: Cli) -> None:
        cli.engine = FakeEngine("hi")
        cli.engine.spec = STATS
        found = json.loads(cli("run", "m", "-p", "x", "--json").stdout)["spec"]
        assert found == STATS.report()
        assert list(found) == list(json_tables("run")[2])
        cli.engine = FakeEngine("hi")
        assert json.loads(cli("run", "m", "-p", "x", "--json").stdout)["spec"] is None


class TestScriptedAcceptance:
    def test_the_rates_come_true_in_a_short_text(self) -> None:
        rates = (0.85, 0.72, 0.58)
        for seed in range(20):
            accept = ScriptedAccept(rates, seed)
            counts = [accept(3) for _ in range(96)]
            assert sum(counts) / 96 == pytest.approx(sum(rates), abs=0.06)
            # still by chance: what comes next does not follow from what came before
            again = sum(a == b for a, b in zip(counts, counts[1:]))
            assert 20 < again < 60

    @pytest.mark.parametrize(
        "rates", [(), (1.1,), (-0.1,), (0.5, 0.6), (float("nan"),), (0.5,) * 65]
    )
    def test_rates_that_make_no_sense(self, rates: tuple[float, ...]) -> None:
        with pytest.raises(RequestError):
            ScriptedAccept(rates)
        assert ScriptedAccept((0.0, 0.0))(4) == 0 and ScriptedAccept((1.0,))(4) == 4
