"""Tests cannot vanish: what is missing is skipped with a reason, what is broken is a failure.

Each case runs pytest in a process of its own, on a small tree with this checkout's conftest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HELPERS = (
    "tests/conftest.py",
    "tests/helpers/__init__.py",
    "tests/helpers/needs.py",
    "tests/helpers/turns.py",
    "tests/oracle/client.py",
    "pyproject.toml",
)
NOT_BUILT = "the native libraries are not built; scripts/test builds them"
LIBRARY = "moegraph/ggml/_native.abi3.so"
# A package that works and sees no GPU, without the cost of a real one; and of hypothesis.
WORKS = {
    "hypothesis.py": "class HealthCheck: too_slow = None\n"
    "class settings: register_profile = load_profile = staticmethod(lambda *a, **k: None)",
    "moegraph/__init__.py": "",
    "moegraph/engine/engine.py": "class Engine: ...",
    "moegraph/ggml/device.py": "def list_devices(): return [{'kind': 'cpu'}]",
    LIBRARY: "",
    ".oracle/llama_cpp/__init__.py": "",
}
NATIVE_TEST = "from moegraph.engine.engine import Engine\ndef test_one(): assert Engine"
TESTS = {
    "tests/native/test_native.py": NATIVE_TEST,
    "tests/cuda/test_cuda.py": NATIVE_TEST,
    "tests/regression/test_regression.py": "def test_one(): pass\ndef test_two(): pass",
    "tests/unit/test_unit.py": "def test_one(): pass",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a checkout in small, in which everything is there but a GPU."""
    for name in HELPERS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    write(tmp_path, WORKS | TESTS)
    return tmp_path


def run(tree: Path, *args: str) -> tuple[int, str]:
    """Run pytest in a tree; return its exit code and all it said."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MOEGRAPH", "PYTEST"))}
    env |= {"PYTHONPATH": str(tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *args],
        cwd=tree, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def refused(tree: Path, *args: str) -> str:
    """Run pytest, which must end with one line and not with 0; return the line."""
    code, said = run(tree, *args)
    lines = [line for line in said.splitlines() if line]
    assert code != 0 and len(lines) == 1, said
    return lines[0]


def test_no_gpu_skips_the_tests_of_its_folder_one_by_one(tree: Path) -> None:
    code, said = run(tree)
    assert code == 0 and "4 passed, 1 skipped" in said, said
    assert ": tests/cuda: no CUDA device" in said
    assert refused(tree, "--require", "native,cuda").startswith("ERROR: --require cuda: no CUDA")


def test_nightly_tests_run_only_when_asked_for(tree: Path) -> None:
    marked = "import pytest\n@pytest.mark.nightly\ndef test_long(): pass\ndef test_short(): pass"
    write(tree, {"tests/unit/test_unit.py": marked})
    assert "1 passed, 1 deselected" in run(tree, "tests/unit")[1]
    assert "2 passed" in run(tree, "tests/unit", "--nightly")[1]


def test_libraries_that_are_not_built_skip_and_say_so(tree: Path) -> None:
    (tree / LIBRARY).unlink()
    write(tree, {"moegraph/engine/engine.py": "raise ImportError('no _native')"})
    code, said = run(tree)
    assert code == 0 and "1 passed, 4 skipped" in said, said
    assert said.count(NOT_BUILT) >= 2, "the modules of native and cuda, the tests of regression"
    assert refused(tree, "--require", "native") == f"ERROR: --require native: {NOT_BUILT}"
    assert refused(tree, "--require=cuda") == f"ERROR: --require cuda: {NOT_BUILT}"


def test_an_import_error_is_never_a_reason_to_skip(tree: Path) -> None:
    write(tree, {"moegraph/engine/engine.py": "import math\n\nfrom math import no_such_name\n"})
    for args in (("tests/native/test_native.py::test_one",), ("tests/unit", "--require=native")):
        line = refused(tree, *args)
        assert line.startswith("ERROR: moegraph.engine.engine cannot be imported: ImportError: ")
        assert line.endswith("(engine.py:3)")
    assert run(tree, "tests/unit")[0] == 0, "asks for nothing native"


def test_libraries_that_do_not_load_are_a_failure(tree: Path) -> None:
    """The real package, and a library that is none."""
    shutil.rmtree(tree / "moegraph")
    skipped = shutil.ignore_patterns("*.so", "models", "lib", "__pycache__")
    shutil.copytree(ROOT / "moegraph", tree / "moegraph", ignore=skipped)
    write(tree, {LIBRARY: "not a library"})
    line = refused(tree)
    assert "cannot be imported: NativeError" in line and "carries no patch set" in line


# Notes in a file which process ran it, whether alone, and from when to when.
TIMED_TEST = """
import os, time
from pathlib import Path
import pytest
@pytest.mark.parametrize("i", range(6))
@pytest.mark.parametrize("alone", [pytest.param(True, marks=pytest.mark.alone), False])
def test_one(i: int, alone: bool) -> None:
    begin = time.monotonic()
    time.sleep(0.05)
    with Path("times").open("a") as file:
        file.write(f"{os.getpid()} {int(alone)} {begin} {time.monotonic()}\\n")
"""


def test_two_processes_skip_and_refuse_as_one_does_and_take_turns(tree: Path) -> None:
    two = ("-p", "xdist.plugin", "-n", "2", "--dist", "worksteal")
    write(tree, {"tests/unit/test_timed.py": TIMED_TEST})
    for _ in range(5):  # on a busy machine one process may run all before the other begins
        (tree / "times").unlink(missing_ok=True)
        code, said = run(tree, *two)
        assert code == 0 and "16 passed, 1 skipped" in said, said
        assert "SKIPPED [1]" in said and ": tests/cuda: no CUDA device" in said
        text = (tree / "times").read_text()
        runs = [[float(x) for x in line.split()] for line in text.splitlines()]
        if len({process for process, *_ in runs}) == 2:
            break
    else:
        raise AssertionError("one process ran all tests")
    for process, alone, begin, end in runs:
        others = [r for r in runs if r[0] != process and r[2] < end and r[3] > begin]
        assert not others or not (alone or any(r[1] for r in others))
    assert refused(tree, *two, "--require", "cuda").startswith("ERROR: --require cuda: no CUDA")
