"""A request of the Responses interface, as a request of a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...engine.chat import ChatRequest, Format
from ..limits import LIMITS
from ..schemas.fields import Defaults
from ..schemas.formats import schema_format
from ..schemas.parts import read, refuse
from ..schemas.responses import ItemReference, ResponsesBody, TextFormat
from ..thinking import template_variables
from .items import Conversation
from .store import Item, ResponseStore
from .tools import Tools, read_choice, read_tools

# What `include` must name for log probabilities to come.
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True)
class ReadRequest:
    """A request that has been understood.

    chat: for the model. tools: their names for the way back. items: of the
    input, as a store keeps them.
    """

    chat: ChatRequest
    tools: Tools
    items: Sequence[Item]


def read_request(
    body: ResponsesBody, store: ResponseStore, defaults: Defaults, name: str = ""
) -> ReadRequest:
    """Return what a request asks for.

    store: has the responses before this one. name: for logs.

    Raises:
        ApiError: something in it is malformed or not supported.
    """
    _refuse_unsupported(body)
    tools = read_tools(body.tools or ())
    allowed, choice = read_choice(body.tool_choice, tools)
    items = _input_items(body.input, store.item)
    conversation = Conversation()
    if body.instructions:
        conversation.messages.append({"role": "system", "content": body.instructions})
    for item in store.items(body.previous_response_id) if body.previous_response_id else ():
        conversation.add(item, "previous_response_id")
    for at, item in enumerate(items):
        conversation.add(item, f"input[{at}]")
    chat = ChatRequest(
        messages=conversation.messages,
        tools=allowed.functions,
        inputs=allowed.inputs,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        format=_format(body.text.format if body.text else None),
        variables={
            **defaults.variables,
            **template_variables(body.reasoning.effort if body.reasoning else None),
        },
        sampling=body.sampling(defaults.sampling),
        max_tokens=body.max_output_tokens or defaults.max_tokens,
        stop=body.stops,
        ignore_eos=body.ignores_eos(defaults),
        n_logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None,
        deadline_s=defaults.deadline_s,
        name=name,
    )
    return ReadRequest(chat, tools, items)


def _input_items(given: str | list[Item], find: Callable[[str], Item | None]) -> list[Item]:
    """Return the items of an input, those of the store in place of references to them."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if len(given) > LIMITS.messages:
        refuse("input", f"{len(given)} items; at most {LIMITS.messages} are read")
    return [_referenced(item, find, f"input[{at}]") for at, item in enumerate(given)]


def _referenced(item: Item, find: Callable[[str], Item | None], where: str) -> Item:
    # a reference may leave its type out: it then has an id and nothing else
    if item.get("type") != "item_reference" and item.keys() != {"id"}:
        return item
    reference = read(ItemReference, item, where)
    found = find(reference.id)
    if found is None:
        refuse(f"{where}.id", f"there is no item {reference.id[:80]!a}; send the item itself")
    return found


def _refuse_unsupported(body: ResponsesBody) -> None:
    if body.background:
        refuse("background", "responses in the background are not supported; use stream")
    if body.conversation is not None:
        refuse("conversation", "conversations are not kept; use previous_response_id")
    if body.prompt is not None:
        refuse("prompt", "stored prompts are not supported; send instructions and input")


def _format(asked: TextFormat | None) -> Format | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return Format("json_object")
    if asked.schema_ is None:
        refuse("text.format.schema", "this field is required")
    return schema_format(asked.schema_, asked.strict is True)
