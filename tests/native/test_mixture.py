"""Libraries of another build beside ours: refused by name, before any of them is loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

from moegraph.config import EngineConfig
from moegraph.engine import Engine, loader
from moegraph.errors import NativeError
from moegraph.ggml.lib import library_dir, versions
from moegraph.ggml.patchset import LIBRARIES, patchset_of

PACKAGE = library_dir().parent
ROOT = Path(__file__).resolve().parents[2]
OURS = versions()["patchset"]
OTHER = "0123456789abcdef"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the package with its libraries, models left out; return the folder of the libraries."""
    shutil.copytree(
        PACKAGE, tmp_path / "moegraph", ignore=shutil.ignore_patterns("models", "__pycache__")
    )
    return tmp_path / "moegraph" / "lib"


def load(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor of a copy, which loads the libraries."""
    return subprocess.run(
        [sys.executable, "-m", "moegraph", "doctor", *args], cwd=folder.parent.parent,
        text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(folder.parent.parent), **env}, capture_output=True,
    )  # fmt: skip


def test_every_library_carries_the_hash() -> None:
    found = {path.name: patchset_of(path) for path in library_dir().glob("*.so")}
    assert found.keys() >= {f"lib{name}.so" for name in LIBRARIES if name != "ggml-cuda"}
    assert set(found.values()) == {patchset_of(PACKAGE / "ggml/_native.abi3.so")} == {OURS}


@pytest.mark.parametrize(("name", "other"), [("llama", OTHER), ("ggml-cuda", "none")])
def test_a_library_of_another_build_is_named(copy: Path, name: str, other: str) -> None:
    path, ours = copy / f"lib{name}.so", OURS
    data = (path if path.exists() else copy / "libggml.so").read_bytes()
    if other == OTHER:
        data = data.replace(ours.encode(), other.encode())
    else:
        data = data.replace(b"moegraph\0\0\0\0" + ours.encode(), bytes(12) + ours.encode())
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    done = load(copy)
    assert done.returncode == NativeError.exit_code
    expected = f"{path} carries patch set {other}, _native.abi3.so needs {ours}; a mixture"
    assert expected in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02\x01" + b"\xff" * 100])
def test_what_is_no_library_is_refused_as_one_without_a_hash(copy: Path, data: bytes) -> None:
    (copy / "libllama.so").write_bytes(data)
    done = load(copy)
    assert done.returncode == NativeError.exit_code
    assert "libllama.so carries patch set none" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_search_path_leads_to_no_other_llama_cpp(copy: Path, tmp_path: Path) -> None:
    """A build folder of llama.cpp has libraries of the same names."""
    (tmp_path / "build").mkdir()
    for name in LIBRARIES:
        (tmp_path / "build" / f"lib{name}.so").write_bytes(b"")
    done = load(copy, LD_LIBRARY_PATH=str(tmp_path / "build"))
    assert (done.returncode, done.stderr) == (0, "")


# NVIDIA's driver with one card, as the environment says: CUDA's version, and the capability.
DRIVER = r"""
#include <stdlib.h>
#include <string.h>
static int number(const char * name) { const char * s = getenv(name); return s ? atoi(s) : 0; }
int cuInit(unsigned flags) { return number("STUB_CARD") ? 0 : 100; }
int cuDriverGetVersion(int * out) { *out = number("STUB_CUDA"); return 0; }
int cuDeviceGetCount(int * out) { *out = 1; return 0; }
int cuDeviceGet(int * out, int at) { *out = at; return 0; }
int cuDeviceGetName(char * out, int n, int dev) { strncpy(out, "NVIDIA Stub", n); return 0; }
int cuDeviceTotalMem_v2(size_t * out, int dev) { *out = 1 << 30; return 0; }
int cuDeviceGetAttribute(int * out, int what, int dev) {
    *out = what == 75 ? number("STUB_CARD") / 10 : number("STUB_CARD") % 10;
    return 0;
}
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char * out, unsigned n) { strncpy(out, "535.1", n); return 0; }
"""
# A backend without devices, as ggml-backend-impl.h lays it out.
BACKEND = r"""
#include <stddef.h>
static const char * name(void * reg) { return "CUDA"; }
static size_t count(void * reg) { return 0; }
static struct { int version; void * get[4]; void * context; } reg = { 0, { name, count, 0, 0 }, 0 };
void * ggml_backend_init(void) { reg.version = API; return &reg; }
"""


def compile_stub(path: Path, source: str, *options: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    code = path.with_suffix(".c")
    code.write_text(source)
    subprocess.run(
        ["cc", "-w", "-shared", "-fPIC", "-o", str(path), str(code), *options], check=True
    )


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a driver that does nothing; return its folder."""
    folder = tmp_path_factory.mktemp("driver")
    compile_stub(folder / "libcuda.so.1", DRIVER)
    (folder / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")
    return folder


def add_package(copy: Path, name: int | str, *options: str, hash: str | None = None) -> Path:
    """Put the package of a CUDA backend beside ours; name: 13, or such as 13_server."""
    header = (ROOT / "build/llama.cpp/ggml/src/ggml-backend-impl.h").read_text()
    api = re.search(r"define GGML_BACKEND_API_VERSION (\d+)", header)
    assert api
    note = (ROOT / "native/py/patchset_note.c").read_text()
    path = copy.parent.parent / f"moegraph_cuda{name}" / "lib" / "libggml-cuda.so"
    defines = f'-DMOEGRAPH_PATCHSET="{hash or OURS}"', f"-DAPI={api[1]}"
    compile_stub(path, note + BACKEND, *defines, *options)
    return path


OPEN = """
import sys
from moegraph.errors import MoegraphError
try:
    from moegraph.ggml.device import Device
    print(Device(sys.argv[1]).name)
except MoegraphError as error:
    print(error.exit_code, error)
"""


def opened(copy: Path, name: str = "auto", code: str = OPEN, **env: str) -> str:
    """Open a device with a copy; return its name, or the status and the line of an error."""
    done = subprocess.run(
        [sys.executable, "-c", code, name], cwd=copy.parent.parent, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(copy.parent.parent), **env}, capture_output=True,
    )  # fmt: skip
    return done.stdout.removesuffix("\n")


def test_a_card_is_found_or_a_line_says_what_it_lacks(copy: Path, driver: Path) -> None:
    stub = {"LD_LIBRARY_PATH": str(driver), "STUB_CUDA": "12020", "STUB_CARD": "86"}
    found = load(copy, LD_LIBRARY_PATH=str(driver), STUB_CUDA="13000", STUB_CARD="61").stdout
    line = "NVIDIA Stub has compute capability 6.1; 7.5 or newer is needed; models run on the CPU"
    assert line in " ".join(found.split()), "also without a package"
    add_package(copy, 13)
    lacks = "4 CUDA cannot be used: the NVIDIA driver 535.1 supports CUDA 12.2, and CUDA 13 needs "
    assert opened(copy, **stub).startswith(lacks + "driver 580 or newer; update it")
    assert opened(copy, "cuda", **stub).endswith("; without it: --device cpu")
    new = stub | {"STUB_CUDA": "13000"}
    assert opened(copy, "cuda", **new).startswith("2 no device 'cuda'; available: cpu")
    assert opened(copy, **new) == "cpu", "the backend has no device"
    old = new | {"STUB_CARD": "61"}
    assert "4 CUDA cannot be used: NVIDIA Stub has compute capability 6.1" in opened(copy, **old)
    assert opened(copy, "cpu", **old) == "cpu"
    done = load(copy, "--json", **old)
    check = json.loads(done.stdout)["checks"][-1]
    assert done.returncode == 0 and not check["ok"] and "7.5 or newer is needed" in check["detail"]
    assert opened(copy, **stub, CUDA_VISIBLE_DEVICES="") == "cpu", "it is not wanted"


def test_the_older_cuda_is_taken_where_the_driver_is_old(copy: Path, driver: Path) -> None:
    add_package(copy, 13)
    compile_stub(driver / "libcublas.so.12", "")
    add_package(copy, 12, "-Wl,--no-as-needed", str(driver / "libcublas.so.12"))
    stub = {"LD_LIBRARY_PATH": str(driver), "STUB_CUDA": "12020", "STUB_CARD": "86"}
    assert opened(copy, **stub) == "cpu", "the backend has no device"
    (driver / "libcublas.so.12").unlink()
    shutil.rmtree(copy.parent.parent / "moegraph_cuda13")
    found = opened(copy, **stub)
    assert "a CUDA library is missing (" in found and "pip install 'moegraph[cuda12]'" in found


def test_nvidias_packages_may_be_on_another_path_than_ours(copy: Path, driver: Path) -> None:
    other = copy.parent.parent / "site"
    for folder, name in (("cuda_runtime", "cudart"), ("cublas", "cublas"), ("cublas", "cublasLt")):
        soname = f"lib{name}.so.12"
        compile_stub(other / "nvidia" / folder / "lib" / soname, "", f"-Wl,-soname,{soname}")
    needs = [str(path) for path in other.rglob("*.so.12")]
    add_package(copy, 12, "-Wl,--no-as-needed", *needs)
    stub = {"LD_LIBRARY_PATH": str(driver), "STUB_CUDA": "12020", "STUB_CARD": "86"}
    assert "a CUDA library is missing (lib" in opened(copy, **stub)
    assert opened(copy, PYTHONPATH=f"{copy.parent.parent}:{other}", **stub) == "cpu"


def test_of_two_packages_the_one_with_code_for_the_card_is_loaded(copy: Path, driver: Path) -> None:
    stub = {"LD_LIBRARY_PATH": str(driver), "STUB_CUDA": "13000", "STUB_CARD": "90"}
    compile_stub(driver / "libcublas.so.13", "")
    needs = "-Wl,--no-as-needed", str(driver / "libcublas.so.13")
    path = add_package(copy, 13)
    path.with_name("architectures").write_text("75 86 89 120")
    found = opened(copy, **stub)
    assert found.startswith("4 CUDA cannot be used: NVIDIA Stub has compute capability 9.0, for ")
    assert f"{path} has no code; pip install 'moegraph[cuda13-server]'" in found
    server = add_package(copy, "13_server", *needs)
    server.with_name("architectures").write_text("80 90 90-virtual")
    code = (
        OPEN + "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'ml-cuda' in line})"
    )
    assert opened(copy, code=code, **stub) == f"cpu\n{server}", "the backend has no device"
    consumer = opened(copy, code=code, **(stub | {"STUB_CARD": "86"}))
    assert consumer == f"cpu\n{path}"
    (driver / "libcublas.so.13").unlink()
    found = opened(copy, **stub)
    assert "a CUDA library is missing (" in found
    assert "pip install 'moegraph[cuda13-server]'" in found
    shutil.rmtree(server.parents[1])
    assert "has no code; pip install" in opened(copy, **stub), "the other is whole"


@pytest.mark.skipif(find_library("cuda") is not None, reason="has a driver")
def test_without_a_driver_the_package_of_cuda_leaves_the_cpu(copy: Path) -> None:
    add_package(copy, 13)
    assert opened(copy) == "cpu"
    lacks = "4 CUDA cannot be used: there is no NVIDIA driver (libcuda.so.1); install it; without"
    assert opened(copy, "cuda").startswith(lacks)


def test_packages_of_two_versions_are_refused(copy: Path) -> None:
    path = add_package(copy, 13, hash=OTHER)
    found = opened(copy, "cpu")
    assert f"4 {path} carries patch set {OTHER}, _native.abi3.so needs {OURS}" in found
    assert "install packages of one version: pip install 'moegraph[cuda13]'" in found
    add_package(copy, "13_server")
    found = opened(copy, "cpu")
    assert "of one version: pip install 'moegraph[cuda13,cuda13-server]'" in found


def test_a_library_that_takes_the_place_of_ours_is_named(copy: Path, tmp_path: Path) -> None:
    """Not LD_LIBRARY_PATH, but what is in the process before us can."""
    other = tmp_path / "other" / "libggml-cpu.so"
    other.parent.mkdir()
    shutil.copy(copy / "libggml-cpu.so", other)
    found = opened(copy, LD_PRELOAD=str(other), LD_LIBRARY_PATH=str(copy))
    assert found.startswith(f"4 {other}, of another build, is in this process in place of {copy}")


def test_a_card_that_is_not_used_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "unused_card", lambda: "a card")
    with Engine.load("tiny", EngineConfig(device="auto")) as engine:
        if engine.device_name == "cpu":
            assert "a card" in engine.warnings
    with Engine.load("tiny", EngineConfig(device="cpu")) as engine:
        assert "a card" not in engine.warnings


def test_a_system_that_is_too_old_is_named(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "map").write_text("GLIBC_2.99 { later; };")
    newer, path = tmp_path / "newer" / "libc.so.6", copy / "libggml-base.so"
    script = f"-Wl,-soname,libc.so.6,--version-script={tmp_path / 'map'}"
    compile_stub(newer, "void later(void) {}", "-nostdlib", script)
    path.unlink()
    note = (ROOT / "native/py/patchset_note.c").read_text()
    calls = "void later(void); void call(void) { later(); }"
    define = f'-DMOEGRAPH_PATCHSET="{OURS}"'
    compile_stub(path, note + calls, define, "-nostdlib", str(newer))
    done = load(copy)
    line = "/lib/libggml-base.so needs GLIBC 2.99, and this system has glibc 2."
    assert done.returncode == NativeError.exit_code
    assert line in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_functions_of_a_backend_that_is_loaded_later_are_found(tmp_path: Path) -> None:
    """A package's libggml-cuda.so comes after the extension that calls it."""
    (tmp_path / "late.c").write_text(
        "int moegraph_pin(void * a, void * b, long n) { return n == 7; }"
    )
    command = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "late.so"), str(tmp_path / "late.c")]
    subprocess.run(command, check=True)
    code = (
        "import sys; from pathlib import Path; from moegraph.ggml.lib import C, _register, ffi\n"
        "pins = lambda n: C.mg_pin(ffi.NULL, ffi.NULL, n)\n"
        "before = pins(7); _register(Path(sys.argv[1])); print(before, pins(7), pins(8))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "late.so")]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
