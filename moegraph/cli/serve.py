"""`moegraph serve`: answer the clients of OpenAI's and Anthropic's interfaces."""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from ..config import EngineConfig
from ..errors import Cancelled, ConfigError
from ..sampling import SamplingParams
from ..units import MiB
from . import options, ui
from .command import Command
from .filesampling import recommended
from .serveoptions import server_options
from .target import target_argument

if TYPE_CHECKING:
    from ..arch import ModelFile
    from ..server.host import ModelHost
    from ..server.state import ServerState

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SWITCH_S = 0.5e-3
# Many clients come back to many conversations; the default of llama-server.
_CACHE_MIB = 8192


@dataclass(frozen=True)
class _Job:
    """A checked command line. chosen: sampling settings that the model file must not change."""

    target: str
    config: EngineConfig
    sampling: SamplingParams
    chosen: frozenset[str]
    max_tokens: int | None
    given: dict[str, Any]


@click.command(cls=Command)
@target_argument
@server_options
@options.engine_options_but(cache_ram=_CACHE_MIB, n_ctx=-1)
@options.sampling_options
def serve(target: str, **given: Any) -> None:
    """Serve the model TARGET, a GGUF file or a shipped model's name, over HTTP.

    Interfaces: OpenAI's chat completions, completions and responses, Anthropic's messages, and
    the paths of llama-server for health, properties, slots, metrics and tokens. When the model is
    loaded, a line on stderr ends with the address, and /health answers with status 200.

    SIGTERM and Ctrl-C let requests end for a while; a second one ends at once. SIGHUP reads the
    keys again. Sampling settings are what a request gets that does not set them; those that you do
    not give either are those that the model file recommends (general.sampling.*), or else the
    defaults below. Needs the extra `server`: pip install 'moegraph[server]'.

    \b
    Examples:
      moegraph serve Qwen3.6-35B-A3B-Q4_K_M.gguf -c 32768
      moegraph serve model.gguf --port 0 --alias qwen --sleep-idle 600
      MOEGRAPH_API_KEY=... moegraph serve model.gguf --host 0.0.0.0 --alias-host gpu.example
    """  # fmt: skip
    job = _check(click.get_current_context(), target, given)
    _require_extra()
    # By default, Python code on the event loop may hold the engine's thread up for 5 ms each time.
    sys.setswitchinterval(_SWITCH_S)
    from ..server.app import build_site
    from ..server.guards import VARIABLE, Guard, Keys, read_keys
    from ..server.host import keep_small
    from ..server.listening import listen, url_of
    from ..server.logs import start_logging
    from ..server.running import Ways, run

    def current_keys() -> list[str]:
        return read_keys(given["api_keys"], given["api_key_file"], os.environ.get(VARIABLE))

    keep_small()
    keys = Keys(current_keys())
    hosts = _hosts(given, bool(keys))
    if given["cache_by_key"] and not keys:
        raise ConfigError("--cache-by-key needs keys; give --api-key-file FILE or MOEGRAPH_API_KEY")
    guard = Guard(keys, hosts, not _is_local(given["host"]), given["cors_origins"])
    start_logging(given["log_format"], sys.stderr)
    header = options.open_header(job.target, job.config.device)
    with listen(given["host"], given["port"]) as sock:
        service = _Server(job, header)
        url = url_of(sock, given["host"])
        ways = Ways(
            ready=lambda: ui.note(
                f"{service.alias}, with a context of {service.n_ctx:,}, is served at {url}"
            ),
            reload=lambda: keys.replace(current_keys()),
            say=ui.note,
            drain_s=given["drain_s"],
        )
        code = run(lambda host: build_site(service.state(host), guard), service.host, sock, ways)
    if code == Cancelled.exit_code:
        raise Cancelled


def _check(ctx: click.Context, target: str, given: dict[str, Any]) -> _Job:
    """Check all that can be checked before the model file is opened."""
    config = replace(options.build_config(given), n_seq=given["n_parallel"], n_kv=-1).validate()
    return _Job(
        target, config, options.build_sampling(given), options.chosen_sampling(ctx),
        options.max_tokens(given["n_predict"]), given,
    )  # fmt: skip


def _require_extra() -> None:
    """Say in one line how to install what the server needs beyond the engine."""
    try:
        import prometheus_client  # noqa: F401
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the server needs the package {error.name}; pip install 'moegraph[server]'"
        ) from None


def _is_local(host: str) -> bool:
    """Return whether only this machine can reach a host; a name such as 127.example may be any."""
    return host in _LOOPBACK or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def _hosts(given: dict[str, Any], has_key: bool) -> frozenset[str]:
    """Return the names that the header Host may have."""
    host = given["host"]
    if not (has_key or _is_local(host) or given["insecure_no_key"]):
        raise ConfigError(
            f"--host {host} lets other machines use the server; give --api-key-file FILE or "
            "MOEGRAPH_API_KEY, or --insecure-no-key if everyone may"
        )
    for name in given["alias_hosts"]:
        if not re.fullmatch(r"[^/:\s]+|\[[^/\s]+\]", name):
            raise ConfigError(
                f"--alias-host {name!a}: give the name alone, without scheme, port or path"
            )
    names = [*_LOOPBACK, host, *(name.strip("[]") for name in given["alias_hosts"])]
    if not _is_local(host):
        names.append(socket.gethostname())
    return frozenset(name.lower() for name in names)


class _Server:
    """Makes what the server needs of the command line and of the model file."""

    def __init__(self, job: _Job, header: ModelFile) -> None:
        from .serving import ModelLoader

        given = job.given
        self.alias = given["alias"] or header.path.stem
        self._job = job
        self._load = ModelLoader(
            job.target, header, job.config, self.alias,
            template_file=given["chat_template_file"], n_waiting=given["n_waiting"],
            cache_dir=given["cache_dir"], cache_bytes=given["cache_disk"] * MiB,
        )  # fmt: skip
        options.require_vocabulary(header)
        sampling = job.sampling.validate(header.hparams.n_vocab)
        self._sampling, _ = recommended(sampling, header.kv, job.chosen, header.hparams.n_vocab)

    @property
    def n_ctx(self) -> int:
        """Return the positions that all requests share."""
        return self._load.n_ctx

    def host(self) -> ModelHost:
        """Return the host of the model, which loads it when it is started."""
        from ..server.host import ModelHost

        return ModelHost(self._load, self._load.facts, self._job.given["sleep_s"])

    def state(self, host: ModelHost) -> ServerState:
        """Return what the handlers of requests share."""
        from ..server.state import ServerState

        thinks = {"on": True, "off": False}.get(self._job.given["reasoning"])
        return ServerState(
            host,
            sampling=self._sampling,
            max_tokens=self._job.max_tokens,
            deadline_s=self._job.given["deadline_s"],
            cache_by_key=self._job.given["cache_by_key"],
            ignore_eos=self._job.given["ignore_eos"],
            variables={} if thinks is None else {"enable_thinking": thinks},
        )
