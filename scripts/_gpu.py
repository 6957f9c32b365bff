"""Which NVIDIA cards this machine has, and whether a build for them is possible."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

import _cuda
import _venv
from _tools import BuildError, say

# Compute capability and CUDA release below which moegraph's kernels do not compile or run.
MIN_ARCH, MIN_CUDA = 75, (12, 4)


@dataclass(frozen=True)
class Card:
    """A card as nvidia-smi names it.

    arch: its compute capability times ten, such as 86. n_bytes: its memory. address: PCI, as
    0000:c1:00.0.
    """

    name: str
    arch: int
    n_bytes: int = 0
    uuid: str = ""
    address: str = ""


@dataclass(frozen=True)
class Toolkit:
    """What nvcc is. archs: the compute capabilities, times ten, that it compiles for."""

    version: tuple[int, int]
    archs: frozenset[int]


# What nvidia-smi is asked for, as csv without head and units.
_FIELDS = "name,compute_cap,memory.total,uuid,pci.bus_id"


def parse_cards(text: str) -> list[Card]:
    """Parse nvidia-smi's list of _FIELDS; skip lines of another form."""
    cards = []
    for line in text.splitlines():
        name, *rest = (field.strip() for field in line.rsplit(",", 4))
        if len(rest) == 4 and rest[1].isdigit() and rest[0].replace(".", "").isdigit():
            capability, mib, uuid, address = rest
            domain, _, place = address.lower().partition(":")
            arch = int(capability.replace(".", ""))
            cards.append(Card(name, arch, int(mib) << 20, uuid, f"{domain[-4:]}:{place}"))
    return cards


def choose(cards: list[Card] | str, toolkit: Toolkit | str) -> tuple[list[str], str]:
    """Return options of scripts/build for these cards with this nvcc, and a line that says why.

    cards, toolkit: a text says why there is none.
    """
    if isinstance(cards, str) or not cards:
        why = cards if isinstance(cards, str) else "nvidia-smi lists no card"
        return ["--cpu"], f"{why}: building for the CPU; --cuda-arch ARCH builds for a card by hand"
    found = ", ".join(f"{card.name} ({_dotted(card.arch)})" for card in cards)
    able = sorted({card.arch for card in cards if card.arch >= MIN_ARCH})
    if not able:
        why = f"compute capability {_dotted(MIN_ARCH)} or more is needed"
        return ["--cpu"], f"found {found}; {why}: building for the CPU"
    if isinstance(toolkit, str):
        return ["--cpu"], f"found {found}, but {toolkit}: building for the CPU"
    release = f"CUDA {toolkit.version[0]}.{toolkit.version[1]}"
    archs = [arch for arch in able if arch in toolkit.archs]
    if toolkit.version < MIN_CUDA or not archs:
        needed = "12.8" if toolkit.version >= MIN_CUDA else "12.4"
        why = f"{release} does not compile for it; install {needed} or newer and run this again"
        return ["--cpu"], f"found {found}, but {why}: building for the CPU"
    options = ["--cuda-arch", *map(str, archs)]
    return options, (f"found {found} and {release}: building with {' '.join(options)}, once "
                     "10 to 40 minutes; --cpu builds for the CPU only, in minutes")  # fmt: skip


def _dotted(arch: int) -> str:
    return f"{arch // 10}.{arch % 10}"


def find_cards() -> list[Card] | str:
    """Return the cards that the driver knows, or why they cannot be listed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no NVIDIA card found (there is no nvidia-smi)"
    query = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer ({error})"
    cards = parse_cards(done.stdout)
    if done.returncode != 0 or not cards:
        said = " ".join((done.stdout + done.stderr).split())[:200]
        return f"nvidia-smi lists no card ({said or done.returncode})"
    return cards


def find_nvcc() -> Toolkit | str:
    """Return what nvcc can compile for, or why there is none."""
    try:
        home, version = _cuda.find_toolkit()
    except (BuildError, OSError) as error:
        return str(error)
    listed = subprocess.run(
        [str(home / "bin" / "nvcc"), "--list-gpu-code"], capture_output=True, text=True, check=False
    )
    words = (word.removeprefix("sm_") for word in listed.stdout.split())
    return Toolkit(version, frozenset(int(word) for word in words if word.isdigit()))


def build_options(given: list[str]) -> list[str]:
    """Return the options of scripts/build: those given, and a device unless they name one."""
    if any(option == "--cpu" or option.startswith("--cuda-arch") for option in given):
        return given
    options, line = choose(find_cards(), find_nvcc())
    say(line)
    return [*given, *options]


def bring_cublas() -> None:
    """Install the wheel of cuBLAS into .venv if the toolkit has none; .venv must exist."""
    toolkit, (major, _) = _cuda.find_toolkit()
    if _cuda.toolkit_cublas(toolkit) or _cuda.wheel_cublas(_cuda.venv_packages(), major):
        return
    wheel = f"{_cuda.wheel_name(major)}=={major}.*"
    say(f"{toolkit} has no cuBLAS: installing the wheel {wheel}")
    _venv.run_step(f"installing {wheel}", _venv.pip(wheel))
