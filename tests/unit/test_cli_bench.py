"""`moegraph bench`: its rows, its lists, its formats."""

from __future__ import annotations

import csv
import importlib
import io
import json
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.fake_engine import FakeEngine

from moegraph.bench import ttft
from moegraph.bench.measure import BenchRow, BenchSpec
from moegraph.cli import bench, benchrows
from moegraph.errors import MoegraphError, NativeError

if TYPE_CHECKING:
    from conftest import Cli


RECORDS = [
    {
        "model_type": "qwen35moe 33M Q4_K", "model_size": 23 << 20, "model_n_params": 33_000_000,
        "backends": "CPU", "n_threads": 2, "mode": "whole", "n_ubatch": 512, "type_k": "f16",
        "type_v": "f16", "test": test, "avg_ts": 123.456, "stddev_ts": 1.5, "samples_ns": [1, 2],
        "samples_ts": [1.0, 2.0],
    }
    for test in ("pp512", "tg128 @ d4096")
]  # fmt: skip


class TestBench:
    def out(
        self, style: str, capsys: pytest.CaptureFixture[str],
        records: list[dict[str, Any]] = RECORDS, varied: frozenset[str] = frozenset(),
    ) -> str:  # fmt: skip
        tests = [record["test"] for record in records]
        benchrows.STYLES[style](iter(records), tests, varied)
        return capsys.readouterr().out

    def test_all_formats_hold_the_same_rows(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert json.loads(self.out("json", capsys)) == RECORDS
        assert [json.loads(line) for line in self.out("jsonl", capsys).splitlines()] == RECORDS
        rows = list(csv.DictReader(io.StringIO(self.out("csv", capsys))))
        assert [row["test"] for row in rows] == ["pp512", "tg128 @ d4096"]
        assert "samples_ns" not in rows[0]
        with sqlite3.connect(":memory:") as base:
            named = [{**record, "model_type": "it's"} for record in RECORDS]
            base.executescript(self.out("sql", capsys, named))
            found = base.execute("SELECT test, avg_ts, model_type, hit_rate FROM moegraph_bench")
            assert found.fetchall() == [(row["test"], 123.456, "it's", None) for row in RECORDS]

    @pytest.mark.parametrize(
        ("text", "lengths"),
        [
            ("512", (512,)), ("0", (0,)), ("1,2,8", (1, 2, 8)), ("1-4", (1, 2, 3, 4)),
            ("0-512+256", (0, 256, 512)), ("1-16*4", (1, 4, 16)), ("2,4-5", (2, 4, 5)),
            (" 3 , 4", (3, 4)),
        ],
    )  # fmt: skip
    def test_lists_and_ranges_as_in_llama_bench(self, text: str, lengths: tuple[int, ...]) -> None:
        assert bench.lengths(None, None, (text,)) == lengths
        assert bench.lengths(None, None, (text, "7")) == (*lengths, 7)

    @pytest.mark.parametrize(
        ("args", "say"),
        [(("-pg", "5"), "write a prompt and a generation, 512,128"),
         (("-pg", "0,5"), "both are 1 to"), (("-t", "x"), "write numbers as 1,2 or 1-8"),
         (("-t", "0"), "n_threads is 0"), (("-ctk", "f16,q5"), "'q5' is not one of f16"),
         (("-p", "0", "-n", "0"), "nothing to measure"),
         (("-m", "other"), "give one model, not"), (("--policy", "lru,x"), "'x' is not one of lru"),
         (("--vram", "6,x"), "vram is 'x'"), (("--temp", "0,x"), "write numbers as 0,0.8"),
         (("--cache-slots", "-2"), "cache_slots is -2"), (("--temp", "0"), "apply to --run"),
         (("--run", "8", "--top-p", "2"), "top_p"), (("--run", "-8"), "lengths of 0 to"),
         (("--ttft", "-d", "5"), "--ttft does not go with -d"),
         (("--ttft", "-p", "0,5"), "does not go with -p 0"), (("--ttft", "-n", "5"), "with -n"),
         (("--spec", "lookup"), "drafts are in run tests alone"),
         (("--run", "8", "--budget", "4"), "--budget needs something that drafts"),
         (("--run", "8", "--draft-accept", "0.5"), "--draft-accept needs something that drafts"),
         (("--draft-accept", "0.5,x"), "write shares as 0.85"),
         (("--draft-accept", "0.5,0.6"), "rate of acceptance 0.6; allowed: 0 to 0.5"),
         (("--draft-accept", "nan"), "rate of acceptance nan"),
         (("--ttft", "--run", "5"), "with --run"), (("--ttft", "-pg", "5,5"), "with -pg")],
    )  # fmt: skip
    def test_other_lists_that_make_no_sense(
        self, cli: Cli, args: tuple[str, ...], say: str
    ) -> None:
        assert say in cli.refused("bench", "m", *args)
        assert cli.loaded == []

    @pytest.fixture
    def specs(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> list[BenchSpec]:
        """The specs that were measured, each test in no time."""
        seen: list[BenchSpec] = []

        def measure(engine: Any, spec: BenchSpec) -> Iterator[BenchRow]:
            seen.append(spec)
            for test in spec.tests:
                yield BenchRow(test, (0.5, 1.0))

        monkeypatch.setattr("moegraph.bench.measure.run_bench", measure)
        facts = {key: RECORDS[0][key] for key in list(RECORDS[0])[:9]}
        monkeypatch.setattr(bench, "_facts", lambda engine: {**asdict(engine.config), **facts})
        return seen

    def test_the_context_is_as_large_as_the_tests_need(
        self, cli: Cli, specs: list[BenchSpec]
    ) -> None:
        cli("bench", "m", "-p", "100,300", "-n", "8", "-d", "0,1000", "-r", "2", "-o", "json")
        assert cli.engine.config.n_ctx == 1536
        assert specs == [BenchSpec((100, 300), (8,), (0, 1000), 2)]
        cli("bench", "m", "-c", "2048")
        assert cli.engine.config.n_ctx == 2048
        cli("bench", "m", "-pg", "500,100", "-p", "0", "-n", "0")
        assert cli.engine.config.n_ctx == 768

    def test_repeated_options_and_lists_are_all_measured(
        self, cli: Cli, specs: list[BenchSpec]
    ) -> None:
        args = ("-p", "16", "-p", "32,64", "-n", "0", "-pg", "4,2", "-m", "a", "-m", "b",
                "-ctk", "f16,q8_0", "--no-warmup", "-o", "json")  # fmt: skip
        rows = json.loads(cli("bench", *args).stdout)
        assert [row["test"] for row in rows[:4]] == ["pp16", "pp32", "pp64", "pp4+tg2"]
        assert len(rows) == 16 and cli.loaded == ["a", "a", "b", "b"]
        assert not specs[0].warm_up and specs[0].pairs == ((4, 2),)
        assert rows[3]["n_prompt"] == 4 and rows[3]["n_gen"] == 2
        assert rows[3]["samples_ts"] == [12, 6]

    def test_run_rows_sample_as_run_does(self, cli: Cli, specs: list[BenchSpec]) -> None:
        kv = {"general.sampling.top_k": 20, "general.sampling.top_p": 2.0}
        cli.engine = FakeEngine("", kv=kv)
        args = ("-p", "0", "-n", "8", "--run", "16,32", "--temp", "0,0.5", "--seed", "7")
        done = cli("bench", "m", *args, "-o", "json")
        assert done.stderr.count("general.sampling.top_p 2.0") == 1  # not for each setting again
        rows = json.loads(done.stdout)
        assert [row["test"] for row in rows] == [
            "tg8", "run16 temperature 0.0", "run16 temperature 0.5", "run32 temperature 0.0",
            "run32 temperature 0.5",
        ]  # fmt: skip
        assert rows[0]["sampling"] is None and rows[2]["sampling"]["temperature"] == 0.5
        # The file's own settings hold where the user gives none.
        assert (rows[1]["sampling"]["top_k"], rows[1]["sampling"]["seed"]) == (20, 7)
        assert specs[0].text and cli.engine.config.n_ctx == 256
        rows = json.loads(cli("bench", "m", "--run", "4", "--top-k", "5", "-o", "json").stdout)
        assert rows[2]["test"] == "run4" and rows[2]["sampling"]["top_k"] == 5
        cli.engine = FakeEngine("", vocabulary=False)
        cli("bench", "m", "--run", "4")
        assert not specs[-1].text

    def test_an_interrupted_run_leaves_the_rows_that_are_finished(
        self, cli: Cli, specs: list[BenchSpec], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measure = importlib.import_module("moegraph.bench.measure").run_bench

        def interrupted(engine: Any, spec: BenchSpec) -> Iterator[BenchRow]:
            rows = measure(engine, spec)
            yield next(rows)
            yield next(rows)
            raise KeyboardInterrupt

        monkeypatch.setattr("moegraph.bench.measure.run_bench", interrupted)
        result = cli("bench", "m", "-p", "1,2,3", "-o", "json")
        assert result.exit_code == 130
        assert [row["test"] for row in json.loads(result.stdout)] == ["pp1", "pp2"]


class TestTtft:
    """Times to the first token; the processes are made up here."""

    @pytest.fixture
    def commands(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        """The command lines of all processes."""
        seen: list[list[str]] = []

        def first_token(command: list[str]) -> dict[str, Any]:
            seen.append(command)
            times = {"process_s": 0.5, "load_s": 1.0, "tokenizer_s": 0.25, "prefill_s": 0.125 / 4,
                     "first_token_s": 2.0 + 0.5 * (len(seen) % 2)}  # fmt: skip
            config = {key: RECORDS[0][key] for key in ("n_threads", "mode", "type_k", "type_v")}
            return {
                "timings": {**times, "load": {"weights": 0.75}},
                "config": {**config, "device": "cuda:0", "n_ubatch": 512},
            }

        monkeypatch.setattr(ttft, "_first_token", first_token)
        facts = {key: RECORDS[0][key] for key in list(RECORDS[0])[:3]}
        monkeypatch.setattr(bench, "_model_facts", lambda file: dict(facts))
        return seen

    def test_every_repetition_is_a_process_with_these_settings(
        self, cli: Cli, commands: list[list[str]]
    ) -> None:
        args = ("--ttft", "-p", "5,300", "-r", "2", "--vram", "8", "--cpu-reference", "--device",
                "cpu", "--pin-layers", "-1", "-ctk", "q8_0", "-o", "jsonl")  # fmt: skip
        rows = [json.loads(line) for line in cli("bench", "m", *args).stdout.splitlines()]
        assert [row["test"] for row in rows] == ["ttft5", "ttft300"] and len(commands) == 6
        assert commands[0][:5] == [sys.executable, "-m", "moegraph", "run", "m"]
        chosen = {"--vram=8", "--cpu-reference", "--device=cpu", "--cache-type-k=q8_0"}
        assert {word for word in commands[0][9:] if word != "--ctx-size=512"} == chosen
        row = rows[0]
        assert row["samples_ns"] == [2_000_000_000, 2_500_000_000] and row["n_gen"] == 1
        parts = ("process_ms", "load_ms", "tokenizer_ms", "prefill_ms", "other_ms")
        assert [row[name] for name in parts] == [500, 1000, 250, 31.25, 468.75]
        assert row["load_phases_ms"] == {"weights": 750} and row["backends"] == "CUDA"
        assert cli.loaded == []

    def test_a_process_that_fails_is_the_error(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        code = "import sys; print('warning: x\\nerror: too big', file=sys.stderr); sys.exit(2)"
        with pytest.raises(MoegraphError, match="timed failed: too big") as caught:
            ttft._first_token([sys.executable, "-c", code])
        assert caught.value.exit_code == 2
        silent = 'print(\'{"timings": {"first_token_s": null}}\')'
        with pytest.raises(NativeError, match="does not tell when a process started"):
            ttft._first_token([sys.executable, "-c", silent])
