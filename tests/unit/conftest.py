"""The command line over a scripted engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers.fake_engine import FakeEngine

from moegraph.cli import main, models

ESCAPE = "\x1b"


class Cli:
    """Run commands on a fake engine and keep what was loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = FakeEngine("")
        self.loaded: list[str] = []
        self.on_load: Callable[[], None] = lambda: None
        monkeypatch.setattr(models, "load_engine", self._load)
        monkeypatch.setattr(models, "open_header", self._open)
        monkeypatch.setattr(models, "Tokenizer", lambda path: nullcontext(self.engine.tokenizer))

    def _load(self, target: Any, config: Any, *_: object, **__: object) -> FakeEngine:
        self.loaded.append(str(getattr(target, "path", target)))
        self.on_load()
        self.engine.config = config
        return self.engine

    def _open(self, target: str | Path, _: str | None = None) -> Any:
        class Header:
            path, hparams, kv = Path(target), self.engine.hparams, self.engine.file.kv

            def __enter__(self) -> Header:
                return self

            def __exit__(self, *_: object) -> None:
                pass

        return Header()

    def __call__(self, *args: object, stdin: str | bytes | None = None) -> Result:
        """Run a command line; nothing it prints may hold an escape code or a traceback."""
        result = CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)
        assert ESCAPE not in result.output
        assert "Traceback" not in result.output
        return result

    def refused(self, *args: object, code: int = 2, stdin: str | bytes | None = None) -> str:
        """Run a command line that must fail with one line and no content; return the line."""
        result = self(*args, stdin=stdin)
        assert result.exit_code == code, result.output
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        assert len(lines) == 1, result.stderr
        return lines[0]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(monkeypatch)


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a loaded model not settle the heap: of a process of many tests, it takes seconds."""
    monkeypatch.setattr("moegraph.server.host.settle", lambda: None)
