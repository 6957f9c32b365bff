"""What a CUDA backend lacks on a machine, and what its card lacks: one line each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moegraph.ggml import cuda
from moegraph.ggml.nvml import CudaDriver

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import _wheel

NEW = ("NVIDIA GeForce RTX 3060", (8, 6), 12)
OLD = ("NVIDIA GeForce GTX 1080", (6, 1), 8)


def have(
    monkeypatch: pytest.MonkeyPatch, driver: CudaDriver | None, *packages: int, hidden: bool = False
) -> None:
    monkeypatch.setattr(cuda, "cuda_driver", lambda: driver)
    monkeypatch.setattr(cuda, "driver_version", lambda: "535.183.01")
    monkeypatch.setattr(cuda, "packaged", lambda: {Path("x"): major for major in packages})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    "driver, major, lacks",
    [
        (None, 13, "there is no NVIDIA driver (libcuda.so.1); install it"),
        (CudaDriver((12, 2), (NEW,)), 13,
         "the NVIDIA driver 535.183.01 supports CUDA 12.2, and CUDA 13 needs driver 580 or newer; "
         "update it, or pip install 'moegraph[cuda12]'"),
        (CudaDriver((12, 2), (("A100", (8, 0), 1),)), 13, "pip install 'moegraph[cuda12-server]'"),
        (CudaDriver((11, 4), (NEW,)), 12, "CUDA 12 needs driver 525 or newer; update it"),
        (CudaDriver((13, 0), ()), 13, "the NVIDIA driver shows no card; nvidia-smi may say why"),
        (CudaDriver((13, 0), (OLD,)), 13,
         "NVIDIA GeForce GTX 1080 has compute capability 6.1; 7.5 or newer is needed"),
        (CudaDriver((13, 0), (OLD, NEW)), 13, ""),
        (CudaDriver((12, 2), (("turing", (7, 5), 6),)), 12, ""),
        (CudaDriver((12, 2), (NEW,)), 0, ""),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, driver: CudaDriver | None, major: int, lacks: str
) -> None:
    have(monkeypatch, driver)
    found = cuda.lacking(major)
    assert found.endswith(lacks) and bool(found) == bool(lacks)


def test_a_card_that_is_hidden_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, CudaDriver((13, 0), ()), hidden=True)
    line = "the NVIDIA driver shows no card with CUDA_VISIBLE_DEVICES=''; nvidia-smi may say why"
    assert cuda.lacking(13) == line


@pytest.mark.parametrize(
    "architectures, card, add",
    [
        ("75 86 89 120", (8, 6), ""), ("75 86 89 120", (12, 1), ""), ("75-real", (7, 5), ""),
        ("75 86 89 120", (9, 0), "moegraph[cuda13-server]"),
        ("75 86 89 120", (8, 0), "moegraph[cuda13-server]"), ("80 90", (8, 9), ""),
        ("80 90 90-virtual", (10, 0), ""),
        ("80 90 90-virtual", (7, 5), "moegraph[cuda13]"),
    ],
)  # fmt: skip
def test_a_package_without_code_for_a_card_names_that_which_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architectures: str, card: tuple[int, int],
    add: str,
) -> None:  # fmt: skip
    path = tmp_path / cuda.LIBRARY
    path.with_name("architectures").write_text(architectures)
    cards = (("other", (6, 1), 1), ("new", card, 2))
    have(monkeypatch, CudaDriver((13, 0), cards))
    monkeypatch.setattr(cuda, "FOLDER", tmp_path / "none")
    monkeypatch.setattr(cuda, "packaged", lambda: {path: 13})
    lacks = f"new has compute capability {card[0]}.{card[1]}, for which {path} has no code; "
    assert cuda.lacking(13, path) == (add and f"{lacks}pip install '{add}'")
    assert [cuda.is_unusable(index) for index in range(3)] == [True, bool(add), False]
    assert cuda.card_bytes() == (0 if add else 2)


@pytest.mark.parametrize(
    "version, is_checkout, add",
    [((13, 0), False, "pip install 'moegraph[cuda13]'"),
     ((12, 8), False, "pip install 'moegraph[cuda12]'"),
     ((12, 8), True, "scripts/build --cuda-arch 86")],
)  # fmt: skip
def test_a_card_without_a_backend_is_told_what_to_add(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: tuple[int, int], is_checkout: bool,
    add: str,
) -> None:  # fmt: skip
    folder = tmp_path / "moegraph" / "lib"
    if is_checkout:
        (tmp_path / "scripts").mkdir()
        (tmp_path / "scripts" / "build").touch()
    monkeypatch.setattr(cuda, "FOLDER", folder)
    have(monkeypatch, CudaDriver(version, (OLD, NEW)))
    line = "NVIDIA GeForce RTX 3060 is not used, because this installation has no CUDA; to add it: "
    assert cuda.unused_card() == line + add
    assert [cuda.is_unusable(index) for index in (0, 1)] == [True, False]
    assert cuda.card_bytes() == 0, "none is used"
    for driver, packages in (
        (None, ()), (CudaDriver(version, ()), ()), (CudaDriver(version, (OLD,)), ()),
        (CudaDriver(version, (NEW,)), (13,)),
    ):  # fmt: skip
        have(monkeypatch, driver, *packages)
        assert cuda.unused_card() == ""
    have(monkeypatch, CudaDriver((11, 4), (NEW,)))
    line = "NVIDIA GeForce RTX 3060 is not used: the NVIDIA driver 535.183.01 supports CUDA 11.4, "
    assert cuda.unused_card() == line + "and CUDA 12 needs driver 525 or newer; update it"
    have(monkeypatch, None, 13)
    line = "CUDA is not used: there is no NVIDIA driver (libcuda.so.1); install it"
    assert cuda.unused_card() == line
    have(monkeypatch, CudaDriver(version, (NEW, OLD, NEW)))
    folder.mkdir(parents=True)
    (folder / cuda.LIBRARY).write_bytes(b"\x7fELF libcublas.so.13 libcudart.so.12 ")
    assert cuda.unused_card() == "" and cuda.major_of(folder / cuda.LIBRARY) == 12
    assert cuda.card_bytes() == 24, "of those that are new enough"
    (folder / cuda.LIBRARY).write_bytes(b"static")
    assert cuda.major_of(folder / cuda.LIBRARY) == 0


PACKAGES = {"cuda12_server": 12, "cuda12": 12, "cuda13_server": 13, "cuda13": 13}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """Install the files of all of CUDA's packages, with an empty library; return their paths."""
    assert cuda.packaged() == {}
    for name in PACKAGES:
        (tmp_path / f"moegraph_{name}" / "lib").mkdir(parents=True)
    monkeypatch.setattr(cuda, "FOLDER", tmp_path / "none")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cuda.packaged() == {}, "without a library"
    for name in PACKAGES:
        archs = "80 90 90-virtual" if name.endswith("server") else "75 86 89 120"
        for file, data in _wheel.cuda_files(f"moegraph_{name}", archs, b"").items():
            (tmp_path / file).write_bytes(data)
    return {name: tmp_path / f"moegraph_{name}" / "lib" / cuda.LIBRARY for name in PACKAGES}


def test_packages_are_found_side_by_side_newest_first(packages: dict[str, Path]) -> None:
    newest = list(reversed(PACKAGES))
    assert list(cuda.packaged().items()) == [(packages[n], PACKAGES[n]) for n in newest]
    both = cuda.remedy(packages["cuda13"], packages["cuda13_server"])
    assert both == "pip install 'moegraph[cuda13,cuda13-server]'"
    assert cuda.remedy() == "pip install moegraph"


@pytest.mark.parametrize(
    "version, cards, best, usable",
    [
        (13, [(9, 0)], "cuda13_server", [True]), (13, [(8, 6)], "cuda13", [True]),
        (13, [(8, 0), (8, 6), (8, 0)], "cuda13_server", [True, True, True]),
        (13, [(9, 0), (7, 5), (6, 1)], "cuda13_server", [True, False, False]),
        (13, [(9, 0), (7, 5), (7, 5)], "cuda13", [False, True, True]),
        (13, [(12, 0)], "cuda13", [True]),
        (12, [(8, 9)], "cuda12", [True]), (12, [(8, 0)], "cuda12_server", [True]),
    ],
)  # fmt: skip
def test_the_package_with_code_for_most_memory_is_tried_first(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, Path], version: int,
    cards: list[tuple[int, int]], best: str, usable: list[bool],
) -> None:  # fmt: skip
    driver = CudaDriver((version, 2), tuple(("card", card, card[0]) for card in cards))
    monkeypatch.setattr(cuda, "cuda_driver", lambda: driver)
    tried = cuda.by_fit()
    assert next(path for path, m in tried.items() if not cuda.lacking(m, path)) == packages[best]
    assert tried == cuda.packaged()
    assert [not cuda.is_unusable(index) for index in range(len(cards))] == usable
    assert cuda.card_bytes() == sum(card[0] for card, is_usable in zip(cards, usable) if is_usable)
