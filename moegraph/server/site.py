"""All interfaces of the server in one application."""

from __future__ import annotations

from starlette.applications import Starlette

from . import absent, chatpage, info, openai_chat, openai_text, openapi, texts
from .anthropic import routes as anthropic
from .app import RouteTable, build_app
from .guards import Guard
from .responses import routes as responses
from .state import ServerState

# A new interface adds its table here; the first that fits a path writes its errors.
TABLES: tuple[RouteTable, ...] = (
    openai_chat.TABLE, openai_text.TABLE, responses.TABLE, anthropic.TABLE, info.TABLE, texts.TABLE,
    absent.TABLE, chatpage.TABLE,
)  # fmt: skip


def build_site(state: ServerState, guard: Guard) -> Starlette:
    """Return the application with every interface."""
    return build_app(state, (*TABLES, openapi.table(TABLES)), guard)
