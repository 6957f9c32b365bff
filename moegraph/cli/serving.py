"""Loads the model of `moegraph serve`, at the start and after each sleep."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..config import settings as engine_settings
from ..engine.chat import ChatModel, special_tokens
from ..engine.service import Service
from ..server.backend import LoadedModel, ModelFacts
from ..text.chat import ChatTemplate
from . import options, ui
from .drafting import show_drafters

if TYPE_CHECKING:
    from ..arch import ModelFile
    from ..engine import Engine


def _settings(engine: Engine) -> dict[str, Any]:
    """Return the settings in effect that hold no path of this machine."""
    values = {**vars(engine.config), **engine.threads.report()}
    return {s.name: values[s.name] for s in engine_settings() if s.kind != "path"}


class ModelLoader:
    """Loads a model, starts its service, and returns both; call it on one thread at a time.

    header: the file, opened; the first call takes it over.
    facts: what is known without it. n_ctx: positions of the context, once it is loaded.
    """

    def __init__(
        self, target: str, header: ModelFile, config: EngineConfig, alias: str, *,
        template_file: Path | None, n_waiting: int, cache_dir: Path | None, cache_bytes: int,
    ) -> None:  # fmt: skip
        self._target = target
        self._header: ModelFile | None = header
        self._config = config
        self._template_file = template_file
        self._n_waiting = n_waiting
        self._cache_dir, self._cache_bytes = cache_dir, cache_bytes
        self._warned: set[str] = set()
        self.n_ctx, hp = 0, header.hparams
        self.facts = ModelFacts(
            alias,
            n_ctx=config.ctx_within(hp.n_ctx_train),
            n_ctx_train=hp.n_ctx_train,
            n_vocab=hp.n_vocab,
            n_embd=hp.n_embd,
            n_params=sum(prod(tensor.ne) for tensor in header.tensors.values()),
            n_bytes=header.n_bytes,
            n_slots=config.n_seq,
            created=int(header.path.stat().st_mtime),
        )

    def __call__(self) -> LoadedModel:
        """Load the model."""
        header, self._header = self._header, None
        is_first = header is not None
        if header is None:
            header = options.open_header(self._target, self._config.device)
        with ExitStack() as stack:
            file = self._template_file
            template = stack.enter_context(ChatTemplate.from_file(file)) if file else None
            engine = stack.enter_context(
                options.load_engine(header, self._config, warned=self._warned, text=True)
            )
            if self._cache_dir:
                engine.keep_prefixes(self._cache_dir, self._cache_bytes)
                options.show_messages(engine)
            chat = stack.enter_context(ChatModel.of(engine, template))
            for warning in chat.warnings:
                if warning not in self._warned:
                    ui.note(f"warning: {warning}")
                    self._warned.add(warning)
            if is_first:
                show_drafters(engine)
            service = Service(
                engine, n_waiting=self._n_waiting, say=lambda line: ui.note(f"note: {line}")
            )
            service.start()
            kept = stack.pop_all()

        def close() -> None:
            service.close()
            options.show_messages(engine)
            options.save_profile(engine)
            kept.close()

        self.n_ctx = engine.n_ctx
        return LoadedModel(service, chat, self._known(engine, chat), close)

    def _known(self, engine: Engine, chat: ChatModel) -> ModelFacts:
        tokens = special_tokens(engine.tokenizer)
        return ModelFacts(
            **{
                **vars(self.facts),
                "n_ctx": engine.n_ctx,
                "device": engine.device_name,
                "bos_token": tokens.get("bos_token", ""),
                "eos_token": tokens.get("eos_token", ""),
                "template": chat.template.source,
                "settings": _settings(engine),
            }
        )
