#!/usr/bin/env python3
"""Write docs/api.md from the docstrings of the public names, or check that it is up to date."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

from _tools import write_or_check

import moegraph
from moegraph.config import settings
from moegraph.sampling import settings as sampling_settings

PAGE = ROOT / "docs" / "api.md"

HEAD = """\
# Python API

This page is generated from docstrings by `scripts/gen_api_docs.py`. `scripts/docs` builds the full
reference, with signatures and errors, into `build/docs`. [examples/](../examples) has six short
programs.

The names on this page are public: a release that changes one says so in
[CHANGELOG.md](../CHANGELOG.md). Other modules can be imported, but may change at any time.
"""

# The groups of public names, in the order of the page.
GROUPS = {
    "Engine, settings, models": (
        "Engine", "AsyncEngine", "EngineConfig", "SamplingParams", "open_model",
    ),
    "Text and tokens": ("Tokenizer",),
    "What a generation yields": ("GenerationEvent", "CancelToken"),
    "Conversations": (
        "ChatRequest", "Format", "ChatAnswer", "ReasoningPart", "ContentPart", "CallBegin",
        "CallArguments", "CallEnd", "Reply", "ToolCall", "ChatTemplate", "History", "Message",
        "ReasoningSplitter",
    ),
}  # fmt: skip


def module_tree(name: str) -> tuple[Path, ast.Module]:
    """Return the file and the syntax tree of a module of the package, without importing it."""
    path = ROOT.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path, ast.parse(path.read_text(encoding="utf-8"))


def find(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    """Return the definition of a name; follow `from .x import name` to the defining module."""
    path, tree = module_tree(module)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names):
            return find(f"{package}.{node.module}", name)
    raise LookupError(f"{module} has no {name}")


def summary(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the first line of a docstring, for a table cell."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield (name, summary) of public methods and properties."""
    for part in node.body:
        functions = ast.FunctionDef, ast.AsyncFunctionDef
        if isinstance(part, functions) and not part.name.startswith("_"):
            decorators = {ast.unparse(d) for d in part.decorator_list}
            if any(name.endswith(".setter") for name in decorators):
                continue  # the property itself is listed
            is_value = decorators & {"property", "cached_property"}
            yield f"{part.name}" if is_value else f"{part.name}()", summary(part)


def section(name: str) -> str:
    """Return the section of one public name."""
    node = find(f"moegraph{moegraph._HOMES[name]}", name)
    lines = [f"### moegraph.{name}", "", summary(node), ""]
    rows = list(members(node)) if isinstance(node, ast.ClassDef) else []
    fields = {"EngineConfig": settings(), "SamplingParams": sampling_settings()}.get(name, ())
    rows = [(s.name, s.help.replace("|", "\\|")) for s in fields] + rows
    if rows:
        lines += ["| name | meaning |", "|---|---|"]
        lines += [f"| `{member}` | {text} |" for member, text in rows] + [""]
    return "\n".join(lines)


def errors() -> str:
    """Return the table of error classes."""
    _, tree = module_tree("moegraph.errors")
    kinds = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    lines = ["## Errors, in moegraph.errors", "", "| class | base | meaning |", "|---|---|---|"]
    lines += [f"| `{k.name}` | `{ast.unparse(k.bases[0])}` | {summary(k)} |" for k in kinds]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts += [f"## {title}\n", *(section(name) for name in names)]
    parts.append(errors())
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, PAGE, page))
