"""What scripts/quickstart builds: for which cards, with which nvcc, and what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import _gpu
from _gpu import Card, Toolkit, choose, parse_cards

CARD = Card("NVIDIA GeForce RTX 3090", 86)
CUDA = Toolkit((12, 8), frozenset({75, 80, 86, 89, 90, 120}))


def test_cards_are_read_from_nvidia_smi() -> None:
    text = "NVIDIA H200, 9.0, 4, G-1, 0000:01\nA, B card, 12.0, 8, G-2, 0000:02\n"
    found = [(card.name, card.arch) for card in parse_cards(text)]
    assert found == [("NVIDIA H200", 90), ("A, B card", 120)]
    assert parse_cards('Field "compute_cap" is not a valid field to query.\n\nX, [N/A]\n') == []


@pytest.mark.parametrize(
    "cards, toolkit, options, line",
    [
        ([CARD], CUDA, ["--cuda-arch", "86"], "found NVIDIA GeForce RTX 3090 (8.6) and CUDA 12.8"),
        ([CARD, Card("b", 75), CARD], CUDA, ["--cuda-arch", "75", "86"], "b (7.5)"),
        ([CARD, Card("old", 61)], CUDA, ["--cuda-arch", "86"], "old (6.1)"),
        ("no NVIDIA card found", CUDA, ["--cpu"], "no NVIDIA card found: building for the CPU"),
        ([], CUDA, ["--cpu"], "nvidia-smi lists no card: building for the CPU"),
        ([Card("old", 61)], CUDA, ["--cpu"], "found old (6.1); compute capability 7.5 or more"),
        ([CARD], "no nvcc", ["--cpu"], "RTX 3090 (8.6), but no nvcc: building for the CPU"),
        ([CARD], Toolkit((12, 2), CUDA.archs), ["--cpu"], "CUDA 12.2 does not compile for it"),
        ([Card("n", 120)], Toolkit((12, 4), frozenset({86})), ["--cpu"], "install 12.8 or newer"),
        ([CARD, Card("n", 120)], Toolkit((12, 4), frozenset({86})), ["--cuda-arch", "86"], "n (12"),
    ],
)  # fmt: skip
def test_what_is_built(
    cards: list[Card] | str, toolkit: Toolkit | str, options: list[str], line: str
) -> None:
    found, why = choose(cards, toolkit)
    assert found == options and line in why


@pytest.mark.parametrize("given", [["--cpu"], ["--cuda-arch", "90"], ["--cuda-arch=90", "-j", "2"]])
def test_a_device_that_was_given_is_not_looked_for(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gpu, "find_cards", lambda: pytest.fail("looked for cards"))
    assert _gpu.build_options(given) == given


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_programs_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bin"
    program(
        folder, "nvidia-smi", f'echo "$@" > {tmp_path}/asked; echo "NVIDIA L4, 8.9, 24, G, 0:1"'
    )
    nvcc = (
        'case "$1" in --version) echo "release 12.6, V12.6.1";; -v) echo "#$ TOP=$0/../..";;'
        " --list-gpu-code) echo sm_86; echo sm_89;; esac"
    )
    program(folder, "nvcc", nvcc)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for name in ("CUDACXX", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert _gpu.build_options(["-j", "2"]) == ["-j", "2", "--cuda-arch", "89"]
    assert "found NVIDIA L4 (8.9) and CUDA 12.6: building with --cuda-arch 89" in (
        capsys.readouterr().out
    )
    assert (tmp_path / "asked").read_text().startswith("--query-gpu=name,compute_cap,")
    # a driver that is not running
    program(folder, "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert _gpu.build_options([]) == ["--cpu"]
    assert "nvidia-smi lists no card (NVIDIA-SMI has failed)" in capsys.readouterr().out
    (folder / "nvidia-smi").unlink()
    assert _gpu.build_options([]) == ["--cpu"]
    assert "no NVIDIA card found (there is no nvidia-smi)" in capsys.readouterr().out
