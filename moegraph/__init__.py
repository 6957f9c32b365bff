"""Run Mixture-of-Experts models (GGUF) on GPUs too small for all their experts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .arch import open_model
    from .config import EngineConfig
    from .engine import Engine
    from .engine.asyncengine import AsyncEngine
    from .engine.chat import ChatRequest, Format
    from .engine.chatanswer import ChatAnswer
    from .events import CancelToken, GenerationEvent
    from .sampling import SamplingParams
    from .text.chat.answer import ReasoningSplitter
    from .text.chat.messages import History, Message
    from .text.chat.parts import (
        CallArguments,
        CallBegin,
        CallEnd,
        ContentPart,
        ReasoningPart,
        Reply,
        ToolCall,
    )
    from .text.chat.template import ChatTemplate
    from .text.tokenizer import Tokenizer

__version__ = "0.1.0"
__all__ = [
    "AsyncEngine", "CallArguments", "CallBegin", "CallEnd", "CancelToken", "ChatAnswer",
    "ChatRequest", "ChatTemplate", "ContentPart", "Engine", "EngineConfig", "Format",
    "GenerationEvent", "History", "Message", "ReasoningPart", "ReasoningSplitter", "Reply",
    "SamplingParams", "Tokenizer", "ToolCall", "__version__", "open_model",
]  # fmt: skip

# Where each public name is defined. Callers import it from here, so rooms can change.
_HOMES = {
    name: home
    for home, names in {
        ".arch": "open_model",
        ".config": "EngineConfig",
        ".engine.asyncengine": "AsyncEngine",
        ".engine.chat": "ChatRequest Format",
        ".engine.chatanswer": "ChatAnswer",
        ".engine.engine": "Engine",
        ".events": "CancelToken GenerationEvent",
        ".sampling": "SamplingParams",
        ".text.chat.answer": "ReasoningSplitter",
        ".text.chat.messages": "History Message",
        ".text.chat.parts": "CallArguments CallBegin CallEnd ContentPart ReasoningPart Reply "
        "ToolCall",
        ".text.chat.template": "ChatTemplate",
        ".text.tokenizer": "Tokenizer",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that `import moegraph` stays fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'moegraph' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
