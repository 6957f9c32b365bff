"""`moegraph doctor`: a report about the installation and the machine, also for bug reports."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..config import EngineConfig
from ..errors import MoegraphError, NativeError, one_line
from ..ggml.free_memory import host_memory, system_text
from ..ggml.nvml import driver_version
from ..threads import default_threads
from ..units import format_bytes
from . import models, options, ui

# The version whose structs are those of the pinned llama.cpp.
_LLAMA_CPP_PYTHON = "0.3.36"
_PACKAGES = ("llama-cpp-python", "numpy", "gguf", "cffi", "click", "jinja2", "rich")
# Instruction sets for which ggml has CPU kernels of their own.
_CPU_FLAGS = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "bmi2", "avx_vnni", "avx512f", "avx512vbmi",
    "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "i8mm", "sve", "sve2", "sme",
)  # fmt: skip
# JSON keys of what ggml says of a device, where they differ.
_KEYS = {"memory_free": "free_bytes", "memory_total": "total_bytes"}


@dataclass(frozen=True)
class Check:
    """One finding. If it failed, detail says what to do; if it is required, no model can run."""

    name: str
    ok: bool
    detail: str
    required: bool = True


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--measure", "target", is_flag=False, flag_value="tiny", metavar="[TARGET]",
    help="Measure this machine with a model (default: the shipped one) and print the times, for "
    "--machine FILE of plan and simulate.",
)  # fmt: skip
@options.engine_options(only=("device", "n_threads"))
def doctor(as_json: bool, target: str | None, **given: Any) -> None:
    """Show libraries, patch set, devices, driver, memory and CPU features, and report problems.

    With --measure, load a model instead and time tokens, missing experts, and copies. Use the
    model that you want to plan for, or one like it: from others, its times are only computed.

    \b
    Examples:
      moegraph doctor
      moegraph doctor --json | jq .devices
      moegraph doctor --measure model.gguf > mine.json
    """
    if target is not None:
        _measure(target, options.build_config(given))
        return
    native, libraries, devices = _native()
    checks, memory = [native, _tokenizer(), _cuda(devices, native.ok)], host_memory()
    report = {
        "moegraph": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "native": libraries,
        "checks": [asdict(check) for check in checks],
        "devices": devices,
        "driver": driver_version(),
        "memory": {
            **{f"{name}_bytes": n for name, n in asdict(memory).items()},
            "for_experts_bytes": memory.spare,
        },
        "cpu": _cpu(),
    }
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        _show(report, checks)
    if not native.ok:
        raise NativeError(f"moegraph cannot run a model here: {native.detail}")


def _measure(target: str, config: EngineConfig) -> None:
    """Print the machine's times for the model, in the format that `--machine` reads."""
    from ..bench.machine import measure_machine, summary_line

    warned: set[str] = set()
    fields = measure_machine(
        lambda changed, routing: models.load_engine(target, changed, routing, warned, False),
        "mine", config,
    )  # fmt: skip
    click.echo(json.dumps(fields, ensure_ascii=False))
    ui.note(summary_line(fields))
    for line in fields["measured"]["notes"]:
        ui.note(f"note: {line}")


def _native() -> tuple[Check, dict[str, str] | None, list[dict[str, Any]]]:
    """Return whether the libraries load, their versions, and the devices that they find."""
    try:
        from ..ggml.device import list_devices
        from ..ggml.lib import CPU_VARIANT, library_dir, summary, versions

        devices = [
            {_KEYS.get(key, key): value for key, value in device.items() if key != "handle"}
            for device in list_devices()
        ]
        found = {**versions(), "cpu_variant": CPU_VARIANT, "folder": str(library_dir())}
    except MoegraphError as error:
        return Check("native libraries", False, str(error)), None, []
    chosen = f", for {CPU_VARIANT} CPUs" if CPU_VARIANT else ""
    detail = f"{summary()}, in {found['folder']}{chosen}"
    return Check("native libraries", True, detail), found, devices


def _tokenizer() -> Check:
    version = _version("llama-cpp-python")
    if version == _LLAMA_CPP_PYTHON:
        return Check("tokenizer", True, f"llama-cpp-python {version}")
    wrong = f"{version} is not the expected version" if version else "is not installed"
    hint = f"CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install llama-cpp-python=={_LLAMA_CPP_PYTHON}"
    return Check("tokenizer", False, f"llama-cpp-python {wrong}; {hint}")


def _cuda(devices: list[dict[str, Any]], is_loaded: bool) -> Check:
    names = [d["description"] for d in devices if d["kind"] == "cuda"]
    lacks = ", ".join(names) if names else "models run on the CPU"
    if not names and is_loaded:
        from ..ggml.cuda import lacking, unused_card
        from ..ggml.lib import cuda_lack
        from ..ggml.nvml import cuda_driver

        why = (cuda_driver() and lacking(0)) or "no NVIDIA card"
        lacks = cuda_lack() or unused_card() or f"{why}; models run on the CPU"
    return Check("CUDA", bool(names), lacks, required=False)


def _version(package: str) -> str | None:
    if package == "llama-cpp-python" and (Path(__file__).parents[1] / "lib/llama_cpp").is_dir():
        return _LLAMA_CPP_PYTHON  # a wheel brings what is used of it
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    text = system_text(Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    present = set(flags[1].split()) if flags else set()
    return {
        "model": model[1].strip() if model else platform.processor() or platform.machine(),
        "logical": os.cpu_count(),
        "cores": default_threads(),
        "features": [name for name in _CPU_FLAGS if name in present],
    }


def _show(report: dict[str, Any], checks: list[Check]) -> None:
    ui.heading(f"moegraph {report['moegraph']}")
    ui.table([
        ("python", f"{report['python']} ({sys.executable})"),
        ("platform", report["platform"]),
        *((name, version or "missing") for name, version in report["packages"].items()),
    ])  # fmt: skip
    ui.section("Checks")
    for check in checks:
        failed = ("no", "error") if check.required else ("--", "muted")
        mark = ui.styled(*(("ok", "good") if check.ok else failed), sys.stdout)
        click.echo(f"  {mark}  {check.name}: {one_line(check.detail)}")
    ui.section("Machine")
    cpu, memory = report["cpu"], report["memory"]
    rows = [
        ("cpu", f"{cpu['model']}, {cpu['logical']} logical, {cpu['cores']} cores to use"),
        ("features", " ".join(cpu["features"]) or "none known"),
        ("memory", _memory_line(memory)),
        ("NVIDIA driver", report["driver"] or "none"),
    ]
    rows += [
        (
            f"device {at['device']}",
            f"{at['description']}, {format_bytes(at['free_bytes'])} of "
            f"{format_bytes(at['total_bytes'])} free",
        )
        for at in report["devices"]
    ]
    gpus = [device["device"] for device in report["devices"] if device["kind"] == "cuda"]
    if len(gpus) > 1:
        rows.append(("together", f"--device {','.join(gpus)} divides a model's layers over them"))
    ui.table(rows)


def _memory_line(memory: dict[str, int | None]) -> str:
    total, available, limit, spare = memory.values()
    if total is None or available is None or spare is None:
        return "unknown"
    line = f"{format_bytes(available)} of {format_bytes(total)} available"
    line += f", limited to {format_bytes(limit)}" if limit else ""
    return f"{line}; copies of experts may take {format_bytes(spare)}"
