"""The build scripts: plain words when something is missing, and the toolkit folder they make."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import _cuda
import _progress
import _tools


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a CUDA 13 toolkit without cuBLAS; its nvcc is reached through a wrapper elsewhere."""
    root = tmp_path / "cuda"
    for folder in ("bin", "nvvm", "include", "lib64"):
        (root / folder).mkdir(parents=True)
    (root / "include" / "cuda_runtime.h").write_text("")
    (root / "lib64" / "libcudart.so").write_text("")
    nvcc = tmp_path / "wrapper" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho 'release 13.0, V13.0.88'\necho '#$ TOP={root}/bin/..' >&2\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    return root


def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an installed nvidia-cublas wheel for CUDA 13; return its folder."""
    cu13 = tmp_path / "site-packages" / "nvidia" / "cu13"
    for name in ("include/cublas_v2.h", "include/cuda_runtime.h", "lib/libcublas.so.13"):
        (cu13 / name).parent.mkdir(parents=True, exist_ok=True)
        (cu13 / name).write_text("wheel")
    (cu13 / "lib" / "libcublasLt.so.13").write_text("wheel")
    monkeypatch.setattr(_cuda.sysconfig, "get_path", lambda name: str(tmp_path / "site-packages"))
    return cu13


def test_architectures_mean_machine_code_unless_they_say_otherwise() -> None:
    assert _cuda.check_architectures(["75", "86-virtual", "120a"]) == [
        "75-real", "86-virtual", "120a-real",
    ]  # fmt: skip
    with pytest.raises(_tools.BuildError, match="--cuda-arch sm_86: expected numbers"):
        _cuda.check_architectures(["86", "sm_86"])


def test_without_nvcc_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(_tools.BuildError, match="no nvcc; install the CUDA toolkit"):
        _cuda.find_toolkit()


def test_the_toolkit_is_found_behind_a_wrapper(toolkit: Path) -> None:
    assert _cuda.find_toolkit() == (toolkit, (13, 0))


def test_cublas_of_the_virtual_environment_is_found_too(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """scripts/measure_card installs it there, and builds llama.cpp with the Python that runs it."""
    cu13 = wheel(tmp_path, monkeypatch)
    monkeypatch.setattr(_cuda.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    monkeypatch.setattr(_cuda, "venv_packages", lambda: cu13.parents[1])
    assert _cuda.find_cublas(toolkit, 13) == _cuda.Cublas(cu13 / "include", cu13 / "lib", False)


def test_without_cublas_the_message_names_the_wheel(toolkit: Path) -> None:
    with pytest.raises(_tools.BuildError, match=r"no cuBLAS for CUDA 11.*nvidia-cublas-cu11==11"):
        _cuda.find_cublas(toolkit, 11)


def test_toolkit_and_wheel_become_one_folder(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cu13 = wheel(tmp_path, monkeypatch)
    monkeypatch.setattr(_cuda, "driver_library", lambda toolkit: None)
    for _ in range(2):
        options = _cuda.options(["86"], tmp_path / "build")
    kit = tmp_path / "build" / "cuda-toolkit"
    assert f"-DCUDAToolkit_ROOT={kit}" in options
    assert "-DCMAKE_CUDA_ARCHITECTURES=86-real" in options
    assert (kit / "lib64" / "libcublas.so").resolve() == cu13 / "lib" / "libcublas.so.13"
    assert (kit / "include" / "cuda_runtime.h").read_text() == "", "the toolkit's, not the wheel's"
    assert [path.name for path in (kit / "cublas").iterdir()] == ["cublas_v2.h"]
    rpath = next(option for option in options if "RPATH" in option)
    assert str(cu13 / "lib") in rpath and str(kit) not in rpath, "its libcuda is a stub"
    stub = (kit / "lib64" / "stubs" / "libcuda.so").read_bytes()
    assert b"libcuda.so.1" in stub and b"cuMemAddressReserve" in stub


def run_step(tmp_path: Path, code: str) -> Path:
    log = tmp_path / "logs" / "step.log"
    _progress.run("a step", [sys.executable, "-c", code], log, dict(os.environ))
    return log


def test_a_failing_step_shows_the_end_of_its_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(_tools.BuildError, match=r"a step: .* ended with 3; .*step\.log"):
        run_step(tmp_path, "print('first')\nfor i in range(40): print(i)\nraise SystemExit(3)")
    shown = capfd.readouterr().err
    assert "39" in shown and "first" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "0"], "--jobs 0: must be at least 1"),
        (["--cpu", "--cuda-arch", "86"], "not allowed with argument"),
        (["--portable", "sse9"], "invalid choice"),
        (["--sdist", "/nowhere/x.tar.gz"], "/nowhere/x.tar.gz: no such file"),
    ],
)
def test_wrong_arguments_of_the_build_get_one_line(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "build", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert message in done.stderr and "Traceback" not in done.stderr
