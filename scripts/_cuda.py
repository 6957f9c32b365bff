"""Find nvcc, cuBLAS and the driver's library, and link them into one folder for CMake."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from _tools import ROOT, BuildError, say

ARCHITECTURE = re.compile(r"^\d{2,3}[af]?(-real|-virtual)?$")

# Driver functions that ggml-cuda calls. The build machine needs no driver: a stub library with
# these names is enough for the linker. The program loads the real library when it runs.
DRIVER_FUNCTIONS = (
    "cuDeviceGet", "cuDeviceGetAttribute", "cuGetErrorString", "cuMemAddressFree",
    "cuMemAddressReserve", "cuMemCreate", "cuMemGetAllocationGranularity", "cuMemMap",
    "cuMemRelease", "cuMemSetAccess", "cuMemUnmap",
)  # fmt: skip


@dataclass(frozen=True)
class Cublas:
    """The folders of cuBLAS's headers and libraries, and whether they are the toolkit's own."""

    include: Path
    lib: Path
    in_toolkit: bool


def check_architectures(given: list[str]) -> list[str]:
    """Return the architectures in CMake's spelling.

    `75` becomes `75-real` (machine code only); `75-virtual` (PTX for the driver) is kept.
    """
    for arch in given:
        if not ARCHITECTURE.match(arch):
            raise BuildError(f"--cuda-arch {arch}: expected numbers such as 75 86 89 90 120")
    return [arch if "-" in arch else f"{arch}-real" for arch in given]


def find_toolkit() -> tuple[Path, tuple[int, int]]:
    """Return the toolkit's folder and version, as nvcc reports them."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    for name in (os.environ.get("CUDACXX"), f"{home}/bin/nvcc", shutil.which("nvcc")):
        if name and Path(name).is_file():
            break
    else:
        raise BuildError(
            "no nvcc; install the CUDA toolkit (12.4 or newer) and put its bin folder on PATH, or"
            " set CUDACXX to nvcc"
        )
    release = re.search(r"release (\d+)\.(\d+)", _output(name, "--version"))
    # nvcc on PATH may be a link or a wrapper; -v prints the toolkit's folder
    top = re.search(r"^#\$ TOP=(.+)$", _output(name, "-v", "none"), re.MULTILINE)
    if release is None or top is None:
        raise BuildError(f"{name} does not print its release and folder; is it NVIDIA's nvcc?")
    return Path(os.path.normpath(top[1].strip())), (int(release[1]), int(release[2]))


def _output(*command: str) -> str:
    done = subprocess.run([*command], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def find_cublas(toolkit: Path, major: int) -> Cublas:
    """Find cuBLAS of CUDA `major` in the toolkit, else in the wheel of this Python or of .venv."""
    found = toolkit_cublas(toolkit)
    for packages in (Path(sysconfig.get_path("purelib")), venv_packages()):
        found = found or wheel_cublas(packages, major)
    if found is None:
        raise BuildError(
            f"no cuBLAS for CUDA {major}, neither in {toolkit} nor as a wheel; install libcublas of"
            f" the toolkit, or: pip install '{wheel_name(major)}=={major}.*'"
        )
    return found


def toolkit_cublas(toolkit: Path) -> Cublas | None:
    """Find cuBLAS in the toolkit."""
    pairs = [
        (toolkit / sub / "include", toolkit / sub / lib)
        for sub in ("", "targets/x86_64-linux", "targets/sbsa-linux")
        for lib in ("lib64", "lib")
    ]
    # Debian's toolkit is spread over system folders
    pairs += [(Path("/usr/include"), Path("/usr/lib") / f"{platform.machine()}-linux-gnu")]
    for include, lib in pairs:
        if (include / "cublas_v2.h").is_file() and (lib / "libcublas.so").exists():
            return Cublas(include, lib, True)
    return None


def venv_packages() -> Path:
    """Return where the packages of .venv are, which this Python has made, if it is there."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return ROOT / ".venv" / "lib" / version / "site-packages"


def wheel_cublas(packages: Path, major: int) -> Cublas | None:
    """Find cuBLAS of CUDA `major` in the wheel nvidia-cublas of a Python's packages."""
    for wheel in (packages / "nvidia" / f"cu{major}", packages / "nvidia" / "cublas"):
        if (wheel / "lib" / f"libcublas.so.{major}").is_file():
            return Cublas(wheel / "include", wheel / "lib", False)
    return None


def wheel_name(major: int) -> str:
    """Return the name of the wheel with cuBLAS of CUDA `major`."""
    return "nvidia-cublas" if major >= 13 else f"nvidia-cublas-cu{major}"


def driver_library(toolkit: Path) -> Path | None:
    """Return the driver's library or the toolkit's stub of it, if this machine has one."""
    system = ("x86_64-linux-gnu", "aarch64-linux-gnu", "../lib64")
    places = [toolkit / name for name in ("lib64/stubs", "lib/stubs", "lib64")]
    files = [place / "libcuda.so" for place in (*places, *(Path("/usr/lib") / x for x in system))]
    return next(filter(Path.exists, files), None)


def make_driver_stub(folder: Path) -> None:
    """Compile a libcuda.so whose functions have the names that ggml-cuda needs and do nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "stub.c"
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in DRIVER_FUNCTIONS))
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", str(folder / "libcuda.so"), str(source)], check=True)


def _link(target: Path, link: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def lay_out(kit: Path, toolkit: Path, cublas: Cublas, major: int) -> None:
    """Fill the folder `kit` with links to the toolkit, to cuBLAS, and to the driver or a stub."""
    shutil.rmtree(kit, ignore_errors=True)
    for folder, source in (("include", toolkit / "include"), ("lib64", toolkit / "lib64")):
        (kit / folder).mkdir(parents=True)
        for entry in source.iterdir():
            if entry.name != "stubs":
                _link(entry, kit / folder / entry.name)
    for name in ("bin", "nvvm"):
        if (toolkit / name).exists():
            _link(toolkit / name, kit / name)
    if not cublas.in_toolkit:
        # The wheels share one folder, which may hold another toolkit's headers: link cuBLAS's only.
        (kit / "cublas").mkdir()
        for header in cublas.include.glob("cublas*.h"):
            _link(header, kit / "cublas" / header.name)
            _link(header, kit / "include" / header.name)
        for name in ("libcublas", "libcublasLt"):
            _link(cublas.lib / f"{name}.so.{major}", kit / "lib64" / f"{name}.so.{major}")
            _link(cublas.lib / f"{name}.so.{major}", kit / "lib64" / f"{name}.so")
    (kit / "lib64" / "stubs").mkdir()
    library = driver_library(toolkit)
    if library is None:
        say("no driver on this machine: linking against a stub of libcuda")
        make_driver_stub(kit / "lib64" / "stubs")
    else:
        _link(library, kit / "lib64" / "stubs" / "libcuda.so")


def options(architectures: list[str], build: Path) -> list[str]:
    """Return the CMake options of a CUDA build; makes the folder of links under `build`."""
    architectures = check_architectures(architectures)
    toolkit, (major, minor) = find_toolkit()
    cublas = find_cublas(toolkit, major)
    where = "the toolkit" if cublas.in_toolkit else "the nvidia-cublas wheel"
    say(f"CUDA {major}.{minor} from {toolkit}, cuBLAS from {where}, for {' '.join(architectures)}")
    kit = toolkit
    if not cublas.in_toolkit or driver_library(toolkit) is None:
        kit = build / "cuda-toolkit"
        lay_out(kit, toolkit, cublas, major)
    # Not the folder of links: the program must not load its stub of the driver.
    rpath = [str(toolkit / "lib64"), *([] if cublas.in_toolkit else [str(cublas.lib)])]
    flags = [] if cublas.in_toolkit else [f"-DCMAKE_CUDA_FLAGS=-isystem {kit / 'cublas'}"]
    return [
        "-DGGML_CUDA=ON",
        f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(architectures)}",
        f"-DCMAKE_CUDA_COMPILER={toolkit / 'bin' / 'nvcc'}",
        f"-DCUDAToolkit_ROOT={kit}",
        f"-DMOEGRAPH_CUDA_RPATH={';'.join(rpath)}",
        *flags,
    ]
