"""Which of a wheel's libraries is opened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moegraph.errors import NativeError
from moegraph.ggml import backends

AVX2 = "fpu sse4_2 avx f16c fma avx2 bmi2"
AVX512 = f"{AVX2} avx512f avx512cd avx512vl avx512dq avx512bw"
ALL = tuple(backends._NEEDS)
ARM = "fp asimd asimddp fphp asimdhp"


def lay(folder: Path, names: tuple[str, ...] = ALL) -> Path:
    for name in names:
        (folder / ("libggml-cpu.so" if name == backends._ANY else f"libggml-cpu-{name}.so")).touch()
    return folder


def cpu(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    is_arm = flags.startswith("fp ")
    word = "Features" if is_arm else "flags\t"
    text = f"vendor_id\t: X\n{word}\t: {flags}\nbugs\t\t: none\n"
    monkeypatch.setattr(backends, "_ANY", "armv8.0_1" if is_arm else "x64")
    monkeypatch.setattr(Path, "read_text", lambda *args, **more: text)
    monkeypatch.delenv("MOEGRAPH_CPU_VARIANT", raising=False)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("fpu sse2", "x64"),
        ("fpu sse4_2", "sse42"),
        ("fpu sse4_2 avx f16c", "ivybridge"),
        (AVX2.replace(" bmi2", ""), "piledriver"),
        (AVX2, "haswell"),
        (f"{AVX2} avx_vnni", "alderlake"),
        (AVX512.replace(" avx512vl", " avx_vnni"), "alderlake"),
        (f"{AVX512} avx512_vnni", "cascadelake"),
        (f"{AVX512} avx512_bf16", "skylakex"),
        (f"{AVX512} avx512_bf16 avx512_vnni", "cooperlake"),
        (f"{AVX512} avx512_bf16 avx512_vnni avx512vbmi", "zen4"),
        (f"{AVX512} avx512_bf16 avx512_vnni avx512vbmi amx_tile amx_int8", "sapphirerapids"),
        ("fp asimd sve", "armv8.0_1"),
        ("fp asimd asimddp fphp", "armv8.2_1"),
        (ARM, "armv8.2_2"),
        (f"{ARM} sve i8mm", "armv8.6_1"),
        (f"{ARM} sve2 sve i8mm bf16", "armv8.6_2"),
        (f"{ARM} sve2 sve i8mm sme", "armv9.2_2"),
    ],
)
def test_the_library_with_most_instructions_that_the_cpu_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, expected: str
) -> None:
    cpu(monkeypatch, flags)
    lay(tmp_path, tuple(one for one in ALL if one.startswith("armv") == flags.startswith("fp ")))
    name, path = backends.choose_cpu(tmp_path)
    assert name == expected and path.exists()


def test_what_a_wheel_lacks_is_not_chosen_and_the_variable_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu(monkeypatch, AVX512)
    assert backends.choose_cpu(lay(tmp_path, ("x64",))) == ("", tmp_path / "libggml-cpu.so")
    assert backends.choose_cpu(lay(tmp_path, ("haswell", "sse42")))[0] == "haswell"
    monkeypatch.setenv("MOEGRAPH_CPU_VARIANT", "sse42")
    assert backends.choose_cpu(tmp_path) == ("sse42", tmp_path / "libggml-cpu-sse42.so")
    monkeypatch.setenv("MOEGRAPH_CPU_VARIANT", "zen4")
    with pytest.raises(
        NativeError, match="^MOEGRAPH_CPU_VARIANT=zen4: expected haswell, sse42, x64$"
    ):
        backends.choose_cpu(tmp_path)


@pytest.mark.parametrize(
    "start, end, folder, prefix, n_bits",
    [
        ('STREQUAL "x86"', 'STREQUAL "ARM"', "x86", "", 12),
        ('MATCHES "Linux"', "elseif", "arm", "USE_", 6),
    ],
)
def test_the_variants_are_those_of_llama_cpp(
    start: str, end: str, folder: str, prefix: str, n_bits: int
) -> None:
    """With the order of its scores: a bit of the sum for each set of instructions."""
    source = Path(__file__).resolve().parents[2] / "build/llama.cpp/ggml/src"
    if not source.is_dir():
        pytest.skip("llama.cpp is not unpacked")
    text = (source / "CMakeLists.txt").read_text().partition("GGML_CPU_ALL_VARIANTS)\n")[2]
    lines = text.partition(start)[2].partition(end)[0]
    needs = {
        name: rest.split() for name, rest in re.findall(r"variant\(([\w.]+) *([^)]*)\)", lines)
    }
    ours = [name for name in backends._NEEDS if name.startswith("armv") == (folder == "arm")]
    assert needs.keys() == set(ours)
    scored = (source / f"ggml-cpu/arch/{folder}/cpu-feats.cpp").read_text()
    bits = re.findall(rf"#ifdef GGML_{prefix}(\w+)\n(?:.*\n)+?    score \+= ([\d<]+);", scored)
    bit = {name: eval(value) for name, value in bits}
    score = {name: sum(bit.get(one, 0) for one in found) for name, found in needs.items()}
    assert sorted(score, key=lambda name: -score[name]) == ours
    assert len(bit) == n_bits
