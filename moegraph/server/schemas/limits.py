"""Limits of what one client may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from ...units import KiB, MiB


@dataclass(frozen=True)
class Limits:
    """Upper bounds of a request; beyond them it is refused with status 400, or 413 for its body.

    body_bytes: of a body. held_bytes: of the bodies of all requests that are being served; then
    503. commas: in a body, which bound its values, as many small ones take 30 times the memory of
    their text. messages, tools, stops: how many. stop_chars: of a stop string. grammar_bytes: of a
    grammar, or of a schema as JSON. depth: of nested objects in schemas and in tools. choices: n.
    prompts: of one text completion. top_logprobs: per token. body_s: how long a body may take to
    arrive.
    """

    body_bytes: int = 64 * MiB
    held_bytes: int = 512 * MiB
    commas: int = 1 << 20
    messages: int = 10_000
    tools: int = 1024
    stops: int = 64
    stop_chars: int = 1024
    grammar_bytes: int = 256 * KiB
    depth: int = 64
    choices: int = 16
    prompts: int = 16
    top_logprobs: int = 20
    body_s: float = 60.0


LIMITS = Limits()


def json_depth(value: object) -> int:
    """Return how deep the objects and lists of a JSON value are nested; a number has depth 0."""
    depth, front = 0, [value]
    while front := [inner for one in front for inner in _inside(one)]:
        depth += 1
    return depth


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values()) or [None]
    if isinstance(value, list):
        return value or [None]
    return []
