"""Ask a server by the official clients for Python: ask.py URL [PICTURE]."""

from __future__ import annotations

import asyncio
import base64
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

URL, PICTURE = sys.argv[1].rstrip("/"), Path(sys.argv[2]) if len(sys.argv) > 2 else None
ASK: Any = [{"role": "user", "content": "Hello"}]
CITY = {"type": "string", "enum": ["Rome", "Oslo"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
DATA = base64.b64encode(PICTURE.read_bytes()).decode() if PICTURE else ""


def told(what: str, value: Any) -> Any:
    """Print a result, which must be something."""
    print(f"{what}: {str(value)[:80]}")
    assert value, what
    return value


def with_picture(part: dict[str, Any], text: str = "text") -> Any:
    """Return a question about the picture."""
    return [{"role": "user", "content": [{"type": text, "text": "What is this?"}, part]}]


def ask_ollama(ollama: Any) -> None:
    """Ask by Ollama's client."""
    client, few = ollama.Client(URL), {"num_predict": 8}
    name = told("list", client.list().models[0].model)
    told("show", client.show(name).capabilities)
    told("chat", client.chat(name, ASK, options=few).eval_count)
    parts = list(client.chat(name, ASK, stream=True, options=few))
    assert parts[-1].done and not parts[0].done
    told(
        "generate", [one.response for one in client.generate(name, "Hi", stream=True, options=few)]
    )
    told("tools", client.chat(name, ASK, tools=[TOOL], options=few).done)
    told("format", client.chat(name, ASK, format=SCHEMA, options=few).message.content)
    if PICTURE:
        seen = [{**ASK[0], "images": [str(PICTURE)]}]
        told("picture", client.chat(name, seen, options=few).prompt_eval_count)

    async def stream() -> list[Any]:
        other = ollama.AsyncClient(URL)
        return [one async for one in await other.chat(name, ASK, stream=True, options=few)]

    told("asyncio", len(asyncio.run(stream())))


def ask_openai(openai: Any) -> None:
    """Ask by OpenAI's client."""
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any")
    name = told("list", client.models.list().data[0].id)
    given = {"model": name, "messages": ASK, "max_tokens": 8}
    chat, response = client.chat.completions.create, client.responses.create
    told("chat", chat(**given).usage.completion_tokens)
    told("stream", len(list(chat(**given, stream=True))))
    called = chat(**{**given, "max_tokens": 400}, tools=[TOOL], tool_choice="required")
    told("tools", called.choices[0].message.tool_calls[0].function)
    told(
        "text", client.completions.create(model=name, prompt="Hi", max_tokens=8).usage.total_tokens
    )
    told("responses", response(model=name, input="Hi", max_output_tokens=16).status)
    events = response(model=name, input="Hi", max_output_tokens=16, stream=True)
    told("events", [event.type for event in events][-1])
    if PICTURE:
        uri = f"data:image/png;base64,{DATA}"
        seen = with_picture({"type": "image_url", "image_url": {"url": uri}})
        told("picture", chat(**{**given, "messages": seen}).usage.prompt_tokens)
        seen = with_picture({"type": "input_image", "image_url": uri}, "input_text")
        told("picture", response(model=name, input=seen, max_output_tokens=16).usage.input_tokens)


def ask_anthropic(anthropic: Any) -> None:
    """Ask by Anthropic's client."""
    client = anthropic.Anthropic(base_url=URL, api_key="any")
    given = {"model": "any", "messages": ASK, "max_tokens": 8}
    told("list", client.models.list().data[0].id)
    told("chat", client.messages.create(**given).usage.output_tokens)
    with client.messages.stream(**given) as stream:
        told("stream", len(list(stream)))
    told("count", client.messages.count_tokens(model="any", messages=ASK).input_tokens)
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    call = {**given, "max_tokens": 400, "tools": tools, "tool_choice": {"type": "any"}}
    told("tools", [one for one in client.messages.create(**call).content if one.type == "tool_use"])
    if PICTURE:
        source = {"type": "base64", "media_type": "image/png", "data": DATA}
        seen = {**given, "messages": with_picture({"type": "image", "source": source})}
        told("picture", client.messages.create(**seen).usage.input_tokens)


for call in (ask_ollama, ask_openai, ask_anthropic):
    package = call.__name__.removeprefix("ask_")
    print(f"-- {package} {metadata.version(package)} for Python")
    call(import_module(package))
