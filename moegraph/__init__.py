"""Run Qwen3.5 and Qwen3.6 MoE models (GGUF) on GPUs too small for all their experts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import EngineConfig
    from .engine import Engine
    from .events import CancelToken, GenerationEvent
    from .modelfile import open_model
    from .sampling import SamplingParams
    from .text.chat import ChatTemplate, History, Message, ReasoningSplitter
    from .text.tokenizer import Tokenizer

__version__ = "0.1.0"
__all__ = [
    "CancelToken", "ChatTemplate", "Engine", "EngineConfig", "GenerationEvent", "History",
    "Message", "ReasoningSplitter", "SamplingParams", "Tokenizer", "__version__", "open_model",
]  # fmt: skip

# Where each public name is defined. Callers import it from here, so rooms can change.
_HOMES = {
    "CancelToken": ".events",
    "ChatTemplate": ".text.chat",
    "Engine": ".engine.engine",
    "EngineConfig": ".config",
    "GenerationEvent": ".events",
    "History": ".text.chat",
    "Message": ".text.chat",
    "ReasoningSplitter": ".text.chat",
    "SamplingParams": ".sampling",
    "Tokenizer": ".text.tokenizer",
    "open_model": ".modelfile",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that `import moegraph` stays fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'moegraph' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
