"""scripts/measure_card: which part is next, limits and ends, results, tables, packs."""

from __future__ import annotations

import importlib.machinery
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import _card
import _card_figures as figures
import _card_run
import _card_upstream
import _slow_link
import bench_server
import bench_tiers
from _card_parts import PARTS, Part
from _card_results import CUT, DONE, FAILED, Outcome, Results
from _card_run import Runner
from _tools import BuildError

MODEL = _card.Model(40, 0, 256, 22_500_000_000, 19_500_000_000, True)


def nothing(lines: figures.Lines, part: str) -> Iterable[figures.Figure]:
    return ()


def a_part(name: str, *steps: str, seconds: int = 10, needs: str = "", share: float = 0) -> Part:
    return Part(name, f"about {name}", steps, seconds, nothing, share, tuple(needs.split()))


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_scripts_take_the_options_of_the_parts(
    part: Part, quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: tmp_path / name for name in ("m odel.gguf", "draft.gguf", "before", "out")}
    for name, file in files.items():
        file.mkdir() if name == "before" else file.write_text("")
    monkeypatch.setattr(_card_upstream, "UPSTREAM", tmp_path)
    monkeypatch.setattr(_card_upstream, "programs", lambda *_: tmp_path)
    for program in _card_upstream.PROGRAMS:
        (tmp_path / program).write_text("")
    model, draft, before, out = map(str, files.values())
    settings = _card.Settings(("--cpu",), model, draft, quick, before)
    values = _card.values(settings, MODEL, None, 4)
    values |= {"out": out, "xml": out}
    for step in part.steps:
        program, *_ = step.split()
        command = _card_run.arguments(step, values)
        assert model in command or program == "pytest"
        if program.endswith(".py"):
            module = importlib.import_module(program.removesuffix(".py"))
            if hasattr(module, "parser"):
                module.parser().parse_args(command[2:])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no safe path")
def test_a_server_is_of_its_tree_wherever_the_script_runs(tmp_path: Path) -> None:
    trees = [tmp_path / "here", tmp_path / "before"]
    for tree in trees:
        (tree / "moegraph").mkdir(parents=True)
        (tree / "moegraph" / "__init__.py").touch()
        (tree / "moegraph" / "__main__.py").write_text(f"print({tree.name!r})")
    said = [
        subprocess.run([sys.executable, "-m", "moegraph"], cwd=trees[0], text=True,
                       env=bench_server.of_tree(tree), capture_output=True, check=True).stdout
        for tree in trees
    ]  # fmt: skip
    assert said == ["here\n", "before\n"]


class Answering(bench_server.Stream):
    """A request that is answered by a token each hundredth of a second."""

    def _run(self) -> None:
        while not self._leaves.wait(0.01) and len(self.times) < 20:
            self.times.append(time.perf_counter())
            self.counts.append(len(self.times))


def test_clients_of_the_mixed_load_ask_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def completion(port: int, n_prompt: int, *_: int) -> Answering:
        asked.append(n_prompt)
        return Answering(port, "", {})

    monkeypatch.setattr(bench_server, "completion", completion)
    found = bench_server.mixed(99, True, 0, 2, 1, 0)
    assert len(asked) >= 4 and 50 <= min(asked) <= max(asked) <= 99
    assert 20 < found["tokens_per_s"] < 201 and found["answers"] >= 2
    assert 9 < found["between_p50_ms"] <= found["between_p99_ms"]
    lines = [{"server": name, "what": "mixed", **found} for name in ("moegraph", "before")]
    shown = {one.name: one.value for one in figures.mixed({"part": lines}, "part")}
    assert shown["mixed: tok/s over before"] == 1.0 and len(shown) == 5


@pytest.fixture
def python_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the steps of parts be programs in Python; `out` is their only argument."""

    def arguments(step: str, values: dict[str, str]) -> list[str]:
        return [sys.executable, "-c", step.replace("{out}", values["out"])]

    monkeypatch.setattr(_card_run, "arguments", arguments)


def run(folder: Path, *parts: Part) -> dict[str, Outcome]:
    Runner(Results(folder), list(parts), os.environ, {}).run()
    return Results(folder).outcomes()


@pytest.mark.usefixtures("python_steps")
def test_lines_of_a_part_are_what_it_writes_or_what_it_prints(tmp_path: Path) -> None:
    writes = "open('{out}', 'a').write('{\"a\": 1}\\n{\"a\": 2}\\n{\"cut'); print('{\"b\": 0}')"
    prints = "import sys; print('{\"a\": 3}'); print('words', file=sys.stderr)"
    found = run(tmp_path, a_part("writes", writes), a_part("prints", prints))
    assert {name: (one.state, one.lines) for name, one in found.items()} == {
        "writes": (DONE, [{"a": 1}, {"a": 2}]), "prints": (DONE, [{"a": 3}]),
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "log.txt"}
    assert "words" in (tmp_path / "log.txt").read_text()


@pytest.mark.usefixtures("python_steps")
def test_a_part_that_fails_says_why_and_the_next_one_runs(tmp_path: Path) -> None:
    bad = "import sys; print('{\"a\": 1}'); sys.exit('no memory')"
    found = run(tmp_path, a_part("bad", bad, "raise SystemExit(0)"), a_part("good", ""))
    assert (found["bad"].state, found["bad"].why) == (FAILED, "no memory")
    assert found["bad"].lines == [{"a": 1}] and found["good"].state == DONE


# Starts a process that would stay, writes its number and a line, and waits.
STAYS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print('{"other": %d}' % other.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("python_steps")
def test_a_part_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_card_run, "_GRACE_S", 0.2)
    parts = [a_part("stays", STAYS), a_part("never", "")]
    runner = Runner(Results(tmp_path), parts, os.environ, {})
    thread = threading.Thread(target=runner.run)
    thread.start()
    raw = tmp_path / "stays.jsonl"
    while not (raw.is_file() and raw.read_text().endswith("\n")):
        time.sleep(0.01)
    runner.stop.set()
    thread.join()
    found = Results(tmp_path).outcomes()
    assert list(found) == ["stays"] and (found["stays"].state, found["stays"].why) == (
        CUT,
        "stopped",
    )
    assert is_gone(found["stays"].lines[0]["other"])


def is_gone(pid: int) -> bool:
    """Wait until a process has ended: whoever reaps orphans may be slow."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(1000):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.usefixtures("python_steps")
def test_a_limit_cuts_a_part_and_keeps_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_card_run, "_PATIENCE", 0.0)
    monkeypatch.setattr(_card_run, "_MORE_S", 1.0)
    long = "import time; print('{\"a\": 1}', flush=True); time.sleep(600)"
    found = run(tmp_path, a_part("long", long), a_part("short", ""))
    assert (found["long"].state, found["long"].why) == (CUT, "its limit")
    # a busy machine may not even start it in that time
    assert found["long"].lines in ([], [{"a": 1}])
    ended = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [x["part"] for x in ended if "state" in x] == ["long", "short", "long"], "once more"


def test_the_slow_link_knows_how_the_kernel_reads_host_memory() -> None:
    slowed = _slow_link.kernel(_slow_link.FETCH.read_text())
    assert slowed.count("slow_load(src") == slowed.count("again < TIMES") == 1
    with pytest.raises(BuildError, match="another way"):
        _slow_link.kernel(slowed)
    with pytest.raises(BuildError, match="has other arguments"):
        _slow_link.arguments(_slow_link.TYPES.read_text().replace(" fetch;", " fetched;"))
    assert "moegraph_rows_fetch" in _slow_link.arguments(_slow_link.TYPES.read_text())


@pytest.mark.parametrize("files", [(), ("memory.max", "memory.swap.max")])
def test_tiers_have_a_control_group_where_one_can_be_made(
    files: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without these files is no folder of control groups, though it can be made."""
    make = Path.mkdir

    def mkdir(path: Path) -> None:
        make(path)
        for name in files:
            (path / name).touch()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    version_2 = (str(tmp_path), *bench_tiers.GROUPS[0][1:])
    monkeypatch.setattr(bench_tiers, "GROUPS", [version_2])
    with bench_tiers.control_group(5000) as group:
        assert bool(group) == bool(files)
        if group:
            limits = [(group[0] / name).read_text() for name in files]
            assert limits == ["5000", "0"]
    assert not [*tmp_path.iterdir()]


def test_figures_of_clients_with_drafts_and_of_tiers() -> None:
    drafted = {"clients": 8, "kind": "code", "way": "mtp", "tps": 11.0}
    lines = [{**drafted, "way": "off", "tps": 10.0, "drafts": None},
             {**drafted, "drafts": {"tokens_per_step": 2.5}}]  # fmt: skip
    (found,) = figures.drafts_clients({"x": lines}, "x")
    assert (found.shown, found.of) == ("1.10x", "11 / 10") and "2.50 tokens" in found.name
    tier = {
        "kind": "tiers", "limit": "control group of 8 GiB", "tps": 50.0, "of_bound": 0.58,
        "file_bytes_a_token": 14.3e6, "disk_bytes_per_s": [1e9, 1.21e9], "swapped_bytes": 0,
    }  # fmt: skip
    shown = [figure.shown for figure in figures.tiers({"x": [tier]}, "x")]
    assert shown == ["50 tok/s", "0.58x", "0 MB"]


def test_sequences_are_compared_without_the_first_of_several_times() -> None:
    theirs = [{"pl": 32, "speed_tg": speed} for speed in (1.0, 4.0, 5.0, 6.0)]
    ours = {"kind": "sample", "setting": "whole", "test": "seqs 32", "at": 1, "value": 10.0,
            "unit": "tok/s"}  # fmt: skip
    (found,) = figures.sequences({"x": [*theirs, ours]}, "x")
    assert found.value == 2.0
