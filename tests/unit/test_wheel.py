"""Wheels: the same bytes from the same files, and refused if their libraries need too much."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import _wheel
from _tools import BuildError

FILES = {"moegraph/b.py": b"pass\n", "moegraph/lib/libx.so": b"\x7fELF", "moegraph/a.py": b""}
ABOUT = {"METADATA": b"Name: moegraph\n", "entry_points.txt": b""}


def test_the_same_files_give_the_same_bytes_and_a_record_of_them(tmp_path: Path) -> None:
    one = _wheel.write(tmp_path / "1", "moegraph", "1.2", "cp310-abi3", FILES, ABOUT)
    other = dict(reversed(FILES.items()))
    two = _wheel.write(tmp_path / "2", "moegraph", "1.2", "cp310-abi3", other, ABOUT)
    assert one.read_bytes() == two.read_bytes()
    assert one.name == "moegraph-1.2-cp310-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(one) as zipped:
        record = zipped.read("moegraph-1.2.dist-info/RECORD").decode().splitlines()
        assert len(record) == len(zipped.namelist()) == 7
        for line in record[:-1]:
            name, digest, size = line.split(",")
            data = zipped.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, int(size)) == (f"sha256={expected}", len(data))
        assert zipped.getinfo("moegraph/lib/libx.so").external_attr >> 16 & 0o111


def test_a_tree_takes_all_wheels_of_its_version_for_the_newest_cuda(tmp_path: Path) -> None:
    assert _wheel.of_cuda(tmp_path) == []
    ours = _wheel.version()
    names = [("cuda12", ours), ("cuda12_server", ours), ("cuda13", ours), ("cuda13_server", ours)]
    names += [("cuda13", "0.0.9"), ("cuda14", "9.0")]
    made = [
        _wheel.write(tmp_path, f"moegraph_{name}", version, "py3-none", {}, ABOUT)
        for name, version in names
    ]
    assert _wheel.of_cuda(tmp_path) == [str(path) for path in made[2:4]]


def test_packages_of_cuda_share_no_file_so_either_may_be_taken_away(tmp_path: Path) -> None:
    names = [f"moegraph_cuda{major}{kind}" for major in (13, 12) for kind in ("", "_server")]
    files: list[str] = []
    for name in names:
        about = _wheel.about_cuda(name, 13, "1")
        inside = _wheel.cuda_files(name, "90 90-virtual", b"\x7fELF")
        with zipfile.ZipFile(_wheel.write(tmp_path, name, "1", "py3-none", inside, about)) as out:
            files += out.namelist()
            assert out.read(f"{name}/lib/architectures") == b"90 90-virtual"
    assert len(files) == len(set(files)) == 7 * len(names)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(
    "options, text, problem",
    [
        ([], "", ""),
        (["-Wl,--no-as-needed"], "", "libggml.so needs libother.so.1"),
        (["-Wl,-rpath,/opt/lib"], "", "libggml.so looks into /opt/lib"),
        ([], 'const char * a = "/home/me/src/a.c";', "libggml.so names /home/me"),
        (["-DPATCHSET=no"], "", "libggml.so is of another patch set"),
    ],
)
def test_libraries_that_need_this_machine_are_refused(
    tmp_path: Path, options: list[str], text: str, problem: str
) -> None:
    if problem.endswith("libother.so.1"):
        options.append(str(_compile(tmp_path / "libother.so", "", "-Wl,-soname,libother.so.1")))
    note = f'#ifndef PATCHSET\nconst char * p = "{_wheel.fetch.patchset()}";\n#endif\n'
    data = _compile(tmp_path / "libggml.so", note + text, *options).read_bytes()
    wheel = _wheel.write(tmp_path, "m", "1", "py3-none", {"m/lib/libggml.so": data}, ABOUT)
    if problem:
        with pytest.raises(BuildError, match=re.escape(problem)):
            _wheel.check(wheel, (), [Path("/home/me")])
    else:
        _wheel.check(wheel, (), [Path("/home/me")])


def _compile(path: Path, text: str, *options: str) -> Path:
    path.with_suffix(".c").write_text(text)
    command = ["cc", "-shared", "-fPIC", "-o", str(path), str(path.with_suffix(".c")), *options]
    subprocess.run(command, check=True)
    return path


def test_a_tree_takes_the_libraries_of_its_own_sources_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "lib/libggml.so", "ggml/_native.abi3.so", "server/page/lib/katex.min.js"
    files = {f"moegraph/{name}": b"new" for name in names}
    about = {_wheel.BUILT_OF: _wheel.sources().encode(), "moegraph/config.py": b"not taken"}
    tree = tmp_path / "tree"
    (tree / "moegraph" / "lib").mkdir(parents=True)
    old = tree / "moegraph" / "lib" / "libggml-cuda.so"
    old.touch()
    found = _wheel.sources()
    monkeypatch.setattr(_wheel, "ROOT", tree)
    monkeypatch.setattr(_wheel, "sources", lambda: found)
    assert not _wheel.take(tmp_path)
    _wheel.write(tmp_path, "moegraph", "1", "cp310-abi3", files | about, ABOUT)
    monkeypatch.setattr(_wheel, "sources", lambda: "another")
    assert not _wheel.take(tmp_path) and old.exists()
    monkeypatch.setattr(_wheel, "sources", lambda: found)
    assert _wheel.take(tmp_path) and not old.exists()
    assert sorted(p.name for p in tree.rglob("*") if p.is_file()) == [
        "_native.abi3.so",
        "katex.min.js",
        "libggml.so",
    ]


def test_wheels_leave_out_what_builds_need_and_the_tokenizer_finds_the_bindings() -> None:
    names = _wheel.package_files().keys()
    assert {"moegraph/__init__.py", "moegraph/models/tiny.gguf", "moegraph/py.typed"} <= names
    assert not [name for name in names if re.search(r"\.so$|\.pyc$|/decl/|_build\.py$", name)]
    assert _wheel._BINDINGS in (ROOT / "moegraph" / "text" / "tokenizer.py").read_text("utf-8")
