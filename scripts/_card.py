"""What scripts/measure_card measures with: machine, model, and the values of commands."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import _card_upstream
import _cuda
import _venv
from _bench import Line, commit_of, machine
from _gpu import Card, find_cards
from _tools import ROOT, BuildError, fetch

# Where settings, models and packages are; tests take another place.
WORK = Path(os.environ.get("MEASURE_CARD_WORK") or ROOT / "build" / "card")
SITE, BINDINGS = WORK / "site", _card_upstream.BINDINGS
_SETTINGS = WORK / "settings.json"
GIB = 1 << 30


@dataclass(frozen=True)
class Settings:
    """What `prepare` and `model` decided; `run` reads it.

    options: of scripts/build. before: an older tree to compare with, or "".
    """

    options: tuple[str, ...] = ("--cpu",)
    model: str = ""
    draft: str = ""
    quick: bool = False
    before: str = ""

    @property
    def on_cpu(self) -> bool:
        """Return whether this is a try-out without a card."""
        return self.options == ("--cpu",)

    @classmethod
    def load(cls) -> Settings:
        """Return what was kept, or the defaults."""
        if not _SETTINGS.is_file():
            return cls()
        kept = json.loads(_SETTINGS.read_text(encoding="utf-8"))
        return cls(**{**kept, "options": tuple(kept["options"])})

    def keep(self, **changes: object) -> Settings:
        """Write and return settings with changes."""
        changed = replace(self, **changes)  # type: ignore[arg-type]
        WORK.mkdir(parents=True, exist_ok=True)
        _SETTINGS.write_text(json.dumps(asdict(changed)), encoding="utf-8")
        return changed


def copy_tree(tree: Path) -> Path:
    """Copy a checkout's package and scripts, with the libraries of this one; return the copy."""
    if not (tree / "moegraph" / "__init__.py").is_file() or not (tree / "scripts").is_dir():
        raise BuildError(f"{tree}: no folders moegraph and scripts; name a checkout")
    copy, package = WORK / "before", ROOT / "moegraph"
    shutil.rmtree(copy, ignore_errors=True)
    left_out = shutil.ignore_patterns("lib", "*.so", "__pycache__", "models")
    for name in ("moegraph", "scripts"):
        shutil.copytree(tree / name, copy / name, ignore=left_out)
    for built in (package / "lib", package / "models"):
        (copy / "moegraph" / built.name).symlink_to(built)
    shutil.copy(package / "ggml" / "_native.abi3.so", copy / "moegraph" / "ggml")
    (copy / "COMMIT").write_text(commit_of(tree) + "\n", encoding="ascii")
    return copy


def find_gpus() -> list[Card]:
    """Return the cards of this machine; none without nvidia-smi."""
    found = find_cards()
    return [] if isinstance(found, str) else found


def python() -> Path:
    """Return the Python that runs the parts: that of .venv, unless packages lie in SITE."""
    own = SITE.is_dir() or not _venv.python().exists()
    return Path(sys.executable) if own else _venv.python()


def environment(gpu: Card | None) -> dict[str, str]:
    """Return the environment of a part that has a card for itself; None: of one without a card."""
    env = dict(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process compiles all modules again
    paths = [str(ROOT), *(map(str, (SITE, BINDINGS)) if SITE.is_dir() else ())]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, env.get("PYTHONPATH")]))
    libraries = [*cuda_libraries(), env.get("LD_LIBRARY_PATH", "")]
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    if (_card_upstream.UPSTREAM / "built").is_file():
        env["MOEGRAPH_ORACLE"] = str(_card_upstream.UPSTREAM)
    if gpu:
        env |= {"CUDA_VISIBLE_DEVICES": gpu.uuid, "BENCH_GPU": gpu.address}
    return env


def cuda_libraries() -> list[str]:
    """Return where cudart and cuBLAS are, for libraries that were built on another machine."""
    wheels = sorted(str(folder) for folder in SITE.glob("nvidia/*/lib"))
    try:
        toolkit, (major, _) = _cuda.find_toolkit()
        cublas = _cuda.find_cublas(toolkit, major)
    except (BuildError, OSError):
        return wheels
    return [str(toolkit / "lib64"), str(cublas.lib), *wheels]


@dataclass(frozen=True)
class Model:
    """What commands need to know of a model file; bytes."""

    n_layer: int
    n_dense: int  # layers without experts, which are the first
    n_expert: int
    n_bytes: int
    expert_bytes: int
    has_mtp: bool

    @classmethod
    def of(cls, path: str) -> Model:
        """Read the header of a file."""
        sys.path.insert(0, str(ROOT))
        from moegraph.arch import open_model

        with open_model(Path(path)) as model:
            hp = model.hparams
            experts = sum(x.nbytes for x in model.tensors.values() if "_exps." in x.name)
        size = Path(path).stat().st_size
        n_dense = hp.n_layer - len(hp.routed_layers)
        return cls(hp.n_layer, n_dense, hp.n_expert, size, experts, hp.n_layer_nextn > 0)

    def device_gib(self, share: float) -> float:
        """Return about how much memory a share of the experts and all else take on the device."""
        return (self.n_bytes + (share - 1) * self.expert_bytes) / GIB + 0.3

    def slots(self, share: float) -> int:
        """Return how many expert slots a share of the experts is."""
        return round(share * (self.n_layer - self.n_dense) * self.n_expert)

    def ncmoe(self, share: float) -> int:
        """Return -ncmoe with which llama.cpp has that share of the experts on the device."""
        return self.n_dense + round((1 - share) * (self.n_layer - self.n_dense)) if share < 1 else 0


# Sizes of the measurements, and of a try-out on a small model.
FULL = {
    "samples": "3", "few": "2", "five": "5", "tokens": "192", "gen": "128", "few_gen": "64",
    "long_answer": "512",
    "prompts": "512 8192", "prompt": "512", "two_prompts": "512 2048",
    "kinds": "code structured hopeless", "mtp": "1 2 3 4", "dflash": "3 5 7", "depth": "256",
    "depths": "8192 32768", "decode_ub": "512", "ub": "2048", "server_ub": "1024",
    "clients": "1 4 8 16", "clients_60": "1 4 8", "many_60": "16 32", "ctx": "40960", "mixed": "10",
    "long_prompt": "--long --beside 8 --prompt 8192 --turn 20000",
    "rows": "1 2 4 8 16 32", "seqs": "8 16 32", "few_rows": "8 16",
    "most_seqs": "32", "few_clients": "8",
    "traces": "sticky flat recorded", "warm": "96", "runs": "128",
    "first": "32 512", "lengths": "64 128 256 512 1024 2048",
}  # fmt: skip
QUICK = {
    "samples": "1", "few": "1", "five": "1", "tokens": "128", "gen": "4", "few_gen": "4",
    "long_answer": "24",
    "prompts": "24", "prompt": "24", "two_prompts": "24",
    "kinds": "code", "mtp": "2", "dflash": "3", "depth": "24",
    "depths": "40", "decode_ub": "32", "ub": "32", "server_ub": "32",
    "clients": "1 2", "clients_60": "1", "many_60": "2", "ctx": "4096", "mixed": "2",
    "long_prompt": "",
    "rows": "1 2", "seqs": "2 3", "few_rows": "2",
    "most_seqs": "3", "few_clients": "2",
    "traces": "sticky", "warm": "2", "runs": "8",
    "first": "8", "lengths": "8 24",
}  # fmt: skip


def values(s: Settings, model: Model, gpu: Card | None, n_threads: int) -> dict[str, str]:
    """Return what stands for each name in braces in the commands of parts."""
    found = dict(QUICK if s.quick else FULL)
    found["sweep"] = " ".join(map(str, sorted({max(1, n_threads * k // 4) for k in (2, 3, 4)})))
    commas = ("rows", "few_rows", "seqs", "first", "sweep")
    found |= {f"{name}_comma": found[name].replace(" ", ",") for name in commas}
    # the first of several times the same does not count
    found["most_seqs_comma"] = ",".join([found["most_seqs"]] * (1 + int(found["five"])))
    found |= {
        "model": shlex.quote(s.model), "draft": shlex.quote(s.draft),
        "draft_option": f"--draft {shlex.quote(s.draft)}" if s.draft else "",
        "device": "--device cuda:0" if gpu else "--device cpu", "root": shlex.quote(str(ROOT)),
        "before": shlex.quote(s.before), "bin": shlex.quote(str(_card_upstream.programs())),
        "rival": shlex.quote(str(_card_upstream.programs(_card_upstream.RIVAL))),
        "threads": str(n_threads), "ngl": "-ngl 99" if gpu else "-ngl 0",
        "test_processes": str(test_processes(gpu, n_threads)),
    }  # fmt: skip
    for name, share in (("whole", 1.0), ("60", 0.6), ("25", 0.25), ("10", 0.1), ("none", 0.0)):
        gib = "auto" if gpu is None or share == 1 else f"{model.device_gib(share):.1f}"
        found |= {
            f"slots_{name}": str(model.slots(share)), f"ncmoe_{name}": str(model.ncmoe(share)),
            f"gib_{name}": gib, f"cache_{name}": str(int(share * model.expert_bytes) >> 20),
        }  # fmt: skip
    return found


def test_processes(gpu: Card | None, n_threads: int) -> int:
    """Return how many test processes memory and cores allow: 3 GiB of each for one."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = min(host, gpu.n_bytes if gpu else host)
    return max(1, min(n_threads, memory // (3 * GIB), 12))


def describe(s: Settings) -> Line:
    """Return what figures depend on, for the first line of the results."""
    return {
        "machine": machine(), "commit": commit_of(ROOT), "patchset": fetch.patchset(),
        "model": Path(s.model).name, "model_bytes": Path(s.model).stat().st_size,
        "draft": Path(s.draft).name if s.draft else "", "options": list(s.options),
    }  # fmt: skip
