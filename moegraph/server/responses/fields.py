"""Fields of a response object that repeat what was asked for."""

from __future__ import annotations

from typing import Any

from ...sampling import SamplingParams
from ..schemas.responses import ResponsesBody


def response_fields(
    body: ResponsesBody, sampling: SamplingParams, model: str, created_at: int
) -> dict[str, Any]:
    """Return the fields that do not change while the response is made.

    sampling: that the answer is drawn with. created_at: seconds since the epoch.
    """
    given = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {
        "created_at": created_at,
        "model": model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None, **(given.get("reasoning") or {})},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **(given.get("text") or {})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        # a prompt that is too long is refused; nothing is ever left out of it
        "truncation": "disabled",
        "user": body.user,
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False, **tool}
