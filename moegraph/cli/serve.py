"""`moegraph serve`: answer the clients of OpenAI's and Anthropic's interfaces."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import settings as engine_settings
from ..errors import Cancelled, ConfigError, MoegraphError
from ..gguf.hubnames import model_name, models_among
from ..link.address import is_loopback
from ..sampling import settings as sampling_settings
from ..sources import Source, read_toml
from ..units import MiB
from . import models, options, ui
from .given import check_keys, find_values, settable, spellings
from .models import MODEL_TARGET, model_options, only_target, option_target, require_target
from .options import Command, Option, recommended
from .report import show_drafters

if TYPE_CHECKING:
    from ..arch import ModelFile
    from ..engine import Engine
    from ..engine.chat import ChatModel
    from ..sampling import SamplingParams
    from ..server.host import LoadedModel, Model, ModelFacts
    from ..server.schemas import Defaults

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*://[^/?#@\s]+)/?", re.I)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SWITCH_S = 0.5e-3
# Many clients come back to many conversations; the default of llama-server.
_CACHE_MIB = 8192


def _option(*flags: str, **described: Any) -> Callable[[Any], Any]:
    return click.option(*flags, cls=Option, group="Server", **described)


def _origins(_: click.Context, __: click.Parameter, texts: Sequence[str]) -> tuple[str, ...]:
    """Return origins as browsers send them: in small letters, without a slash at the end."""
    found = []
    for text in ",".join(texts).split(",") if texts else ():
        match = _ORIGIN.fullmatch(text)
        if match is None and text != "*":
            raise click.BadParameter(
                f"{text!r}; write scheme and host, such as https://chat.example or "
                "http://localhost:3000"
            )
        found.append(match[1].lower() if match else text)
    return tuple(found)


_OPTIONS = (
    _option(
        "--models", "--models-dir", "--models-preset", type=click.Path(path_type=Path),
        metavar="FILE|FOLDER",
        help="Serve several models instead of TARGET: the GGUF files of a folder, or those of a "
        "TOML file, with settings of their own (docs/server.md#several-models).",
    ),
    _option(
        "--host", default="127.0.0.1", metavar="NAME", help="Address to listen on.",
    ),
    _option(
        "--port", type=click.IntRange(0, 65535), default=8080, metavar="N",
        help="Port to listen on; 0 takes a free one.",
    ),
    _option("--open", "opens", is_flag=True, help="Open the chat page in the browser."),
    _option(
        "--queue", "n_waiting", type=click.IntRange(0, 65536), default=128, metavar="N",
        help="Most requests beyond those of -np; others are refused with status 429.",
    ),
    _option("-a", "--alias", metavar="NAME", help="Name of the model. Default: its file's name."),
    _option(
        "--api-key", "api_keys", multiple=True, metavar="KEY", hide_input=True,
        help="Serve only clients that send this key; repeatable, or several with commas. Other "
        "users of the machine can read command lines: better use a file, or MOEGRAPH_API_KEY.",
    ),
    _option(
        "--api-key-file", type=click.Path(path_type=Path), metavar="FILE",
        help="File of keys, one in each line. SIGHUP makes the server read it again.",
    ),
    _option(
        "--insecure-no-key", is_flag=True, help="Let other machines use the server without a key."
    ),
    _option(
        "--alias-host", "alias_hosts", multiple=True, metavar="NAME",
        help="Also answer requests whose Host is this name; repeatable.",
    ),
    _option(
        "--cors-origin", "--cors-origins", "cors_origins", multiple=True, callback=_origins,
        metavar="ORIGIN",
        help="Let pages of this origin use the server, such as https://chat.example, or * for "
        "all; several with commas, or repeat it.",
    ),
    _option(
        "--drain", "drain_s", type=click.FloatRange(0), default=30.0, metavar="SECONDS",
        help="How long requests may go on after SIGTERM or Ctrl-C.",
    ),
    _option(
        "--sleep-idle", "--sleep-idle-seconds", "sleep_s", type=click.FloatRange(0.001),
        metavar="SECONDS",
        help="Free the model's memory after this time without requests; the next one loads it "
        "again.",
    ),
    _option(
        "--cache-dir", type=click.Path(path_type=Path), metavar="DIR",
        help="Folder for beginnings of prompts that --cache-ram has no room for, and for all of "
        "them when the server ends. Files of other models or settings there are not used.",
    ),
    _option(
        "--cache-disk", type=click.IntRange(1, 1 << 24), default=16384, metavar="MIB",
        help="Most disk space of --cache-dir, in MiB.",
    ),
    _option(
        "--slot-save-path", type=click.Path(path_type=Path), metavar="DIR",
        help="Folder in which POST /slots/ID?action=save|restore keeps what slots hold.",
    ),
    _option(
        "--cache-by-key", is_flag=True,
        help="Let each API key go on only from beginnings of prompts that it has sent itself.",
    ),
    _option(
        "--log-format", type=click.Choice(["text", "json", "off"]), default="text",
        help="Form of the log on stderr: a line for each request, without prompts and answers.",
    ),
)  # fmt: skip


# What may differ from model to model, beside settings of the engine and of sampling.
_OF_MODEL = (
    _option(
        "-np", "--parallel", "n_parallel", type=click.IntRange(1, 256), default=4, metavar="N",
        help="Most requests that are computed at a time; others wait. They share the context: "
        "one request may use all of it.",
    ),
    _option(
        "-n", "--predict", "--n-predict", "n_predict", type=click.INT, default=-1, metavar="N",
        help="Maximum number of tokens of an answer, if a request says nothing. -1: no limit.",
    ),
    _option(*models.MMPROJ, **models.MMPROJ_SAYS),
    _option(*models.NO_MMPROJ, **models.NO_MMPROJ_SAYS),
    _option(
        "--media-path", type=click.Path(path_type=Path), metavar="DIR",
        help="Let requests name pictures in DIR, as file:// addresses.",
    ),
    _option(
        "--chat-template-file", type=click.Path(path_type=Path), metavar="FILE",
        help="Use this Jinja template instead of the model's own.",
    ),
    _option(
        "-rea", "--reasoning", type=click.Choice(["on", "off", "auto"]), default="auto",
        help="Ask for reasoning, or not, if a request says nothing. auto: the template's default.",
    ),
    _option(
        "--timeout", "deadline_s", type=click.FloatRange(0.001), metavar="SECONDS",
        help="End each answer after this time. Default: never.",
    ),
)  # fmt: skip


@click.command(cls=Command)
@click.argument("target", required=False, type=MODEL_TARGET, metavar="TARGET")
@model_options
@options.with_options((*_OPTIONS, *_OF_MODEL))
@options.engine_options(cache_ram=_CACHE_MIB, n_ctx=-1)
@options.sampling_options
def serve(target: str | None, **given: Any) -> None:
    """Serve the model TARGET, a GGUF file or a shipped model's name, over HTTP.

    Interfaces: OpenAI's chat completions, completions and responses, Anthropic's messages, and
    the paths of llama-server for health, properties, slots, metrics and tokens. When the model is
    loaded, a line on stderr ends with the address, and /health answers with status 200.

    SIGTERM and Ctrl-C let requests end for a while; a second one ends at once. SIGHUP reads the
    keys again. Sampling settings are what a request gets that does not set them; those that you do
    not give either are those that the model file recommends (general.sampling.*), or else the
    defaults. Needs the extra `server`: pip install 'moegraph[server]'.

    \b
    Examples:
      moegraph serve Qwen3.6-35B-A3B-Q4_K_M.gguf -c 32768
      moegraph serve --models models.toml --port 0 --sleep-idle 600
      MOEGRAPH_API_KEY=... moegraph serve model.gguf --host 0.0.0.0 --alias-host gpu.example
    """  # fmt: skip
    chosen = _chosen(target, given)
    _require_extra()
    # By default, Python code on the event loop may hold the engine's thread up for 5 ms each time.
    sys.setswitchinterval(_SWITCH_S)
    from ..server.app import build_site
    from ..server.guards import VARIABLE, Guard, Keys, read_keys
    from ..server.host import ModelHost, keep_small
    from ..server.logs import start_logging
    from ..server.running import ServerProcess, listen, url_of
    from ..server.state import ServerState

    def current_keys() -> list[str]:
        keys = given["api_keys"]
        if options.is_typed("api_keys"):
            return read_keys(keys, given["api_key_file"], None)
        return read_keys((), given["api_key_file"], ",".join(keys) or os.environ.get(VARIABLE))

    keep_small()
    keys = Keys(current_keys())
    hosts = _hosts(given, bool(keys))
    if given["cache_by_key"] and not keys:
        raise ConfigError("--cache-by-key needs keys; give --api-key-file FILE or MOEGRAPH_API_KEY")
    guard = Guard(keys, hosts, not is_loopback(given["host"]), given["cors_origins"])
    start_logging(given["log_format"], sys.stderr)
    is_one = not chosen[0].is_listed
    served = [one.describe(is_one) for one in chosen]
    with listen(given["host"], given["port"]) as sock:
        url = url_of(sock, given["host"])
        process = ServerProcess(
            app=lambda host: build_site(ServerState(host, given["cache_by_key"]), guard),
            host=lambda: ModelHost(
                served, given["sleep_s"], is_one, given["n_parallel"] + given["n_waiting"]
            ),
            sock=sock,
            ready=lambda: _tell(_subject(served, is_one), url, given["opens"]),
            reload=lambda: keys.replace(current_keys()),
            say=ui.note,
            drain_s=given["drain_s"],
        )
        code = process.run()
    if code == Cancelled.exit_code:
        raise Cancelled


def _tell(subject: str, url: str, opens: bool) -> None:
    """Say that requests are answered, and open the page in a browser that has a window."""
    ui.note(f"{subject} served at {url}")
    if opens and {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"} & os.environ.keys():
        import webbrowser  # which may take its time

        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    elif opens:
        ui.note("--open: there is no display to open the page on")


def _subject(served: Sequence[Model], is_one: bool) -> str:
    if not is_one:
        return "1 model is" if len(served) == 1 else f"{len(served)} models are"
    facts = served[0].facts
    return f"{facts.name}, with a context of {facts.n_ctx:,}, is"


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


def _hosts(given: dict[str, Any], has_key: bool) -> frozenset[str]:
    """Return the names that the header Host may have."""
    host = given["host"]
    if not (has_key or is_loopback(host) or given["insecure_no_key"]):
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
    if not is_loopback(host):
        names.append(socket.gethostname())
    return frozenset(name.lower() for name in names)


def _chosen(target: str | None, given: dict[str, Any]) -> list[_Model]:
    """Return the model of the command line, or the models of --models."""
    named, place = option_target(given, target), given["models"]
    is_typed = bool(target) or options.is_typed("model") or options.is_typed("hf_repo")
    if place is None or (is_typed and not options.is_typed("models")):
        return [_Model(require_target(target, named), given, given["alias"] or "")]
    if is_typed or options.is_typed("alias"):
        raise click.UsageError("--models names all models; give no TARGET, -m, -hf or --alias")
    found = [_preset(place, name, table, given) for name, table in _tables(place).items()]
    if not found:
        raise ConfigError(f"{place}: there is no model in it")
    return found


def _tables(place: Path) -> dict[str, Any]:
    """Return the settings of the models of a folder or of a TOML file, by their names."""
    if not place.is_dir():
        return read_toml(place, is_needed=True)
    files = models_among(str(path.relative_to(place)) for path in place.rglob("*.gguf"))
    return {model_name(file): {"model": str(place / file)} for file in files}


def _preset(place: Path, name: str, table: object, given: dict[str, Any]) -> _Model:
    """Return a model; its own settings count more than others, but for those that were typed."""
    where = f"{place}: [{name}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{place}: {name}: a model is a table, [NAME], with model = FILE in it")
    context = click.get_current_context()
    server = {p.name for p in options.with_options(_OPTIONS)(click.Command("server")).params}
    known = {o.name: o for o in settable(context.command) if o.name not in server}
    source = Source.of(where, table)
    check_keys([source], {"": {key for option in known.values() for key in spellings(option)}})
    values = find_values(context.command, context, [source])
    own = {n: known[n].process_value(context, found.value) for n, found in values.items()}
    target = only_target(own.get("model"), own.get("hf_repo"))
    if target is None:
        raise ConfigError(f"{where}: no model; give model = FILE, or hf-repo = OWNER/REPO")
    if (beside := place.parent / target).exists() and not place.is_dir():
        target = str(beside)
    own = {n: value for n, value in own.items() if not options.is_typed(n)}
    try:
        return _Model(target, {**given, **own}, name, own)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


class _Model:
    """A model of a server. `open` and `load` run each time it is wanted in memory, on one thread.

    served: what the server knows of it, from `describe` on.
    """

    served: Model

    def __init__(
        self, target: str, given: dict[str, Any], name: str, own: Collection[str] | None = None
    ) -> None:
        """Check all that can be checked before the model file is opened.

        own: settings that are given for this model, if it is one of --models.
        """
        config = replace(options.build_config(given), n_seq=given["n_parallel"], n_kv=-1)
        self._target, self._config, self._given = target, config.validate(), given
        self._max_tokens = options.max_tokens(given["n_predict"])
        self._sampling, self._name = options.build_sampling(given), name
        given_here = {s.name for s in sampling_settings() if options.is_given(s.name)}
        self._kept, self.is_listed = given_here.union(own or ()), own is not None
        self._warned = set[str]()
        self._header: ModelFile | None = None
        self._is_new = True

    def describe(self, is_one: bool) -> Model:
        """Return the model; one of several whose file is wrong is only warned of."""
        from ..server.host import Model, ModelFacts

        facts, defaults = ModelFacts(self._name), self._defaults(self._sampling)
        self.served = Model(self.load, facts, defaults, self.open, self._target)
        try:
            self.open()
        except MoegraphError as error:
            if is_one:
                raise
            ui.note(f"warning: {error}")
        if self._header is not None and not is_one:
            self._header.close()
            self._header = None
        return self.served

    def _defaults(self, sampling: SamplingParams) -> Defaults:
        from ..server.schemas import Defaults

        given = self._given
        return Defaults(
            sampling=sampling, max_tokens=self._max_tokens, deadline_s=given["deadline_s"],
            ignore_eos=given["ignore_eos"], variables=models.template_variables(given),
        )  # fmt: skip

    def open(self) -> None:
        """Open the file, which the next `load` takes over."""
        from ..server.host import ModelFacts

        self._header = header = models.open_header(self._target, self._config.device)
        hp = header.hparams
        models.require_vocabulary(header)
        sampling, _ = recommended(self._sampling, header.kv, hp.n_vocab, self._warned, self._kept)
        self.served.defaults, self.served.path = self._defaults(sampling), str(header.path)
        self.served.facts = ModelFacts(
            self._name or header.path.stem,
            n_ctx=self._config.ctx_within(hp.n_ctx_train),
            n_ctx_train=hp.n_ctx_train,
            n_vocab=hp.n_vocab,
            n_embd=hp.n_embd,
            n_params=sum(prod(tensor.ne) for tensor in header.tensors.values()),
            n_bytes=header.n_bytes,
            n_slots=self._config.n_seq,
            created=int(header.path.stat().st_mtime),
            family=str(header.kv["general.architecture"]),
        )

    def load(self) -> LoadedModel:
        """Load the model and start its service."""
        from ..engine.chat import ChatModel
        from ..engine.service import Service
        from ..server.host import LoadedModel

        given, config = self._given, self._config
        if self._header is None:
            self.open()
        header, self._header = self._header, None
        assert header is not None
        with ExitStack() as stack:
            template = models.open_template(given, stack)
            engine = stack.enter_context(
                models.load_engine(header, config, warned=self._warned, text=True)
            )
            if given["cache_dir"] or given["slot_save_path"]:
                size = given["cache_disk"] * MiB
                engine.keep_prefixes(given["cache_dir"], size, given["slot_save_path"])
                models.show_messages(engine)
            pictures = models.open_pictures(given, self._target, engine)
            chat = stack.enter_context(ChatModel.of(engine, template, pictures))
            ui.warn_once(chat.warnings, self._warned)
            if self._is_new:
                show_drafters(engine)
            self._is_new = False
            service = Service(
                engine, n_waiting=given["n_waiting"], say=lambda line: ui.note(f"note: {line}")
            )
            service.start()
            kept = stack.pop_all()

        def close() -> None:
            service.close()
            models.show_messages(engine)
            models.save_profile(engine)
            kept.close()

        return LoadedModel(service, chat, self._known(engine, chat), close)

    def _known(self, engine: Engine, chat: ChatModel) -> ModelFacts:
        """Return the facts of the loaded model; no setting tells a path of this machine."""
        from ..engine.chat import special_tokens

        tokens = special_tokens(engine.tokenizer)
        values = {**vars(engine.config), **engine.threads.report()}
        return replace(
            self.served.facts,
            n_ctx=engine.n_ctx,
            device=engine.device_name,
            bos_token=tokens.get("bos_token", ""),
            eos_token=tokens.get("eos_token", ""),
            template=chat.template.source,
            reads_pictures=chat.pictures is not None,
            fills_gaps=engine.tokenizer.fim("mid") is not None,
            settings={s.name: values[s.name] for s in engine_settings() if s.kind != "path"},
        )
