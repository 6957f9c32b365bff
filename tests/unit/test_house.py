"""House rules that a machine can check: imports, sizes, docstrings, annotations, options."""

from __future__ import annotations

import ast
import importlib
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from moegraph.arch.model import ARCHITECTURES
from moegraph.config import EngineConfig, settings

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from _rooms import RANK, ROOMS, Import, find_cycles, find_imports

PACKAGE = ROOT / "moegraph"
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

PURE = (
    "config", "cpuload", "errors", "events", "kinds", "sampling", "setting",
    "threads", "units",
    "gguf", "arch", "arch.dflash", "arch.draftfile", "arch.hparams", "arch.summary",
    "text.chat.answer", "text.chat.template", "text.grammar", "text.stream",
    "resident.draftlayout", "resident.kvpool", "resident.layout",
    "experts.cache", "experts.cachestats", "experts.cost", "experts.crossing",
    "experts.machines",
    "experts.policy",
    "experts.residency", "experts.slots",
    "placement.draftcounts", "placement.footprint", "placement.generator", "placement.identity",
    "placement.planner", "placement.profile", "placement.profilefile", "placement.simulate",
    "placement.trace",
    "draft.controller", "draft.drafter", "draft.estimates", "draft.lookup",
    "draft.plan", "draft.race", "draft.tree",
    "engine.chat", "passes.prefixtree", "loop.requests",
    "loop.generated", "passes.speculation",
    "loop.costs", "loop.groupchoice", "loop.scheduler", "loop.requests",
)  # fmt: skip

# An import inside a function hides from readers what a module needs. Allowed: module -> why.
_QUICK_START = "help and completion answer before numpy or the native libraries are imported"
LAZY = {
    "__main__": "Ctrl-C while the command line is being imported is caught too",
    "cli": _QUICK_START,
    "engine": "other modules of the room need no native library",
    "engine.engine": "a generation from token ids needs nothing of conversations",
    "ggml.device": "what connects to other machines is imported for a device there",
    "ggml.lib": "the native module is imported after a check, with an error of ours",
    "interrupt": "it is ready for Ctrl-C before numpy is imported",
    "text.tokenizer": "prompts are measured and refused without the native libraries",
}

# A reader holds a folder of the package in mind, a class has one concern, a function fits on a
# screen.
ROOM_CAP, CLASS_CAP, FUNCTION_CAP = 25, 20, 60
# Rooms, classes (methods) and functions (lines) that are still larger: these lists only shrink.
LARGE = {
    # one method for each operation of ggml
    "Builder": 40,
    "Engine": 31,
}  # fmt: skip
# Lines of the package, at most. A commit that raises it says why.
LINES = 57799
WIDTH = 100
KINDS = ("int", "float", "choice", "flag", "device", "size", "split", "path")


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


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def where(found: Import) -> str:
    return f"{found.module}:{found.line} imports {found.name}"


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    """Return what modules of the package import from it, for type checking and lazily too."""
    found = find_imports(PACKAGE)
    assert len(found) > 500
    return found


def test_every_module_lives_in_a_known_room() -> None:
    rooms = {room(path) for path in MODULES if path.name != "__init__.py" or path.parent != PACKAGE}
    assert rooms <= set(RANK)


def test_lower_rooms_never_import_higher_ones(imports: list[Import]) -> None:
    assert [where(found) for found in imports if is_upwards(found)] == []


def is_upwards(found: Import) -> bool:
    """Return whether a module imports a higher room, or the package's own shortcuts."""
    if found.module == "":
        return False
    if found.target_room not in RANK:
        return found.name != "__version__"
    return RANK[found.target_room] > RANK[found.source_room]


def test_no_module_imports_itself_by_a_detour(imports: list[Import]) -> None:
    assert [" -> ".join(cycle) for cycle in find_cycles(imports)] == []


def test_imports_inside_functions_have_a_reason(imports: list[Import]) -> None:
    lazy = [found for found in imports if found.is_lazy]
    used = {name for name in LAZY for found in lazy if _may_be_lazy(found, name)}
    wrong = [where(f) for f in lazy if not any(_may_be_lazy(f, name) for name in LAZY)]
    assert wrong == [] and used == set(LAZY)


def _may_be_lazy(found: Import, name: str) -> bool:
    is_room = name == "cli" and found.module.startswith("cli.")
    return found.module == name or is_room


def test_only_the_ggml_room_imports_the_native_module(imports: list[Import]) -> None:
    native = [found for found in imports if "_native" in found.name.split(".")]
    assert native and [where(f) for f in native if f.source_room != "ggml"] == []


def test_only_the_arch_room_knows_an_architecture_by_its_name() -> None:
    """A further model is a file in arch/: everything else asks it (`Architecture`)."""
    wrong = [
        f"{short(path)}: {name}"
        for path in MODULES
        if room(path) != "arch"
        for name in ARCHITECTURES
        if name in path.read_text(encoding="utf-8").lower()
    ]
    assert wrong == []


# Ways to read or write memory by its address from Python.
BY_ADDRESS = ("ffi.buffer", "ffi.memmove", "ffi.unpack", "ctypes.memmove", "ctypes.memset",
              "ctypes.string_at", "as_array", "from_address", "__array_interface__")  # fmt: skip


def by_address(module: ast.Module) -> list[str]:
    """Return the class, or "", and the name of each use of native memory by its address."""
    owners = {
        id(inner): node.name
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
        for inner in ast.walk(node)
    }
    found = [
        (owners.get(id(node), ""), ast.unparse(node))
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
    ]
    return sorted(f"{owner} {name}" for owner, name in found if name.endswith(BY_ADDRESS))


def test_no_device_memory_is_mapped_as_numpy() -> None:
    """A device may have memory without an address; only transfers through ggml reach it.

    `HostBuffer` is in memory of the host by its buffer type.
    """
    found = {short(path): by_address(tree(path)) for path in MODULES}
    assert {name: uses for name, uses in found.items() if uses} == {
        "moegraph/ggml/device.py": ["HostBuffer ffi.buffer"],
        # libmtmd's results are numbers of its own, in memory of the host
        "moegraph/text/pictureprocess.py": ["_Encoder ctypes.string_at"],
    }


def test_the_rule_on_addresses_notices_what_it_forbids() -> None:
    code = "class A:\n    def f(self): return ffi.buffer(t.data, 4)\nnp.ctypeslib.as_array(p)\n"
    assert by_address(ast.parse(code)) == [" np.ctypeslib.as_array", "A ffi.buffer"]


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "draw_rooms"), "--check"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize("arg, word", [("--help", "simulate"), ("--version", "moegraph 0.")])
def test_the_program_alone_imports_no_command_and_nothing_heavy(arg: str, word: str) -> None:
    heavy = {"numpy", "gguf", "moegraph.cli.run", "moegraph.engine"}
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from moegraph.cli import main\n"
        "import moegraph.__main__, moegraph.interrupt\n"
        f"shown = CliRunner().invoke(main, [{arg!r}]).stdout\n"
        f"print({word!r} in shown, {heavy!r} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("True set()\n", "")


def sizes(found: Iterable[tuple[str, int]], cap: int) -> dict[str, int]:
    """Return the largest size of each name that is above the cap."""
    large: dict[str, int] = {}
    for name, n in found:
        if n > cap:
            large[name] = max(n, large.get(name, 0))
    return large


def test_rooms_classes_and_functions_are_small() -> None:
    """Those in LARGE have just the size that stands there: who makes one smaller lowers it."""
    rooms = Counter(path.parent.name for path in PACKAGE.rglob("*.py"))
    nodes = [node for path in MODULES for node in ast.walk(tree(path))]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    classes = [
        (node.name, sum(isinstance(x, kinds) for x in node.body))  # properties included
        for node in nodes
        if isinstance(node, ast.ClassDef)
    ]
    lines = [
        (f"{path.stem}.{f.name}", (f.end_lineno or f.lineno) - f.lineno + 1)
        for path in EVERYTHING
        for f in functions(path)
    ]
    found = sizes(rooms.items(), ROOM_CAP) | sizes(classes, CLASS_CAP) | sizes(lines, FUNCTION_CAP)
    assert found == LARGE


def test_the_package_does_not_grow_unseen() -> None:
    n = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES)
    assert n <= LINES, f"moegraph/ has {n} lines"


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
        assert (setting.minimum is None) == (setting.kind not in ("int", "float"))
        assert setting.allowed
    # One sequence is served: room for more is for callers of the Python API.
    assert [s.name for s in listed.values() if not s.flags] == ["n_seq", "n_kv", "n_draft"]


@pytest.mark.parametrize(
    ("name", "useless"), [("run", {"cache_ram", "mmproj_device"}), ("chat", set())]
)
def test_every_engine_setting_with_a_spelling_is_an_option(name: str, useless: set[str]) -> None:
    command = importlib.import_module("moegraph.cli.program").load_command(name)
    options = {flag: p.name for p in command.params for flag in p.opts}
    for setting in settings():
        found = {options.get(flag) for flag in setting.flags}
        assert found <= ({None} if setting.name in useless else {setting.name}), setting


def package_of(folder: Path, files: dict[str, str]) -> Path:
    """Write a package `moegraph` of these files; return its folder."""
    for name, text in files.items():
        path = folder / "moegraph" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "moegraph"


@pytest.mark.parametrize("rank", range(1, len(ROOMS)))
def test_the_import_rule_notices_a_higher_room(rank: int, tmp_path: Path) -> None:
    """The gate itself: an import of the next room is seen, however it is written."""
    lower, higher = ROOMS[rank - 1][0], ROOMS[rank][0]
    for text in (
        f"from ..{higher} import a",
        f"import moegraph.{higher}.b",
        f"def f():\n    from moegraph.{higher} import a",
        f"if TYPE_CHECKING:\n    from ..{higher}.b import a",
        f"from .. import {higher}",
    ):
        package = package_of(tmp_path, {"__init__.py": "", f"{lower}/m.py": text})
        found = find_imports(package)
        assert [one.target_room for one in found] == [higher], text
        assert [is_upwards(one) for one in found] == [True], text
        assert [one.is_lazy for one in found] == [text.startswith("def")], text


@pytest.mark.parametrize(
    "back",
    ["from . import a", "def f():\n    from .a import x", "if 1:\n    import moegraph.ggml.a"],
)
def test_the_import_rule_notices_a_cycle(back: str, tmp_path: Path) -> None:
    files = {"ggml/__init__.py": "from .a import x", "ggml/a.py": "from .b import x"}
    package = package_of(tmp_path, {**files, "ggml/b.py": "import os"})
    assert find_cycles(find_imports(package)) == []
    package_of(tmp_path, {"ggml/b.py": back})
    assert find_cycles(find_imports(package)) == [["ggml.a", "ggml.b", "ggml.a"]]


def test_the_import_rule_notices_the_shortcuts_of_the_package(tmp_path: Path) -> None:
    """`from moegraph import Engine` in a low room would be an import of the engine."""
    files = {"__init__.py": "", "ggml/m.py": "from .. import Engine, __version__"}
    found = find_imports(package_of(tmp_path, files))
    assert [one.name for one in found if is_upwards(one)] == ["Engine"]
