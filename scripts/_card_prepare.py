"""Prepare a machine for scripts/measure_card: look at it, build or unpack, write a model."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import _card
import _card_pack
import _card_upstream
import _gpu
import _tools
import _venv
from _card import BINDINGS, GIB, SITE, WORK, Settings
from _card_pack import Manifest
from _tools import ROOT, BuildError, fetch, say

from moegraph.threads import default_threads

NATIVE = ROOT / "moegraph" / "ggml" / "_native.abi3.so"
# What a pack may hold, by the name in it.
FOLDERS = {
    "ours/lib": ROOT / "moegraph" / "lib", "ours/_native.abi3.so": NATIVE,
    "ours/bindings": BINDINGS,
    "upstream": _card_upstream.UPSTREAM, "rival": _card_upstream.RIVAL, "wheels": WORK / "wheels",
}  # fmt: skip
KINDS = ("ours", "upstream", "rival", "wheels")
PIECE_BYTES = 15 << 20


@dataclass(frozen=True)
class Preset:
    """A synthetic model. model: options of make_model.py. draft: its drafter's preset, or ""."""

    about: str
    model: tuple[str, ...]
    draft: str
    n_gib: float
    quick: bool = False


PRESETS = {
    "35b": Preset("the shape of 35B-A3B with an MTP block, and its DFlash drafter",
                  ("--preset", "35b-a3b", "--n-layer-nextn", "1"), "35b-current", 24.0),
    "half": Preset("half of its layers, for less memory and disk",
                   ("--preset", "35b-a3b", "--n-layer-nextn", "1", "--n-layer", "20"),
                   "half", 13.0),
    "mini": Preset("a few MB, to try this script out; its figures mean nothing",
                   ("--preset", "mini35b", "--n-ctx-train", "65536"), "mini", 0.1, quick=True),
}  # fmt: skip


def find_preset(name: str) -> Preset:
    """Return a preset: of those above, or of make_model.py, without a drafter."""
    return PRESETS.get(name) or Preset("", ("--preset", name), "", 0.0)


def look() -> None:
    """Say what the machine has, and which models fit."""
    for gpu in _card.find_gpus():
        say(f"{gpu.name}, compute capability {gpu.arch / 10}, {gpu.n_bytes / GIB:.0f} GiB")
    nvcc = _gpu.find_nvcc()
    n_cores, free = default_threads(), shutil.disk_usage(ROOT).free
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    compiler = nvcc if isinstance(nvcc, str) else f"nvcc {nvcc.version[0]}.{nvcc.version[1]}"
    say(f"{n_cores} cores, {host / GIB:.0f} GiB of memory, {free / GIB:.0f} GiB of disk free; "
        f"{compiler}")  # fmt: skip
    for name, preset in PRESETS.items():
        fits = free > preset.n_gib * GIB and host > (preset.n_gib + 4) * GIB
        say(f"model --preset {name} ({preset.about}): {'fits' if fits else 'does not fit'}")


def install_wheels(folder: Path) -> None:
    """Install wheels for the Python that runs this, without a package index."""
    wheels = sorted(str(path) for path in folder.glob("*.whl"))
    if not wheels:
        raise BuildError(f"{folder} has no wheels")
    shutil.rmtree(SITE, ignore_errors=True)
    _tools.pip_install(
        ["--no-index", "--no-deps", "--no-compile", "--target", str(SITE), *wheels], os.environ
    )
    if folder != FOLDERS["wheels"]:
        shutil.rmtree(FOLDERS["wheels"], ignore_errors=True)
        shutil.copytree(folder, FOLDERS["wheels"])  # so that a pack can hold them


def build_ours(options: list[str], portable: str | None, sdist: str | None) -> None:
    """Build this tree: in .venv as scripts/quickstart does, or for the Python of SITE."""
    given = [*options, *(["--portable", portable] if portable else [])]
    given += ["--sdist", sdist] if sdist else []
    if not SITE.is_dir():
        _venv.check_machine()
        if options[0] == "--cuda-arch":
            _venv.make_venv()
            _gpu.bring_cublas()
        _venv.prepare(given, extras="test")
        return
    bring_bindings(sdist)
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        if not NATIVE.is_file():
            raise BuildError(f"no Python headers to build {NATIVE.name}; unpack one (--unpack)")
        given.append("--libraries")
    env = _card.environment(None)
    _venv.run_step("scripts/build", [sys.executable, ROOT / "scripts" / "build", *given], env)


def bring_bindings(sdist: str | None) -> None:
    """Take the Python files of llama-cpp-python, which load our libraries, from its source."""
    if not BINDINGS.is_dir():
        archive = fetch.find_sdist(sdist, ROOT / "build" / "cache")
        _card_upstream.bindings(archive, BINDINGS)


def unpack(paths: list[Path]) -> list[str]:
    """Unpack what was built elsewhere; return the options with which our libraries were built."""
    found: list[str] = []
    for path in paths:
        start = time.monotonic()
        about = _card_pack.unpack(path, FOLDERS)
        kinds = [str(kind) for kind in about["kinds"]]  # type: ignore[attr-defined]
        if "ours" in kinds:
            if about["patchset"] != fetch.patchset():
                held = about["patchset"]
                raise BuildError(f"{path} holds patch set {held}, not {fetch.patchset()}")
            found = [str(option) for option in about["options"]]  # type: ignore[attr-defined]
            _tools.remember_device(found)
        if "wheels" in kinds:
            install_wheels(FOLDERS["wheels"])
        say(f"unpacked {', '.join(kinds)} of {path} in {time.monotonic() - start:.0f} s")
    return found


def pack(path: Path, options: list[str], kinds: list[str], sdist: str | None) -> None:
    """Pack what was built; the rival and wheels, if they are there."""
    bring_bindings(sdist)
    kinds = [kind for kind in kinds if kind not in ("rival", "wheels") or FOLDERS[kind].is_dir()]
    start = time.monotonic()
    about: Manifest = {"kinds": kinds, "options": options, "patchset": fetch.patchset()}
    folders = {name: path for name, path in FOLDERS.items() if name.partition("/")[0] in kinds}
    written = _card_pack.pack(path, folders, about, PIECE_BYTES)
    size = sum(piece.stat().st_size for piece in written)
    say(f"packed {', '.join(kinds)} into {len(written)} pieces, {size / 2**20:.1f} MiB, in "
        f"{time.monotonic() - start:.0f} s: {written[0]}")  # fmt: skip


def choose_options(given: list[str], unpacked: list[str]) -> list[str]:
    """Return options of scripts/build: given ones, those of unpacked libraries, or the cards'."""
    if given or unpacked[:1] == ["--cuda-arch"]:
        return given or unpacked
    options, line = _gpu.choose(_gpu.find_cards(), _gpu.find_nvcc())
    if options[0] == "--cpu":
        why = line.partition(": building")[0]
        raise BuildError(f"{why}; --cpu tries this script out without a card")
    say(line)
    return options


def write_model(name: str, folder: Path, settings: Settings) -> Settings:
    """Write the synthetic model of a preset and its drafter, unless they are there.

    Returns the settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    preset = find_preset(name)
    model, draft = folder / f"{name}.gguf", folder / f"{name}-dflash.gguf"
    wanted = {model: ("make_model.py", *preset.model)}
    if preset.draft:
        wanted[draft] = ("make_drafter.py", "--preset", preset.draft)
    for path, (script, *options) in wanted.items():
        if path.is_file():
            say(f"{path} is there")
            continue
        start = time.monotonic()
        env = _card.environment(None)
        _venv.run_step(script, [_card.python(), ROOT / "scripts" / script, path, *options], env)
        size = path.stat().st_size / 1e9
        say(f"{path}: {size:.1f} GB in {time.monotonic() - start:.0f} s")
    used = str(draft) if preset.draft else ""
    return settings.keep(model=str(model), draft=used, quick=preset.quick)
