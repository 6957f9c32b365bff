"""Programs that run our CUDA kernels on the CPU: tests/emulated, compiled with the kernels' files.

A folder of links has our CUDA files as they are; a file of tests/emulated takes the place of one of
the same name. Programs are kept in build/emulated as long as nothing that they are made of changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from helpers.compiled import compile_object

ROOT = Path(__file__).resolve().parents[2]
OURS = [*(ROOT / "tests" / "emulated").iterdir(), ROOT / "tests" / "helpers" / "kernel_data.h"]
NATIVE = ROOT / "native" / "ggml"
KERNELS = NATIVE / "src" / "ggml-cuda"
GGML = ROOT / "build" / "llama.cpp" / "ggml"
LIBRARIES = ROOT / "moegraph" / "lib"

ROWS = ("context", "fetch", "norm", "one", "one-down", "published", "router", "rows-prepare")
ROWS = (*ROWS, "rows", "rows-f32", "wide")
# A program, and the files of kernels that it runs, moegraph-NAME.cu; one that is not there is left
# out.
PROGRAMS = {
    "argmax": ("argmax",),
    "attn": ("attn",),
    "conv": ("conv",),
    "faults": (),
    "fetch": (*ROWS, "layer-end"),
    "heads": ("heads",),
    "layer-end": (*ROWS, "layer-end"),
    "recurrence": ("chain", "recurrence", "tree"),
    "router": ROWS,
    "rows": ROWS,
    "step": ("chain", "context", "conv", "delta-step", "deltanet", "recurrence", "tree"),
}

FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-U_FORTIFY_SOURCE"]
# Only in some compilers. What -fsanitize finds ends the program, and variables that nobody set have
# large values.
WANTED = (
    ["-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error"],
    ["-ftrivial-auto-var-init=pattern"],
    ["-fno-extern-tls-init"],
)


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def missing() -> str | None:
    """Return why kernels cannot be emulated here, None if they can."""
    if not sys.platform.startswith("linux"):
        return "the emulator of kernels needs Linux"
    if shutil.which(compiler()) is None:
        return f"no compiler {compiler()}"
    if not (GGML / "src" / "ggml-common.h").is_file():
        return "no source of llama.cpp in build/llama.cpp; scripts/build puts it there"
    return None


@cache
def flags() -> list[str]:
    """Return what this compiler takes of FLAGS and WANTED."""
    taken = list(FLAGS)
    for some in WANTED:
        command = [compiler(), "-Werror", *some, "-x", "c++", "-c", os.devnull, "-o", os.devnull]
        if subprocess.run(command, check=False, capture_output=True).returncode == 0:
            taken += some
    return taken


def _digest(kernels: list[Path]) -> str:
    """Return what a program depends on besides its name."""
    headers = [*KERNELS.glob("*.cuh"), *NATIVE.glob("**/*.h"), *GGML.glob("include/*.h")]
    headers += [GGML / "src" / "ggml-common.h", GGML / "src" / "ggml-impl.h"]
    version = subprocess.run([compiler(), "--version"], check=True, capture_output=True).stdout
    result = hashlib.sha256(version + repr((str(ROOT), flags())).encode())
    for path in sorted([*kernels, *headers, *OURS, Path(__file__)]):
        result.update(path.name.encode() + path.read_bytes())
    return result.hexdigest()[:16]


def build(name: str) -> Path:
    """Return the program, compiled if it is not there yet."""
    kernels = [KERNELS / f"moegraph-{kernel}.cu" for kernel in PROGRAMS[name]]
    kernels = [path for path in kernels if path.is_file()]
    kept = ROOT / "build" / "emulated"
    program = kept / f"{name}-{_digest(kernels)}"
    if program.is_file():
        return program
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        work = Path(folder)
        for path in [*KERNELS.glob("*.cu*"), *OURS]:
            (work / path.name).unlink(missing_ok=True)
            (work / path.name).symlink_to(path)
        includes = [NATIVE / "include", NATIVE / "src", GGML / "include", GGML / "src"]
        common = [compiler(), *flags(), "-I.", *(f"-I{path}" for path in includes)]
        emulator = kept / f"emulator-{_digest([])}.o"  # the same in all programs
        objects = []
        for path in [work / "emulator.cpp", work / f"{name}.cpp", *kernels]:
            objects.append(str(work / f"{path.stem}.o"))
            is_emulator = path.name == "emulator.cpp"
            if is_emulator and emulator.is_file():
                shutil.copy(emulator, objects[-1])
                continue
            fast = ["-O3"] if is_emulator else []
            command = [*common, *fast, "-x", "c++", "-c", path.name, "-o", objects[-1]]
            compile_object(command, work)
            if is_emulator:
                for old in kept.glob("emulator-*.o"):
                    old.unlink(missing_ok=True)
                os.replace(shutil.copy(objects[-1], work / "shared.o"), emulator)
        link = [f"-L{LIBRARIES}", "-lggml-base", f"-Wl,-rpath,{LIBRARIES}"]
        compile_object([compiler(), *objects, *link, "-o", name], work)
        for old in kept.glob(f"{name}-*"):
            old.unlink(missing_ok=True)
        (work / name).rename(program)  # another process may have made the same
    return program
