"""Write a wheel, the same bytes from the same files, and check what its libraries need."""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import _card_upstream
from _tools import ROOT, BuildError, fetch
from _zig import GLIBC

PLATFORM = f"manylinux_{GLIBC[0]}_{GLIBC[1]}"
# What every system has; libstdc++ and libgcc too, in versions that are checked.
SYSTEM = {f"lib{name}" for name in ("c.so.6", "m.so.6", "dl.so.2", "pthread.so.0", "rt.so.1")}
SYSTEM |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libstdc++.so.6", "libgcc_s.so.1"}
MOST = {"GLIBC": GLIBC, "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}
# PyPI takes no larger file.
MOST_BYTES = 100_000_000
# Files of the package that only builds need.
_NOT_IN_WHEELS = re.compile(r"(^|/)(__pycache__|lib|decl)/|\.so$|/_build\.py$")
# What a build puts into the package.
_BUILT = re.compile(r"\.so$|/server/page/lib/")
# Says of which sources the libraries are; scripts/quickstart takes them for a tree with the same.
BUILT_OF = "moegraph/lib/built-of"
# moegraph/text/tokenizer.py imports it.
_BINDINGS = "moegraph.lib.llama_cpp"

Files = dict[str, bytes]


def sources() -> str:
    """Return the hash of what the libraries and the extension module are built of."""
    paths = [ROOT / "CMakeLists.txt", ROOT / "moegraph" / "ggml" / "_build.py"]
    paths += [*(ROOT / "native" / "py").iterdir(), *(ROOT / "moegraph" / "ggml" / "decl").iterdir()]
    texts = [path.read_bytes() for path in sorted(paths) if path.is_file()]
    return hashlib.sha256(b"".join([fetch.patchset().encode(), *texts])).hexdigest()


def version() -> str:
    """Return the version of this tree's package."""
    text = (ROOT / "moegraph" / "__init__.py").read_text("utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.M)
    return str(found)


def package_files() -> Files:
    """Return the files of moegraph without libraries, by their paths in a wheel."""
    paths = (path for path in (ROOT / "moegraph").rglob("*") if path.is_file())
    names = {path.relative_to(ROOT).as_posix(): path for path in paths}
    found = {name: at for name, at in names.items() if not _NOT_IN_WHEELS.search(name)}
    return {name: at.read_bytes() for name, at in found.items()} | {BUILT_OF: sources().encode()}


def bindings(sdist: Path, folder: Path) -> Files:
    """Return what is used of llama-cpp-python: ctypes declarations, in a package of ours.

    The package itself would compile llama.cpp for minutes when it is installed. folder: keeps it.
    """
    if not folder.is_dir():
        _card_upstream.bindings(sdist, folder)
    version = fetch.PIN["version"]
    files = {"__init__": f'"""Declarations of llama-cpp-python {version}, unchanged (MIT)."""\n'}
    for name in ("llama_cpp", "mtmd_cpp", "_ctypes_extensions"):
        text = (folder / "llama_cpp" / f"{name}.py").read_text("utf-8")
        text = text.replace("from llama_cpp._ctypes", f"from {_BINDINGS}._ctypes")
        files[name] = text.replace("from typing_extensions import", "from typing import")
    path = _BINDINGS.replace(".", "/")
    return {f"{path}/{name}.py": text.encode() for name, text in files.items()}


def metadata(version: str) -> Files:
    """Return METADATA, entry points and licence, as the build backend makes them of pyproject.toml.

    Wheels carry the bindings, need at once what the commands need, as scripts/quickstart installs
    it, and have CUDA's packages, of exactly their version, as extras.
    """
    code = (
        "import sys, scikit_build_core.build as b; b.prepare_metadata_for_build_wheel(sys.argv[1])"
    )
    with tempfile.TemporaryDirectory() as folder:
        command, env = [sys.executable, "-c", code, folder], dict(os.environ, MOEGRAPH_LINKED="1")
        if subprocess.run(command, cwd=ROOT, env=env, check=False).returncode:
            raise BuildError("scikit-build-core made no metadata (see above)")
        made = next(Path(folder).glob("*.dist-info"))
        paths = [path for path in made.rglob("*") if path.is_file() and path.name != "WHEEL"]
        files = {path.relative_to(made).as_posix(): path.read_bytes() for path in paths}
    text = files["METADATA"].decode()
    text, n = re.subn(r"^Requires-Dist: llama-cpp-python==.*\n", "", text, flags=re.M)
    assert n == 1
    text = re.sub(r'; extra == "(server|remote)"$', "", text, flags=re.M)
    extras = ["cuda13", "cuda12", "cuda13-server", "cuda12-server"]
    lines = [f'Provides-Extra: {one}\nRequires-Dist: moegraph-{one}=={version}; extra == "{one}"\n'
             for one in extras]  # fmt: skip
    text = text.replace("Description-Content-Type", "".join(lines) + "Description-Content-Type", 1)
    return files | {"METADATA": text.encode()}


def cuda_files(name: str, architectures: str, library: bytes) -> Files:
    """Return the files of a package of CUDA, all in a folder of its name: pip refuses no overlap.

    moegraph/ggml/cuda.py finds them, and reads the architectures, such as 75 or, for PTX,
    90-virtual.
    """
    files = {"__init__.py": b'"""ggml\'s backend for CUDA, which moegraph loads."""\n'}
    files |= {"lib/libggml-cuda.so": library, "lib/architectures": architectures.encode()}
    return {f"{name}/{path}": data for path, data in files.items()}


def about_cuda(name: str, major: int, version: str) -> Files:
    """Return METADATA of CUDA's wheel: it needs NVIDIA's libraries, and this moegraph."""
    end = "" if major >= 13 else f"-cu{major}"
    needs = [f"nvidia-{name}{end}>={major},<{major + 1}" for name in ("cublas", "cuda-runtime")]
    lines = ["Metadata-Version: 2.1", f"Name: {name.replace('_', '-')}", f"Version: {version}"]
    lines += [f"Summary: ggml's backend for CUDA {major}, for moegraph", "License: MIT"]
    lines += ["Requires-Python: >=3.10", f"Requires-Dist: moegraph=={version}"]
    lines += [f"Requires-Dist: {one}" for one in needs]
    licence = (ROOT / "LICENSE").read_bytes()
    return {"METADATA": "\n".join([*lines, ""]).encode(), "licenses/LICENSE": licence}


def write(
    folder: Path, name: str, version: str, tag: str, files: Files, about: Files,
    machine: str = "x86_64",
) -> Path:  # fmt: skip
    """Write the wheel NAME of package files and files about it; return its path.

    tag: of Python and its ABI.
    """
    info, tag = f"{name}-{version}.dist-info", f"{tag}-{PLATFORM}_{machine}"
    stem = f"{name}-{version}-{tag}"
    wheel = f"Wheel-Version: 1.0\nGenerator: moegraph\nRoot-Is-Purelib: false\nTag: {tag}\n"
    every = files | {f"{info}/{path}": data for path, data in about.items()}
    every[f"{info}/WHEEL"] = wheel.encode()
    every = dict(sorted(every.items(), key=lambda item: (".dist-info/" in item[0], item[0])))
    rows = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in every.items()]
    every[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,\n"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{name}-{version}-*_{machine}.whl"):
        old.unlink()
    with zipfile.ZipFile(folder / f"{stem}.whl", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for path, data in every.items():
            entry = zipfile.ZipInfo(path)  # of 1980
            entry.external_attr = (0o100755 if path.endswith(".so") else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(entry, data)
    return folder / f"{stem}.whl"


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def check(wheel: Path, others: Iterable[str], secrets: Iterable[Path]) -> None:
    """Refuse a wheel whose libraries need what a user may lack, or name folders of this machine.

    others: libraries that packages or the driver bring. secrets: the folders.
    """
    problems = []
    with zipfile.ZipFile(wheel) as zipped, tempfile.TemporaryDirectory() as folder:
        names = [name for name in zipped.namelist() if name.endswith(".so")]
        known = SYSTEM | {*others} | {Path(name).name for name in names}
        for name in names:
            path = Path(zipped.extract(name, folder))
            needed, paths, versions = _read(path)
            problems += [f"{name} needs {one}" for one in needed if one not in known]
            problems += [f"{name} looks into {one}" for one in paths if one[:7] != "$ORIGIN"]
            problems += [
                f"{name} needs {kind}_{'.'.join(map(str, version))}"
                for kind, version in versions.items()
                if version > MOST.get(kind, version)
            ]
            data = path.read_bytes()
            problems += [f"{name} names {one}" for one in secrets if str(one).encode() in data]
            if fetch.patchset().encode() not in data:
                problems.append(f"{name} is of another patch set than {fetch.patchset()}")
    if (size := wheel.stat().st_size) > MOST_BYTES:
        problems.append(f"it has {size / 1e6:.0f} MB, PyPI takes {MOST_BYTES / 1e6:.0f}")
    if problems:
        raise BuildError(f"{wheel.name}: {'; '.join(problems)}")


def _read(path: Path) -> tuple[list[str], list[str], Mapping[str, tuple[int, ...]]]:
    """Return which libraries a library needs, where it looks for them, and the newest versions."""
    command = ["readelf", "-dVW", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    paths = [
        one for found in re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", text) for one in found.split(":")
    ]
    versions: dict[str, tuple[int, ...]] = {}
    for kind, number in re.findall(r"Name: ([A-Z]+)_([\d.]+)", text):
        version = tuple(map(int, number.split(".")))
        versions[kind] = max(version, versions.get(kind, ()))
    return needed, [one for one in paths if one], versions


def take(folder: Path) -> bool:
    """Unpack a wheel's libraries into this tree, if they are of its sources; return whether."""
    for wheel in sorted(folder.glob(f"moegraph-*_{platform.machine()}.whl")):
        with zipfile.ZipFile(wheel) as zipped:
            if BUILT_OF in zipped.namelist() and zipped.read(BUILT_OF) == sources().encode():
                for old in (ROOT / "moegraph" / "lib").glob("*.so"):
                    old.unlink()  # a running process may map it
                (ROOT / "moegraph" / "ggml" / "_native.abi3.so").unlink(missing_ok=True)
                names = zipped.namelist()
                zipped.extractall(ROOT, [one for one in names if _BUILT.search(one)])
                return True
    return False


def of_cuda(folder: Path) -> list[str]:
    """Return the paths of this version's wheels for the newest CUDA: moegraph loads what fits."""
    found = sorted(folder.glob(f"moegraph_cuda*-{version()}-*.whl"))
    newest = found[-1].name[: len("moegraph_cuda13")] if found else ""
    return [str(path) for path in found if path.name.startswith(newest)]


def table(wheel: Path) -> str:
    """Return sizes as lines: each library packed and unpacked, the rest together, and the sum."""
    with zipfile.ZipFile(wheel) as zipped:
        infos = [(Path(info.filename).name, info) for info in zipped.infolist()]
    rows = [(name, i.compress_size, i.file_size) for name, i in infos if name.endswith(".so")]
    rest = [i for name, i in infos if not name.endswith(".so")]
    text = f"{len(rest)} other files"
    rows.append((text, sum(i.compress_size for i in rest), sum(i.file_size for i in rest)))
    rows.append((wheel.name, wheel.stat().st_size, sum(i.file_size for _, i in infos)))
    return "\n".join(
        f"{packed / 1e6:8.2f} MB {size / 1e6:8.2f} MB  {name}" for name, packed, size in rows
    )
