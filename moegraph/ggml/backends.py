"""Which library of ggml for the CPU to open, before the extension module asks for it.

A build for one machine has one, to which libggml is linked. A wheel has one for each set of
instructions, all with the same name for the dynamic linker, so that the one that is opened serves
everyone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import NativeError

_AVX2 = "sse4_2 avx f16c fma avx2 bmi2"
_SVE = "asimddp fphp asimdhp sve"
_AVX512 = f"{_AVX2} avx512f avx512cd avx512vl avx512dq avx512bw"
# Flags of /proc/cpuinfo, by llama.cpp's name for the library that needs them (in its source,
# ggml/src/CMakeLists.txt), in the order of its ggml_backend_score. The first that fits is chosen.
_NEEDS = {
    "sapphirerapids": f"{_AVX512} avx512vbmi avx512_vnni avx512_bf16 amx_tile amx_int8",
    "zen4": f"{_AVX512} avx512vbmi avx512_vnni avx512_bf16",
    "cooperlake": f"{_AVX512} avx512_vnni avx512_bf16",
    "icelake": f"{_AVX512} avx512vbmi avx512_vnni",
    "cascadelake": f"{_AVX512} avx512_vnni",
    "cannonlake": f"{_AVX512} avx512vbmi",
    "skylakex": _AVX512,
    "alderlake": f"{_AVX2} avx_vnni",
    "haswell": _AVX2,
    "piledriver": "sse4_2 avx f16c fma",
    "ivybridge": "sse4_2 avx f16c",
    "sandybridge": "sse4_2 avx",
    "sse42": "sse4_2",
    "x64": "",
    "armv9.2_2": f"{_SVE} i8mm sve2 sme",
    "armv9.2_1": f"{_SVE} i8mm sme",
    "armv8.6_2": f"{_SVE} i8mm sve2",
    "armv8.6_1": f"{_SVE} i8mm",
    "armv8.2_3": _SVE,
    "armv8.2_2": "asimddp fphp asimdhp",
    "armv8.2_1": "asimddp",
    "armv8.0_1": "",
}
# The one for any processor, whose file is named as that of a build for one machine.
_ANY = "armv8.0_1" if os.uname().machine == "aarch64" else "x64"


def choose_cpu(folder: Path) -> tuple[str, Path]:
    """Return the CPU's library with the most instructions: its name, '' if it is the only one.

    MOEGRAPH_CPU_VARIANT names another.

    Raises:
        NativeError: there is none of that name.
    """
    names = {path.stem.removeprefix("libggml-cpu-") for path in folder.glob("libggml-cpu-*.so")}
    if not names:
        return "", folder / "libggml-cpu.so"
    wanted, names = os.environ.get("MOEGRAPH_CPU_VARIANT"), {*names, _ANY}
    if wanted and wanted not in names:
        raise NativeError(f"MOEGRAPH_CPU_VARIANT={wanted}: expected {', '.join(sorted(names))}")
    text = Path("/proc/cpuinfo").read_text(errors="replace")
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M)
    has = set(flags[1].split() if flags else ())
    fits = (
        name for name, needs in _NEEDS.items() if name in names and has.issuperset(needs.split())
    )
    name = wanted or next(fits)
    return name, folder / ("libggml-cpu.so" if name == _ANY else f"libggml-cpu-{name}.so")
