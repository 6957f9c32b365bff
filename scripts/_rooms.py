"""The rooms of the package: their order, and which module imports which."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

# Low to high: a room imports only rooms above it in this list. The first line is one room: the
# single files that everything may use.
ROOMS = [
    line.partition("#")[0].split()
    for line in """\
closing errors units threads cpuload events interrupt kinds lazypackage pictures setting config \
sampling sources
gguf
link        # connections to other machines; no native libraries
ggml
arch        # above ggml: builders of graphs
text        # above ggml: the tokenizer is llama.cpp's
resident
experts     # below placement: the simulator drives the same cache as the runner
placement
graphs
runner
draft
passes
loop
engine
server
worker
bench
cli
__main__
""".splitlines()
]
RANK = {room: rank for rank, line in enumerate(ROOMS) for room in line}


@dataclass(frozen=True)
class Import:
    """One name that a module imports from the package.

    module: the importing module, its name after "moegraph."; "" is the package itself. name: what
    the statement names, also after "moegraph.". target: the module of the package that it is or is
    in, "" if no other has it. is_lazy: the import is inside a function.
    """

    module: str
    line: int
    name: str
    target: str
    is_lazy: bool

    @property
    def source_room(self) -> str:
        """The room of the importing module."""
        return self.module.partition(".")[0]

    @property
    def target_room(self) -> str:
        """The room of what is imported, also where it has no file."""
        return self.name.partition(".")[0]


def module_name(path: Path, package: Path) -> str:
    """Return a file's module name without the package: 'ggml.lib'; 'ggml' of ggml/__init__.py."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imports(package: Path) -> list[Import]:
    """Return all imports inside a package, those in functions and for type checking included."""
    files = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    return [
        Import(module, line, name, _module_of(name, files), is_lazy)
        for module, path in files.items()
        for line, name, is_lazy in _imports(path, package)
    ]


def _imports(path: Path, package: Path) -> Iterator[tuple[int, str, bool]]:
    own = (package.name, *path.relative_to(package).parts[:-1])
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for node, is_lazy in _nodes(tree, False):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = own[: len(own) - node.level + 1] if node.level else ()
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{prefix}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == package.name:
                yield node.lineno, name.partition(".")[2], is_lazy


def _nodes(node: ast.AST, is_lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = is_lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield child, inside
        yield from _nodes(child, inside)


def _module_of(name: str, files: Mapping[str, Path]) -> str:
    """Return the module that a dotted name is, or is in."""
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name


def find_cycles(imports: list[Import]) -> list[list[str]]:
    """Return a cycle of modules that import one another; [] if there is none.

    Python also imports a package before its modules; that is no import of ours and does not count.
    """
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for found in imports:
        if found.module != found.target:
            sorter.add(found.target, found.module)
    try:
        sorter.prepare()
    except CycleError as error:
        return [error.args[1]]
    return []
