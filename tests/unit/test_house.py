"""House rules that a machine can check: imports, sizes, docstrings, annotations, options."""

from __future__ import annotations

import ast
import importlib
import io
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from moegraph.config import EngineConfig, settings

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "moegraph"
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# Low to high: a room imports rooms of its own line and of the lines above it.
ROOMS = (
    ("errors", "threads", "config", "units", "hostmem", "kinds"),
    ("modelfile", "hparams"),
    ("ggml",),
    ("weights", "state"),
    # Banks and placement know nothing of graphs; the graph of an expert FFN is built over a bank.
    ("experts",),
    ("graphs",),
    ("runner",),
    ("draft",),
    (
        "tokenizer",
        "chat",
        "sampling",
        "sequence",
        "generation",
        "footprint",
        "ownership",
        "passes",
        "cputhreads",
        "engine",
    ),
    ("bench", "cli", "server", "__main__"),
)
RANK = {room: rank for rank, line in enumerate(ROOMS) for room in line}
PURE = (
    "config", "threads", "units", "hostmem", "kinds", "hparams", "modelfile", "modelfile.summary",
    "sampling", "sequence",
    "experts.policy", "experts.cache", "experts.planner", "experts.cost", "experts.simulate",
    "experts.trace", "experts.tracestats", "experts.generator", "experts.profile",
    "experts.profilefile", "experts.guard", "experts.residency",
)  # fmt: skip

FILE_CAP, FILE_MEDIAN = 500, 200
FUNCTION_CAP, FUNCTION_P90 = 80, 35
WIDTH = 100
KINDS = ("int", "choice", "flag", "device", "size", "path")


def sources(*patterns: str) -> list[Path]:
    """Return the Python files that match, scripts without a suffix included; no empty ones."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.stat().st_size and _is_python(path))


def _is_python(path: Path) -> bool:
    if path.suffix:
        return path.suffix == ".py"
    return b"python" in path.read_bytes().partition(b"\n")[0]


MODULES = sources("moegraph/**/*.py")
EVERYTHING = [*MODULES, *sources("scripts/**/*", "tests/**/*.py", "vendor/*.py", "examples/*.py")]


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path, root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name inside moegraph) for every import, type-checking ones left out."""
    package = path.relative_to(root).with_suffix("").parts[:-1]
    for node in _runtime_nodes(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{prefix}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("moegraph."):
                yield node.lineno, name.removeprefix("moegraph.")


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _runtime_nodes(child)


def test_every_module_lives_in_a_known_room() -> None:
    rooms = {room(path) for path in MODULES if path.name != "__init__.py" or path.parent != PACKAGE}
    assert rooms <= set(RANK)


def test_lower_rooms_never_import_higher_ones() -> None:
    wrong = []
    for path in MODULES:
        if path == PACKAGE / "__init__.py":
            continue
        for line, name in imported(path):
            target = name.split(".")[0]
            if target in RANK and RANK[target] > RANK[room(path)]:
                wrong.append(f"{short(path)}:{line} imports {name}")
    assert wrong == []


def test_only_the_ggml_room_imports_the_native_module() -> None:
    wrong = [
        f"{short(path)}:{line}"
        for path in MODULES
        if room(path) != "ggml"
        for line, name in imported(path)
        if "_native" in name.split(".")
    ]
    assert wrong == []


def test_pure_modules_import_without_the_native_module() -> None:
    code = (
        "import importlib, sys\n"
        "sys.modules['moegraph.ggml'] = sys.modules['llama_cpp'] = None\n"
        f"[importlib.import_module('moegraph.' + name) for name in {PURE!r}]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = {"numpy", "gguf", "click", "cffi"}
    code = f"import sys, moegraph; sys.exit(len({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_files_stay_small() -> None:
    lengths = {short(p): len(p.read_text(encoding="utf-8").splitlines()) for p in EVERYTHING}
    assert {name: n for name, n in lengths.items() if n > FILE_CAP} == {}
    package = [n for name, n in lengths.items() if name.startswith("moegraph/")]
    assert statistics.median(package) <= FILE_MEDIAN


def test_functions_stay_small() -> None:
    sizes = {
        f"{short(path)}:{f.lineno} {f.name}": (f.end_lineno or f.lineno) - f.lineno + 1
        for path in EVERYTHING
        for f in functions(path)
    }
    assert {name: n for name, n in sizes.items() if n > FUNCTION_CAP} == {}
    package = sorted(n for name, n in sizes.items() if name.startswith("moegraph/"))
    assert package[len(package) * 9 // 10] <= FUNCTION_P90


def test_lines_fit_into_100_columns() -> None:
    wrong = [
        f"{short(path)}:{i} has {len(line)}"
        for path in EVERYTHING
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > WIDTH
    ]
    assert wrong == []


def test_comments_are_ascii_and_no_banners() -> None:
    wrong = []
    for path in EVERYTHING:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            if token.type != tokenize.COMMENT:
                continue
            banner = token.string.strip("# ").startswith(("---", "===", "***"))
            if banner or not token.string.isascii():
                wrong.append(f"{short(path)}:{token.start[0]}")
    assert wrong == []


def test_every_module_postpones_annotations() -> None:
    line = "from __future__ import annotations"
    wrong = [
        short(path)
        for path in EVERYTHING
        if line not in path.read_text(encoding="utf-8") and len(tree(path).body) > 1
    ]
    assert wrong == []


def _public(node: ast.AST) -> Iterator[Definition]:
    """Yield public classes, functions and methods that somebody outside could call."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition):
            continue
        decorators = {ast.unparse(d) for d in child.decorator_list}
        if child.name.startswith("_") or "overload" in decorators:
            continue
        if any(d.endswith((".setter", ".deleter")) for d in decorators):
            continue
        yield child
        if isinstance(child, ast.ClassDef):
            yield from _public(child)


def test_everything_public_has_a_docstring() -> None:
    missing = []
    for path in MODULES:
        module = tree(path)
        if ast.get_docstring(module) is None:
            missing.append(short(path))
        for node in _public(module):
            if ast.get_docstring(node) is None:
                missing.append(f"{short(path)}:{node.lineno} {node.name}")
    assert missing == []


def test_every_function_of_the_package_is_annotated() -> None:
    missing = []
    for path in MODULES:
        for f in functions(path):
            a = f.args
            args = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            bare = [x.arg for x in args if not x.annotation and x.arg not in ("self", "cls")]
            if bare or f.returns is None:
                missing.append(f"{short(path)}:{f.lineno} {f.name} {bare}")
    assert missing == []


def test_no_bare_except_and_no_print_below_the_command_line() -> None:
    wrong = []
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(f"{short(path)}:{node.lineno} bare except")
            is_print = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
            if is_print and RANK[room(path)] < RANK["cli"]:
                wrong.append(f"{short(path)}:{getattr(node, 'lineno', 0)} print")
    assert wrong == []


def test_every_engine_setting_carries_what_the_command_line_needs() -> None:
    listed = {s.name: s for s in settings()}
    assert list(listed) == [f.name for f in fields(EngineConfig)]
    for setting in listed.values():
        assert setting.help.endswith(".") and setting.kind in KINDS
        assert bool(setting.choices) == (setting.kind == "choice")
        assert (setting.minimum is None) == (setting.kind != "int")
        assert setting.allowed
    # One sequence is served: room for more is for callers of the Python API.
    assert [s.name for s in listed.values() if not s.flags] == ["n_seq"]


def test_every_engine_setting_with_a_spelling_is_an_option_of_run_and_chat() -> None:
    commands = importlib.import_module("moegraph.cli").main.commands
    for name in ("run", "chat"):
        options = {flag: p.name for p in commands[name].params for flag in p.opts}
        for setting in settings():
            assert {options.get(flag) for flag in setting.flags} <= {setting.name}, setting


@pytest.mark.parametrize("rank", range(1, len(ROOMS)))
def test_the_import_rule_notices_a_higher_room(rank: int, tmp_path: Path) -> None:
    """The gate itself: an import of the next room is seen, however it is written."""
    higher = ROOMS[rank][0]
    package = tmp_path / "moegraph" / "x"
    package.mkdir(parents=True)
    module = package / "m.py"
    for text in (
        f"from ..{higher} import a",
        f"import moegraph.{higher}.b",
        f"def f():\n    from moegraph.{higher} import a",
        f"from .. import {higher}",
    ):
        module.write_text(text)
        found = [name.split(".")[0] for _, name in imported(module, tmp_path)]
        assert found == [higher], text
