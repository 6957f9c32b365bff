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

from moegraph.cli import benchrows, models
from moegraph.config import EngineConfig
from moegraph.draft.scripted import ScriptedAccept
from moegraph.draft.stats import SpecStats
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


class GrowingEngine(FakeEngine):
    """What it drafted grows with each generation."""

    n_calls = 0

    def spec_stats(self) -> SpecStats:
        self.n_calls += 1
        return SpecStats() if self.n_calls == 1 else STATS


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

    @pytest.mark.parametrize("flag", ["--spec-draft-n-max", "--draft-max"])
    def test_llama_cpp_spellings(self, cli: Cli, flag: str) -> None:
        cli.engine = FakeEngine("hi", kv=KV)
        cli("chat", "m", "-p", "x", flag, 3, "--spec-draft-p-min", "0.25", "--draft", "d.gguf")
        config = cli.engine.config
        assert (config.draft_max, config.draft_p_min, config.draft) == (3, 0.25, "d.gguf")

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

    @pytest.mark.parametrize(
        ("args", "say"),
        [(("--budget", "0"), "budget is 0 (--budget); allowed: 1 to 64"),
         (("--draft-p-min", "2"), "draft_p_min is 2.0"), (("--ddtree-budget", "65"), "1 to 64"),
         (("--spec", "eagle"), "'eagle' is not one of")],
    )  # fmt: skip
    def test_values_out_of_range(self, cli: Cli, args: tuple[str, ...], say: str) -> None:
        assert say in cli.refused("run", "m", "-p", "x", *args)


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

    def test_it_is_given_once(self, cli: Cli, tmp_path: Path) -> None:
        ids = ids_file(tmp_path / "in", 97)
        line = cli.refused("run", "m", "d.gguf", ids, 2, tmp_path / "o", "--draft", "e.gguf")
        assert "--draft gives another" in line
        line = cli.refused("run", "m", "a", "b")
        assert "or four, with DRAFT before them" in line

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
        cli.engine.spec, cli.engine.drafter_lines = STATS, ("taps: 1, 6", "mask: 248077")
        lines = cli("run", "m", "-p", "x").stderr.splitlines()
        assert lines[-4:] == LINES
        assert "taps: 1, 6" in lines and "mask: 248077" in lines

    def test_a_run_without_drafts_has_no_summary(self, cli: Cli) -> None:
        cli.engine = FakeEngine("hi")
        cli.engine.spec = SpecStats(plain_steps=2)
        assert "[" not in cli("run", "m", "-p", "x").stderr

    def test_json_has_an_object(self, cli: Cli) -> None:
        cli.engine = FakeEngine("hi")
        cli.engine.spec = STATS
        found = json.loads(cli("run", "m", "-p", "x", "--json").stdout)["spec"]
        assert found == STATS.report()
        assert list(found) == list(json_tables("run")[2])
        cli.engine = FakeEngine("hi")
        assert json.loads(cli("run", "m", "-p", "x", "--json").stdout)["spec"] is None

    def test_chat_counts_each_answer(self, cli: Cli) -> None:
        cli.engine = GrowingEngine("hi", kv=KV)
        result = cli("chat", "m", "-p", "x")
        assert result.stderr.splitlines()[-4:] == LINES
        cli.engine = GrowingEngine("hi", kv=KV)
        answer = json.loads(cli("chat", "m", "-p", "x", "--json").stdout)
        assert answer["spec"] == STATS.report()

    def test_bench_has_columns_for_drafts(self, capsys: pytest.CaptureFixture[str]) -> None:
        record = {
            "model_type": "m", "model_size": 1, "model_n_params": 1, "backends": "CPU",
            "n_threads": 1, "mode": "whole", "n_ubatch": 512, "type_k": "f16", "type_v": "f16",
            "test": "run8", "avg_ts": 1.0, "stddev_ts": 0.0, "spec": "mtp",
            "drafts": STATS.report(),
        }  # fmt: skip
        plain = {**record, "spec": "off", "drafts": None}
        benchrows.STYLES["md"](iter([plain, record]), ["run8"], frozenset({"spec"}))
        head, _, first, second = capsys.readouterr().out.splitlines()
        cells = [[cell.strip() for cell in line.split("|")] for line in (head, first, second)]
        at = cells[0].index("accepted")
        assert [row[at - 1 : at + 2] for row in cells] == [
            ["spec", "accepted", "tokens/step"], ["off", "", ""], ["mtp", "43.8 %", "2.75"]
        ]  # fmt: skip
        benchrows.STYLES["csv"](iter([plain, record]), ["run8"], frozenset())
        head, first, second = capsys.readouterr().out.splitlines()
        assert head.endswith('"drafted","accepted","tokens_per_step"')
        assert first.endswith(',"","",""') and second.endswith('"16","7","2.75"')


class TestScriptedAcceptance:
    def test_positions_are_accepted_as_often_as_the_script_says(self) -> None:
        accept, n = ScriptedAccept((0.8, 0.6, 0.3)), 20_000
        counts = [accept(5) for _ in range(n)]
        for position, rate in enumerate((0.8, 0.6, 0.3, 0.15, 0.075), 1):
            assert sum(c >= position for c in counts) / n == pytest.approx(rate, abs=0.02)
        assert max(accept(1) for _ in range(50)) == 1

    def test_the_rates_come_true_in_a_short_text(self) -> None:
        rates = (0.85, 0.72, 0.58)
        for seed in range(20):
            accept = ScriptedAccept(rates, seed)
            counts = [accept(3) for _ in range(96)]
            assert sum(counts) / 96 == pytest.approx(sum(rates), abs=0.06)
            # still by chance: what comes next does not follow from what came before
            again = sum(a == b for a, b in zip(counts, counts[1:]))
            assert 20 < again < 60

    def test_a_seed_gives_the_same_script(self) -> None:
        first, second = ScriptedAccept((0.5, 0.4), 3), ScriptedAccept((0.5, 0.4), 3)
        assert [first(4) for _ in range(50)] == [second(4) for _ in range(50)]

    @pytest.mark.parametrize(
        "rates", [(), (1.1,), (-0.1,), (0.5, 0.6), (float("nan"),), (0.5,) * 65]
    )
    def test_rates_that_make_no_sense(self, rates: tuple[float, ...]) -> None:
        with pytest.raises(RequestError):
            ScriptedAccept(rates)
        assert ScriptedAccept((0.0, 0.0))(4) == 0 and ScriptedAccept((1.0,))(4) == 4
