"""Files under packaging/: they name versions and options that exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import _cuda
import _tools

from moegraph.cli import main

CONTAINER = (ROOT / "packaging" / "Containerfile").read_text(encoding="utf-8")
UNIT = (ROOT / "packaging" / "systemd" / "moegraph.service").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "operation.md").read_text(encoding="utf-8")


def long_options(text: str) -> set[str]:
    """Return the options in the shell words of a text."""
    return set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", text))


def served() -> set[str]:
    return {flag for param in main.commands["serve"].params for flag in param.opts}


def test_the_pinned_package_is_that_of_the_project() -> None:
    pins = set(re.findall(r"llama-cpp-python==([\d.]+)", (ROOT / "pyproject.toml").read_text()))
    assert len(pins) == 1
    for text in (CONTAINER, PAGE):
        assert set(re.findall(r"llama-cpp-python==([\d.]+)", text)) == pins


def test_the_container_is_built_for_the_instructions_of_portable_avx2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_tools.platform, "machine", lambda: "x86_64")
    (options,) = re.findall(r'^ARG CPU_OPTIONS="(.*)"$', CONTAINER, re.MULTILINE)
    assert options.split() == _tools.cpu_options("avx2")
    (archs,) = re.findall(r'^ARG CUDA_ARCH="(.*)"$', CONTAINER, re.MULTILINE)
    assert _cuda.check_architectures(archs.split(";")) == archs.split(";")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stages_that_are_built_on_or_copied_from_exist(device: str) -> None:
    named: set[str] = set()
    for line in CONTAINER.replace("${DEVICE}", device).splitlines():
        if found := re.match(r"FROM (\S+)(?: AS (\S+))?$", line):
            base, name = found.groups()
            assert base in named or base.startswith(("debian:", "nvidia/cuda:")), base
            named.add(name)
        named_here = re.search(r"--from=(\S+)", line)
        assert named_here is None or named_here[1] in named
    assert {f"{device}-devel", f"{device}-runtime", "build"} <= named


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
