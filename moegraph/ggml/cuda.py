"""The CUDA backend: where it is, and in one line what it lacks on this machine (pure)."""

from __future__ import annotations

import mmap
import os
import re
from importlib.util import find_spec
from pathlib import Path

from .nvml import cuda_driver, driver_version

# The libraries of this build.
FOLDER = Path(__file__).resolve().parent.parent / "lib"
LIBRARY = "libggml-cuda.so"
# Compute capability of the oldest card that our kernels know.
_OLDEST = (7, 5)
# Oldest driver for each major version of CUDA that has a package, best first.
_DRIVERS = {13: "580", 12: "525"}
# Architectures that the packages have code for; those that end in -server have that of others. Each
# has a folder of its own, so both may be installed.
_CONSUMER = "75 86 89 120"


def packaged() -> dict[Path, int]:
    """Return the backends of installed packages with CUDA's major version, newest first."""
    names = {f"moegraph_cuda{m}{kind}": m for m in _DRIVERS for kind in ("", "_server")}
    specs = [(find_spec(name), m) for name, m in names.items()]
    places = [(spec.submodule_search_locations, m) for spec, m in specs if spec]
    found = {Path(where[0], "lib", LIBRARY): m for where, m in places if where}
    return {path: m for path, m in found.items() if path.is_file()}


def by_fit() -> dict[Path, int]:
    """Return packaged(), those first that have code for the cards with the most memory."""
    driver, found = cuda_driver(), packaged()
    cards = driver.cards if driver else ()
    bytes_of = {path: sum(n for _, card, n in cards if _fits(path, card)) for path in found}
    return {path: found[path] for path in sorted(found, key=lambda path: -bytes_of[path])}


def runtime(major: int) -> list[Path]:
    """Return NVIDIA's libraries of a CUDA in Python's packages, in the order in which they load."""
    spec = find_spec("nvidia")
    places = (spec and spec.submodule_search_locations) or ()
    names = [f"*/lib/lib{name}.so.{major}" for name in ("cudart", "cublasLt", "cublas")]
    return [path for name in names for place in places for path in Path(place).glob(name)]


def is_checkout() -> bool:
    """Return whether scripts/build builds the libraries."""
    return (FOLDER.parent.parent / "scripts" / "build").is_file()


def extra(major: int, card: tuple[int, int] = _OLDEST) -> str:
    """Return the command that installs the backend for a CUDA and a card's compute capability."""
    server = "" if _has_code(_CONSUMER, card) else "-server"
    return f"pip install 'moegraph[cuda{major}{server}]'"


def remedy(*paths: Path) -> str:
    """Return the command that installs backends' packages of this version and what they need."""
    names = [path.parents[1].name.removeprefix("moegraph_").replace("_", "-") for path in paths]
    return f"pip install 'moegraph[{','.join(names)}]'" if names else "pip install moegraph"


def _has_code(architectures: str, card: tuple[int, int]) -> bool:
    """Return whether a card runs code for architectures such as 80 or, for PTX, 90-virtual."""
    found = re.findall(r"(\d+)(\d)(-virtual)?", architectures)
    has = [((int(high), int(low)), ptx) for high, low, ptx in found]
    return any(one <= card and (ptx or one[0] == card[0]) for one, ptx in has)


def _fits(path: Path, card: tuple[int, int]) -> bool:
    """Return whether a backend can use a card; a package's says for which it has code."""
    file = path.with_name("architectures")
    return card >= _OLDEST and (not file.is_file() or _has_code(file.read_text("ascii"), card))


def major_of(path: Path) -> int:
    """Return the major version of CUDA that a library needs; 0 if it names none."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        found = re.search(rb"libcudart\.so\.(\d+)", data)
        return int(found[1]) if found else 0


def lacking(major: int, path: Path = FOLDER / LIBRARY) -> str:
    """Return what a backend for this CUDA (0: any) lacks here, and what to do; empty: nothing."""
    driver, hidden = cuda_driver(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if driver is None:
        return "there is no NVIDIA driver (libcuda.so.1); install it"
    cards = sorted(driver.cards, key=lambda one: (_fits(path, one[1]), one[1]))
    name, card, _ = cards[-1] if cards else ("", _OLDEST, 0)
    newest = driver.version[0]
    if newest < major:
        older = f", or {extra(newest, card)}" if newest in _DRIVERS else ""
        return (
            f"the NVIDIA driver {driver_version()} supports CUDA {newest}.{driver.version[1]}, and "
            f"CUDA {major} needs driver {_DRIVERS.get(major, '')} or newer; update it{older}"
        )
    if not cards:
        why = "" if hidden is None else f" with CUDA_VISIBLE_DEVICES={hidden!r}"
        return f"the NVIDIA driver shows no card{why}; nvidia-smi may say why"
    if _fits(path, card):
        return ""
    has = f"{name} has compute capability {'.'.join(map(str, card))}"
    if card < _OLDEST:
        return f"{has}; 7.5 or newer is needed"
    return f"{has}, for which {path} has no code; {extra(major, card)}"


def unused_card() -> str:
    """Return what to install for this machine's card or backend; empty if there is no need."""
    driver = cuda_driver()
    if driver is None and packaged():
        return f"CUDA is not used: {lacking(0)}"
    if driver is None or _has_backend() or lacking(0):
        return ""
    name, (high, low), _ = max(driver.cards, key=lambda card: card[1])
    if lacks := lacking(min(_DRIVERS)):
        return f"{name} is not used: {lacks}"
    add = extra(13 if driver.version[0] >= 13 else 12, (high, low))
    if is_checkout():
        add = f"scripts/build --cuda-arch {high}{low}"
    return f"{name} is not used, because this installation has no CUDA; to add it: {add}"


def card_bytes() -> int:
    """Return the bytes of memory of all cards that this installation can use."""
    driver = cuda_driver() if _has_backend() else None
    return sum(n for _, card, n in driver.cards if _is_usable(card)) if driver else 0


def _has_backend() -> bool:
    return (FOLDER / LIBRARY).exists() or bool(packaged())


def _is_usable(card: tuple[int, int]) -> bool:
    """Return whether the backend that is loaded, if its libraries are there, can use a card."""
    own = FOLDER / LIBRARY
    found = {} if own.exists() else by_fit()
    works = (path for path, major in found.items() if not lacking(major, path))
    return _fits(next(works, next(iter(found), own)), card)


def is_unusable(index: int) -> bool:
    """Return whether the backend cannot use a card, by its number in CUDA's order."""
    driver = cuda_driver()
    cards = driver.cards[index : index + 1] if driver else ()
    return not all(_is_usable(card) for _, card, _ in cards)
