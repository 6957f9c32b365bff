"""Files under packaging/: they name versions and options that exist."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import _cuda
import _tools

from moegraph.cli import main
from moegraph.cli.program import load_command

CONTAINER = (ROOT / "packaging" / "Containerfile").read_text(encoding="utf-8")
UNIT = (ROOT / "packaging" / "systemd" / "moegraph.service").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "operation.md").read_text(encoding="utf-8")


def long_options(text: str) -> set[str]:
    """Return the options in the shell words of a text."""
    return set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", text))


def served() -> set[str]:
    return {flag for param in load_command("serve").params for flag in param.opts}


def test_the_pinned_package_is_that_of_the_project() -> None:
    pins = set(re.findall(r"llama-cpp-python==([\d.]+)", (ROOT / "pyproject.toml").read_text()))
    assert len(pins) == 1
    for text in (CONTAINER, PAGE):
        assert set(re.findall(r"llama-cpp-python==([\d.]+)", text)) == pins


@pytest.mark.parametrize("name", ["uvicorn", "h11"])
def test_packages_with_classes_that_are_subclassed_have_an_upper_bound(name: str) -> None:
    found = set(re.findall(rf'"{name}([<>=.,0-9]+)"', (ROOT / "pyproject.toml").read_text()))
    assert len(found) == 1
    bounds, installed = SpecifierSet(found.pop()), Version(version(name))
    assert installed in bounds, "raise the bound where the tests of the server pass"
    assert Version(f"{installed.major}.{installed.minor + 1}") not in bounds


def test_quickstart_installs_whatever_a_command_needs() -> None:
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    names = set(re.findall(r"^(\w+) = \[", extras.partition("\n[")[0], re.M))
    (found,) = re.findall(r'extras="([\w,]+)"', (ROOT / "scripts" / "quickstart").read_text())
    assert set(found.split(",")) == names - {"test", "lint", "docs"}


def test_a_package_that_is_missing_is_told_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "moegraph.link.keys", raising=False)
    said = CliRunner().invoke(main, ["worker", "--new-keys", str(tmp_path / "keys")])
    _, _, command = said.output.partition("install it with: ")
    python, *words = shlex.split(command)
    assert (python, words) == (sys.executable, ["-m", "pip", "install", "cryptography>=42"])
    assert '"cryptography>=42"' in (ROOT / "pyproject.toml").read_text()


def test_the_container_is_built_for_the_instructions_of_portable_avx2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_tools.platform, "machine", lambda: "x86_64")
    (options,) = re.findall(r'^ARG CPU_OPTIONS="(.*)"$', CONTAINER, re.MULTILINE)
    assert options.split() == _tools.cpu_options("avx2")
    (archs,) = re.findall(r'^ARG CUDA_ARCH="(.*)"$', CONTAINER, re.MULTILINE)
    assert _cuda.check_architectures(archs.split(";")) == archs.split(";")


def test_options_of_serve_exist() -> None:
    (command,) = re.findall(r"^ExecStart=\S+ serve (.*)$", UNIT, re.MULTILINE)
    entries = re.findall(r"^ENTRYPOINT (.*)$", CONTAINER, re.MULTILINE)
    example = re.findall(r"^# +moegraph:cpu (.*)$", CONTAINER, re.MULTILINE)
    text = " ".join([command, *example, *re.findall(r"`(--[a-z-]+)", PAGE)])
    text += " ".join(entries).replace('"', " ")
    docker = {"--ulimit"}
    assert long_options(text) - docker - served() == set()
    assert {"--api-key-file", "--host", "--sleep-idle", "--drain", "--alias-host"} <= long_options(
        text
    )
