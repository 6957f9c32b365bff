"""What all tests share: what they need of the machine, helper modules, patience on a busy one.

Tests that need what is not there are skipped with the reason (pytest -rs shows it). --require
turns that into a failure, and what is there but broken always is one: see helpers/needs.py.
Several test processes (pytest -n 2) take turns: see helpers/turns.py.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))

from helpers import needs
from helpers.turns import Turns

# How fast this machine draws examples says nothing about the code, and a busy one is slow.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

os.environ["MOEGRAPH_HISTORY"] = ""  # tests type messages that are not the user's
os.environ["XDG_CONFIG_HOME"] = os.devnull  # nor have they settings of the user

# Folder under tests/ -> why its tests are skipped.
MISSING = pytest.StashKey[dict[str, str]]()
# Set in each of several test processes.
TURNS = pytest.StashKey[Turns]()
# Their modules import the native module, so without it they cannot even be collected.
NATIVE_FOLDERS = ("native", "cuda")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --require and --nightly."""
    parser.addoption(
        "--require", action="append", default=[], metavar="NAMES",
        help="fail where tests would be skipped because this is missing: "
        + ", ".join(needs.NEEDS) + " (several with commas)",
    )  # fmt: skip
    parser.addoption("--nightly", action="store_true", help="run also tests marked nightly")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked nightly, unless --nightly is given; begin with those marked long."""
    if not config.getoption("nightly"):
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def required(config: pytest.Config) -> list[str]:
    """Return the names that --require lists."""
    names = [n for given in config.getoption("require") for n in given.split(",") if n]
    for name in names:
        if name not in needs.NEEDS:
            raise pytest.UsageError(f"--require {name}: known are {', '.join(needs.NEEDS)}")
    return names


def asked_for(config: pytest.Config, folder: Path) -> bool:
    """Return whether the arguments of pytest may select tests of a folder."""
    for arg in config.args:
        path = (config.invocation_params.dir / arg.partition("::")[0]).resolve()
        if path == folder or path in folder.parents or folder in path.parents:
            return True
    return False


def pytest_configure(config: pytest.Config) -> None:
    """Look once for what the selected tests need; end with one line if it must be there."""
    if hasattr(config, "workerinput"):  # a process of pytest-xdist; they share the folder above
        config.stash[TURNS] = Turns(Path(config.getoption("basetemp")).parent)
    config.stash[MISSING] = found = {}
    must = required(config)
    for name in needs.NEEDS:
        if name not in must and not asked_for(config, TESTS / name):
            continue
        try:
            reason = needs.missing(name)
        except needs.Broken as error:
            raise pytest.UsageError(str(error)) from None
        if reason and name in must:
            raise pytest.UsageError(f"--require {name}: {reason}")
        if reason:
            found[name] = reason


def folder_of(path: Path) -> str:
    """Return the folder under tests/ that holds a file, "" for others."""
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone what is there for all tests: many call it."""
    gc.collect()
    gc.freeze()


class Unavailable(pytest.Module):
    """A module that cannot be imported without native libraries: reported as skipped."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        """Skip."""
        pytest.skip(needs.NOT_BUILT, allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Do not import what cannot be imported."""
    folder = folder_of(module_path)
    reason = parent.config.stash[MISSING].get(folder)
    if folder in NATIVE_FOLDERS and reason == needs.NOT_BUILT:
        return Unavailable.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test in its turn, with all that sets it up and tears it down."""
    turns = item.config.stash.get(TURNS, None)
    alone = item.get_closest_marker("alone") is not None
    with turns.take(alone) if turns else nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests of a folder that lacks something: one line of -rs for all of them."""
    folder = folder_of(item.path)
    reason = item.config.stash[MISSING].get(folder)
    if reason:
        pytest.skip(f"tests/{folder}: {reason}")


@pytest.fixture(scope="session")
def fetch() -> ModuleType:
    """Return vendor/fetch.py as a module."""
    spec = importlib.util.spec_from_file_location("fetch", TESTS.parent / "vendor" / "fetch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
