"""`moegraph plan` without a model: what a machine can run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moegraph.cli import main, models, plan
from moegraph.ggml import nvml
from moegraph.ggml.free_memory import HostMemory
from moegraph.gguf.hubnames import parse_hub_name
from moegraph.placement.known import _TABLE, known_models
from moegraph.units import GiB

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from gen_known import MODELS, row
from modelgen.presets import PRESETS

ROWS = json.loads(_TABLE.read_text())


def run(monkeypatch: pytest.MonkeyPatch, host_gib: float, *args: str) -> Any:
    memory = HostMemory(1 << 50, int((host_gib + 2 + 1.5) * GiB), None)
    monkeypatch.setattr(nvml, "gpu_card", lambda: None)
    for module in (models, plan):
        monkeypatch.setattr(module, "host_memory", lambda: memory)
    return CliRunner().invoke(main, ["plan", *args])


def test_of_each_model_the_largest_that_fits() -> None:
    assert [one.name for one in known_models(0)] == [name for name, *_ in MODELS]
    for room in (0, 14 * GiB, 20 * GiB, 1 << 50):
        for one in known_models(room):
            sizes = {r["quant"]: r["n_bytes"] for r in ROWS if r["name"] == one.name}
            fits = [n for n in sizes.values() if n <= room]
            assert one.n_bytes == sizes[one.quant] == max(fits, default=min(sizes.values()))
            assert one.need.experts < one.n_bytes and parse_hub_name(one.repo).pick is None


def test_the_table_is_what_the_script_computes(tmp_path: Path) -> None:
    """One row; the whole takes a quarter of a minute: scripts/gen_known.py --check."""
    name, repo, _ = MODELS[2]
    preset = PRESETS["gpt-oss-20b"]
    found = row(name, repo, "MXFP4", preset, preset.mix, tmp_path)
    (mine,) = (r for r in ROWS if r["name"] == name)
    assert {**found, "need": 0, "token": 0} == {**mine, "need": 0, "token": 0}
    assert list(found["token"]) == pytest.approx(mine["token"], rel=0.05), (
        "run scripts/gen_known.py"
    )
    assert found["need"].pop("slot_bytes") == mine["need"].pop("slot_bytes")
    assert found["need"] == pytest.approx(mine["need"], rel=0.05), "run scripts/gen_known.py"
    # and its prediction is that of the file
    arguments = ["plan", str(tmp_path / "model.gguf"), "-ub", "512", "--vram", "8", "--json"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    (budget,) = json.loads(done.stdout)["budgets"]
    with pytest.MonkeyPatch.context() as patch:
        rows = json.loads(run(patch, 16, "--vram", "8", "--json").stdout)["models"]
    (known,) = (r for r in rows if r["name"] == name)
    assert known["resident_share"] == pytest.approx(budget["plan"]["resident_share"], rel=0.1)
    assert known["decode_tps"] == pytest.approx(budget["predicted"]["decode_tps"], rel=0.1)


def test_without_a_card_what_fits_is_shown_without_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, 13.0)
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and "no card" in lines[0] and "13.0 GiB of card and host" in lines[0]
    assert [line.split()[:2] for line in lines[2:]] == [
        ["Gemma-4-26B-A4B", "Q3_K_M"], ["gpt-oss-20b", "MXFP4"], ["Qwen3-Coder-30B-A3B", "Q2_K"],
        ["GLM-4.7-Flash", "Q2_K"],
    ]  # fmt: skip
    assert (
        "too large for this memory: Qwen3.6-35B-A3B, Qwen3-Next-80B-A3B, GLM-4.5-Air" in done.stderr
    )


@pytest.mark.parametrize(
    "args, words",
    [(("-c", "9000"), "-c is for a model; give TARGET or -hf"),
     (("--profile", "x"), "--profile is for a model")],
)  # fmt: skip
def test_what_needs_a_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], words: str
) -> None:
    done = run(monkeypatch, 13.0, *args)
    assert done.exit_code == 2 and words in done.stderr
