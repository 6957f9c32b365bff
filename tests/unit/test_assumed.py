"""For which card speeds are predicted: named, found by the driver, or usual for the size."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from moegraph.cli import main
from moegraph.cli.prediction import Assumption
from moegraph.errors import RequestError
from moegraph.experts.machines import MACHINES, usual_card
from moegraph.ggml import nvml
from moegraph.ggml.nvml import Card, CudaDriver, cuda_driver, gpu_card, gpu_used_bytes
from moegraph.units import GiB

RTX3060 = Card("NVIDIA GeForce RTX 3060", 12 * GiB, 360e9, 25.2e9, "PCIe 4.0 x16", 100e12)


def have(monkeypatch: pytest.MonkeyPatch, card: Card | None = None) -> None:
    monkeypatch.setattr(nvml, "gpu_card", lambda: card)


@pytest.mark.parametrize(
    "gib, name",
    [(1, "rtx2060"), (6, "rtx2060"), (8, "rtx4060"), (8.2, "rtx4060"), (10, "rtx3060"),
     (12, "rtx3060"), (16, "rtx4060ti"), (24, "desktop"), (80, "desktop")],
)  # fmt: skip
def test_without_a_card_the_size_decides(
    monkeypatch: pytest.MonkeyPatch, gib: float, name: str
) -> None:
    have(monkeypatch)
    assert usual_card(int(gib * GiB)).name == name
    assert Assumption.of("auto").machine([int(gib * GiB)]).name == name


def test_the_card_of_this_machine_is_taken_up_to_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, RTX3060)
    assume = Assumption.of("auto").machine
    mine = assume([8 * GiB])
    assert mine.name == RTX3060.name and assume([12 * GiB]) == mine
    assert "this machine's card: 12.0 GiB with 360 GB/s, PCIe 4.0 x16" in mine.title
    assert mine.whole == pytest.approx(MACHINES["rtx3060"].whole, rel=0.01)
    assert mine.stream(8) == pytest.approx(MACHINES["rtx3060"].stream(8), rel=0.02)
    assert assume([16 * GiB]).name == "rtx4060ti", "it has less memory than that"
    assert Assumption.of("h200").machine([8 * GiB]).name == "h200", "a name overrules it"
    have(monkeypatch, Card("NVIDIA H200", 141 * GiB, 4.9e12, 5e10, "PCIe 5.0 x16", 2e15))
    assert Assumption.of("auto").machine([8 * GiB]) is MACHINES["h200"], "measured"


def test_a_machine_that_is_unknown_is_refused() -> None:
    with pytest.raises(RequestError, match="not a built-in machine .h200, rtx2060"):
        Assumption.of("rtx9999")


class FakeDriver:
    """NVML and CUDA with two cards; what is in `missing` fails. is_divided: as with MIG.

    shown: the cards that CUDA shows to this process, in its order.
    """

    is_divided = False
    shown: tuple[int, ...] = (0, 1)

    NUMBERS: ClassVar = {
        "nvmlDeviceGetMemoryBusWidth": 192, "nvmlDeviceGetMaxPcieLinkGeneration": 4,
        "nvmlDeviceGetMaxPcieLinkWidth": 8, "nvmlDeviceGetNumGpuCores": 3584,
        "nvmlDeviceGetCount_v2": 2,
    }  # fmt: skip
    CARDS: ClassVar = (
        (b"NVIDIA GeForce RTX 3060", 12 * GiB, 0xC1), (b"NVIDIA GeForce RTX 3050", 6 * GiB, 0x4A),
    )  # fmt: skip

    def __init__(self, *missing: str) -> None:
        self.missing, self.n_open = missing, 0

    def __getattr__(self, name: str) -> Any:
        if name in self.missing:
            raise AttributeError(name)
        return lambda *args: self._call(name, args)

    def _call(self, name: str, args: tuple[Any, ...]) -> int:
        if name.startswith("cu"):
            return self._cuda(name, args)
        out: Any = getattr(args[-1], "_obj", None) if args else None
        title, n_bytes, bus = self.CARDS[getattr(args[0], "value", None) or 0 if args else 0]
        if name in ("nvmlInit_v2", "nvmlShutdown"):
            self.n_open += 1 if name == "nvmlInit_v2" else -1
        elif name in self.NUMBERS:
            out.value = self.NUMBERS[name]
        elif name == "nvmlDeviceGetHandleByIndex_v2":
            out.value = args[0]
        elif name == "nvmlDeviceGetMaxClockInfo":
            out.value = {1: 2100, 2: 7501}[args[1]]
        elif name == "nvmlDeviceGetCudaComputeCapability":
            args[1]._obj.value, out.value = 8, 6
        elif name == "nvmlDeviceGetMigMode":
            args[1]._obj.value = int(self.is_divided)
        elif name == "nvmlDeviceGetName":
            args[1].value = title
        elif name == "nvmlDeviceGetMemoryInfo":
            out.total, out.used = n_bytes, 5
        elif name == "nvmlDeviceGetPciInfo_v3":
            out.domain, out.bus, out.device = 0, bus, 0
        return 0

    def _cuda(self, name: str, args: tuple[Any, ...]) -> int:
        if not self.shown:
            return 100  # no device
        if name == "cuDeviceGet":
            args[0]._obj.value = self.shown[args[1]]
        elif name in ("cuDriverGetVersion", "cuDeviceGetCount"):
            args[0]._obj.value = 12040 if name == "cuDriverGetVersion" else len(self.shown)
        elif name == "cuDeviceGetName":
            args[0].value = self.CARDS[args[2]][0]
        elif name == "cuDeviceGetAttribute":
            args[0]._obj.value = {75: 8, 76: 6}[args[1]]
        elif name == "cuDeviceTotalMem_v2":
            args[0]._obj.value = self.CARDS[args[1]][1]
        elif name == "cuDeviceGetPCIBusId":
            args[0].value = b"0000:%02X:00.0" % self.CARDS[args[2].value][2]
        return 0


def drive(monkeypatch: pytest.MonkeyPatch, *missing: str) -> FakeDriver:
    driver = FakeDriver(*missing)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: driver)
    return driver


USED = {"0000:c1:00.0": 5, "0000:4a:00.0": 5}


def test_the_driver_describes_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = drive(monkeypatch)
    card = gpu_card()
    assert card and (card.name, card.n_bytes) == ("NVIDIA GeForce RTX 3060", 12 * GiB)
    assert card.memory_rate == pytest.approx(360e9, rel=0.01)
    assert card.link == "PCIe 4.0 x8" and card.link_rate == pytest.approx(12.6e9, rel=0.01)
    assert card.arithmetic == pytest.approx(100e12, rel=0.1)
    assert gpu_used_bytes() == USED
    assert driver.n_open == 0, "closed again"


@pytest.mark.parametrize(
    "shown, machine",
    [((1, 0), "NVIDIA GeForce RTX 3050"), ((1,), "NVIDIA GeForce RTX 3050"),
     ((0,), "NVIDIA GeForce RTX 3060"), ((), "rtx2060")],
)  # fmt: skip
def test_plan_is_for_the_card_that_cuda_shows_first(
    monkeypatch: pytest.MonkeyPatch, shown: tuple[int, ...], machine: str
) -> None:
    """As CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER say; an empty value shows no card."""
    drive(monkeypatch).shown = shown
    done = CliRunner().invoke(main, ["plan", "tiny", "--json", "--vram", "6", "--vram", "24"])
    assert done.exit_code == 0, done.output
    found = [budget["machine"] for budget in json.loads(done.stdout)["budgets"]]
    assert found == [machine, "desktop"]
    assert gpu_used_bytes() == USED, "the driver numbers all"


@pytest.mark.parametrize("shown", [(1, 0), (0,), ()])
def test_cuda_tells_its_version_and_the_cards_that_it_shows(
    monkeypatch: pytest.MonkeyPatch, shown: tuple[int, ...]
) -> None:
    drive(monkeypatch).shown = shown
    found = cuda_driver.__wrapped__()
    cards = [FakeDriver.CARDS[at] for at in shown]
    expected = tuple((name.decode(), (8, 6), n) for name, n, _ in cards)
    assert found == CudaDriver((12, 4) if shown else (0, 0), expected)


@pytest.mark.parametrize("missing", ["nvmlDeviceGetMemoryBusWidth", "nvmlDeviceGetName"])
def test_a_driver_that_does_not_tell_all_describes_no_card(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    driver = drive(monkeypatch, missing)
    assert gpu_card() is None and gpu_used_bytes() == USED
    assert driver.n_open == 0


def test_a_divided_card_is_not_what_programs_get(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch).is_divided = True
    assert gpu_card() is None
    drive(monkeypatch, "nvmlDeviceGetMigMode")  # an old driver
    assert gpu_card()


def test_without_a_driver_there_are_no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, "nvmlInit_v2")
    assert gpu_card() is None and gpu_used_bytes() == {}
    drive(monkeypatch, "cuInit")
    assert gpu_card() is None and gpu_used_bytes() == USED

    def none(_name: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", none)
    assert gpu_card() is None and gpu_used_bytes() == {}


def test_the_page_of_residency_names_all_machines() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "residency.md").read_text()
    assert [name for name in MACHINES if f"`{name}`" not in page] == []
