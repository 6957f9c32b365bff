"""Tests of `moegraph serve`: what its options become, without a model that runs."""

from __future__ import annotations

import queue
import re
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers.patience import PATIENCE_S

from moegraph.cli.serve import serve
from moegraph.errors import ConfigError, MoegraphError
from moegraph.server.errors import ApiError
from moegraph.server.guards import Guard
from moegraph.server.running import ServerProcess
from moegraph.server.state import ServerState


class Ran:
    """Stands for the process: keeps what it is given, and ends with a code."""

    code = 0

    def __call__(self, process: ServerProcess) -> int:
        self.host, self.ways = process.host(), process
        self.port, self.app = process.sock.getsockname()[1], process.app(self.host)
        return self.code

    @property
    def state(self) -> ServerState:
        found: ServerState = self.app.state.server
        return found

    @property
    def guard(self) -> Guard:
        found = [m.kwargs["guard"] for m in self.app.user_middleware if "guard" in m.kwargs]
        assert isinstance(found[0], Guard)
        return found[0]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    found, interval = Ran(), sys.getswitchinterval()
    monkeypatch.setattr(ServerProcess, "run", lambda process: found(process))
    monkeypatch.delenv("MOEGRAPH_API_KEY", raising=False)
    yield found
    sys.setswitchinterval(interval)


def start(*args: str) -> Result:
    # click keeps the names of a command's option for help, whoever asks first
    given: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
    return CliRunner().invoke(serve, ["tiny", "--port", "0", *args], **given)


def failure(*args: str) -> MoegraphError:
    error = start(*args).exception
    assert isinstance(error, MoegraphError)
    return error


@pytest.mark.parametrize("display, n_opened", [("", 0), ("wayland-0", 1)])
def test_the_page_is_opened_when_it_is_there(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], display: str,
    n_opened: int,
) -> None:  # fmt: skip
    opened: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(webbrowser, "open", opened.put)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    if display:
        monkeypatch.setenv("WAYLAND_DISPLAY", display)
    assert start("--open").exit_code == 0
    ran.ways.ready()
    said = capsys.readouterr().err
    assert ("no display" in said) == (not n_opened)
    if n_opened:
        assert opened.get(timeout=PATIENCE_S) == said.split()[-1]
    assert start().exit_code == 0
    ran.ways.ready()
    assert opened.empty() and "no display" not in capsys.readouterr().err


def test_options_become_settings(ran: Ran) -> None:
    args = ("-c", "2048", "-np", "3", "-a", "qwen", "--temp", "0.5", "-n", "9", "-rea", "off")
    assert start(*args, "--timeout", "5", "--drain", "7", "--ignore-eos").exit_code == 0
    defaults = ran.state.find(None).defaults
    assert (defaults.sampling.temperature, defaults.max_tokens) == (0.5, 9)
    assert defaults.deadline_s == 5.0 and defaults.ignore_eos
    assert defaults.variables == {"enable_thinking": False}
    facts = ran.host.facts
    assert (facts.name, facts.n_ctx, facts.n_slots) == ("qwen", 2048, 3)
    assert facts.n_params > 1000 and ran.ways.drain_s == 7 and ran.port > 0


def test_keys_and_names_guard_the_server(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start().exit_code == 0 and not ran.guard.keys and not ran.guard.any_address
    assert ran.guard.admits_host("localhost:1") and not ran.guard.admits_host("a.example")
    assert start("--alias-host", "A.example", "--cors-origin", "https://b").exit_code == 0
    assert ran.guard.admits_host("a.example") and ran.guard.origins == ("https://b",)
    assert start("--cors-origin", "HTTP://B:80", "--cors-origin", "*").exit_code == 0
    assert [*ran.guard.origins] == ["http://b:80", "*"]
    monkeypatch.setenv("MOEGRAPH_API_KEY", "secret")
    assert start("--host", "0.0.0.0").exit_code == 0
    assert ran.guard.keys.owner(b"secret") and ran.guard.admits_host("10.0.0.1")
    assert not ran.state.cache_by_key
    assert start("--cache-by-key").exit_code == 0 and ran.state.cache_by_key
    assert start("--api-key", "other").exit_code == 0
    assert ran.guard.keys.owner(b"other") and not ran.guard.keys.owner(b"secret")


@pytest.mark.parametrize(
    "option, value",
    [
        ("--alias-host", "gpu.example:8080"), ("--alias-host", "http://gpu.example"),
    ],
)  # fmt: skip
def test_what_no_browser_sends_is_refused(option: str, value: str) -> None:
    error = failure(option, value)
    assert isinstance(error, ConfigError) and f"{option} '{value}'" in str(error)


def test_origins_are_as_browsers_send_them(ran: Ran) -> None:
    """A slash at the end, or a bare name, would never match."""
    given = ("--cors-origins", "https://Chat.Example/,http://localhost:3000")
    assert start(*given, "--cors-origin", "*").exit_code == 0
    assert ran.guard.origins == ("https://chat.example", "http://localhost:3000", "*")
    for wrong in ("chat.example", "https://a/b", "https://a b", "https://", ""):
        assert "write scheme and host" in start("--cors-origin", wrong).output


def test_other_machines_need_a_key(ran: Ran) -> None:
    assert "--insecure-no-key" in str(failure("--host", "0.0.0.0"))
    assert start("--host", "0.0.0.0", "--insecure-no-key").exit_code == 0
    assert "--insecure-no-key" in str(failure("--host", "127.evil.example"))
    assert start("--host", "127.0.0.2").exit_code == 0
    assert start("--host", "127.0.0.2").exit_code == 0


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "pydantic", "prometheus_client"])
def test_without_the_extra_one_line_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    error = failure()
    assert isinstance(error, ConfigError)
    assert "pip install 'moegraph[server]'" in str(error) and package in str(error)


def test_a_cache_by_key_needs_keys(ran: Ran) -> None:
    assert str(failure("--cache-by-key")) == (
        "--cache-by-key needs keys; give --api-key-file FILE or MOEGRAPH_API_KEY"
    )


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "there is no model in it"),
        ("a = 1", "a: a model is a table"),
        ("[a]\nctx-size = 8", r"\[a\]: no model"),
        ('[a]\nmodel = "tiny"\nport = 8', r"\[a\]: port: there is no such option"),
        ('[a]\nmodel = "tiny"\nmiss = "x"', r"\[a\]: miss: 'x' is not one of"),
        ('[a]\nmodel = "tiny"\nspec = "auto"\ndeterministic = true', r"\[a\]: spec auto"),
    ],
)
def test_a_wrong_file_of_presets_is_one_line(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    error = CliRunner().invoke(serve, ["--models", str(file)]).exception
    assert isinstance(error, ConfigError) and re.search(told, str(error))
    assert str(file) in str(error)


def test_several_models_have_names_and_settings_of_their_own(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        '[b]\nmodel = "tiny"\ntemp = 0.25\nctx-size = 512\nreasoning = "off"\n'
        '[a]\nmodel = "absent.gguf"\nparallel = 2\n'
    )
    args = ["--models", str(file), "--port", "0", "--top-k", "7", "-n", "5", "-c", "1024"]
    done = CliRunner().invoke(serve, args)
    assert done.exit_code == 0 and "warning: absent.gguf" in done.stderr
    b, a = ran.host.models
    assert [b.facts.name, a.facts.name] == ["b", "a"] and not ran.host.any_name
    assert (b.facts.n_ctx, b.facts.n_slots) == (1024, 4)  # what is typed counts more
    assert (b.defaults.sampling.temperature, b.defaults.sampling.top_k) == (0.25, 7)
    assert b.defaults.variables == {"enable_thinking": False} and a.defaults.variables == {}
    assert b.defaults.max_tokens == a.defaults.max_tokens == 5
    with pytest.raises(ApiError):
        ran.state.find("c")
    assert ran.state.find(None) is b and ran.state.find("a") is a


def test_a_model_and_several_exclude_one_another(ran: Ran, tmp_path: Path) -> None:
    assert "names all models" in start("--models", str(tmp_path)).output
    given: dict[str, Any] = {"default_map": {"models": str(tmp_path), "port": "0"}}
    assert CliRunner().invoke(serve, ["tiny"], **given).exit_code == 0  # a default gives way
    assert ran.host.any_name
    given = {"default_map": {"model": "tiny"}}
    error = CliRunner().invoke(serve, ["--models", str(tmp_path)], **given).exception
    assert "there is no model in it" in str(error)
