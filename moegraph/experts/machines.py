"""Machines to predict for: measured, computed from data sheets, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..units import GiB
from .cost import LAUNCH_S, Curve, Machine

_MAX_FILE = 64 * 1024
_MAX_POINTS = 64
# Of the model that all these times are for, a 35B-A3B: layers, bytes of an expert, bytes that a
# token reads, parameters that it uses, kernels.
_MODEL = (40, 1_900_000, 2_611_000_000, 2_953_000_000, 430)
# Share of its memory's bandwidth at which a card reads weights: the H200's (4,900 GB/s) with
# llama.cpp's kernels for one row. With ours it has 0.8, but they were measured on no other card.
_READING = 0.674
# Share of the memory it is sold with that a card has at least.
CARD_SHARE = 0.97


def _line(first: float, slope: float) -> Curve:
    """Return a curve of `first` for one expert and `slope` for each further one."""
    return Curve(((1, first), (2, first + slope)))


def card_machine(
    name: str, about: str, memory_rate: float, link_rate: float, arithmetic: float
) -> Machine:
    """Return the times of a card, computed, in a machine with DDR5 memory at 60 GB/s.

    Launches are as on the H200. Prompts are guessed from what users of a card with 936 GB/s report,
    and scaled by the arithmetic.

    memory_rate, link_rate: bytes a second out of the card's memory, and that a copy from the host
    reaches. arithmetic: 8-bit operations a second.
    """
    _, expert_bytes, token_bytes, _, n_launches = _MODEL
    copy, slower = expert_bytes / link_rate, 284e12 / arithmetic
    whole = n_launches * LAUNCH_S + token_bytes / (_READING * memory_rate)
    prompt = ((32, 27e-3), (512, 190e-3), (2048, 680e-3))
    return Machine(
        name, *_MODEL, whole=whole, host_layer=8e-6, fixed=45e-6,
        overlap=28e6 / memory_rate, stream=_line(10e-6 + copy, copy), cpu=_line(62e-6, 32e-6),
        fetch_layer=1.9e6 / memory_rate, fetch=_line(10e-6 + copy, copy), about=about,
        prompt=Curve(tuple((n, seconds * slower) for n, seconds in prompt)),
    )  # fmt: skip


# Of the usual cards of each size the slower ones, by size: GiB, GB/s of memory, link, GB/s of
# copies, and 8-bit TOPS.
_SHEETS = {
    "rtx2060": (6, 336, "PCIe 3.0 x16", 12.6, 103),
    "rtx4060": (8, 272, "PCIe 4.0 x8", 12.6, 121),
    "rtx3060": (12, 360, "PCIe 4.0", 25.0, 102),
    "rtx4060ti": (16, 288, "PCIe 4.0 x8", 12.6, 176),
    "desktop": (24, 936, "PCIe 4.0", 25.0, 284),
}


def _of_sheet(name: str) -> Machine:
    """Return the times of a card by its data sheet."""
    gib, memory, link, copies, tops = _SHEETS[name]
    about = f"{gib} GB card with {memory} GB/s, {link}, DDR5; computed from data sheets"
    return card_machine(name, about, memory * 1e9, copies * 1e9, tops * 1e12)


# Fitted to speeds measured with 16 threads of a Xeon, when `whole` was 2.33 ms: within 3 % where
# graphs fetched the missing experts, 10 % where the host handled them. Those of today: within 6 %.
_H200 = Machine(
    "h200", *_MODEL, whole=1.672e-3, host_layer=10e-6, fixed=53e-6, overlap=0.0,
    stream=Curve(((1, 45e-6), (2, 82e-6), (8, 306e-6))),
    cpu=Curve(((1, 43e-6), (2, 63e-6), (4, 107e-6), (8, 189e-6))),
    fetch_layer=0.9e-6, fetch=Curve(((1, 43e-6), (2, 81e-6), (8, 300e-6))),
    about="H200 and 16 threads of a Xeon, measured",
    prompt=Curve((
        (32, 9e-3), (64, 16.2e-3), (128, 21.3e-3), (256, 26.5e-3), (512, 38.3e-3),
        (1024, 62.6e-3), (2048, 123e-3),
    )),
)  # fmt: skip
MACHINES = {"h200": _H200, **{name: _of_sheet(name) for name in _SHEETS}}


def usual_card(n_bytes: int) -> Machine:
    """Return the machine with the smallest usual card that has so much memory, or the largest."""
    fitting = (name for name, sheet in _SHEETS.items() if n_bytes * CARD_SHARE <= sheet[0] * GiB)
    return MACHINES[next(fitting, "desktop")]


def find_machine(name: str) -> Machine:
    """Return a machine by name, or from a JSON file."""
    if name in MACHINES:
        return MACHINES[name]
    try:
        with open(name, "rb") as file:
            data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise RequestError(
            f"{name}: not a built-in machine ({', '.join(MACHINES)}), and cannot read it as a "
            f"file: {error.strerror}"
        ) from error
    try:
        content = json.loads(data[:_MAX_FILE])
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise RequestError(f"{name}: not a machine file: it has no JSON object")
    return _machine(name, content)


def machine_fields(machine: Machine) -> dict[str, Any]:
    """Return the fields of a machine's JSON file, times in microseconds."""
    sizes = {name: getattr(machine, name) for name in _SIZES}
    times = {key: _us(getattr(machine, name)) for key, name in _TIMES.items()}
    curves = {
        key: [[n, _us(s)] for n, s in getattr(machine, name).points]
        for key, name in _CURVES.items()
        if getattr(machine, name) is not None
    }
    return {"name": machine.name, "about": machine.about, **sizes, **times, **curves}


def _us(seconds: float) -> float:
    """Return microseconds, rounded so that 8e-6 s becomes 8.0."""
    return round(seconds * 1e6, 6)


_SIZES = ("n_layer", "expert_bytes", "token_bytes", "token_params", "token_launches")
# Field of the file -> attribute of Machine.
_TIMES = {
    "whole_us": "whole", "host_layer_us": "host_layer", "fetch_layer_us": "fetch_layer",
    "fixed_us": "fixed", "overlap_us": "overlap",
}  # fmt: skip
_CURVES = {"stream_us": "stream", "cpu_us": "cpu", "fetch_us": "fetch", "prompt_us": "prompt"}
# For people; nothing is computed from them.
_WORDS = ("name", "about", "measured")


def _machine(path: str, content: dict[str, Any]) -> Machine:
    def wrong(field: str, expected: str) -> RequestError:
        return RequestError(f"{path}: {field} is {content.get(field)!r}; expected {expected}")

    known = {*_WORDS, *_SIZES, *_TIMES, *_CURVES}
    unknown = sorted(set(content) - known)
    if unknown:
        listed = ", ".join(sorted(known))
        raise RequestError(f"{path}: unknown field {unknown[0]!r}; known: {listed}")
    name = content.get("name", Path(path).stem)
    sizes = {field: content.get(field) for field in _SIZES}
    for field, size in sizes.items():
        if type(size) is not int or size < 1:
            raise wrong(field, "a positive integer")
    texts = {"name": name, "about": content.get("about", "")}
    for field, text in texts.items():
        if not isinstance(text, str) or len(text) > 200:
            raise wrong(field, "a short text")
    times = {}
    for field, attribute in _TIMES.items():
        value = content.get(field, 0.0)
        if not _is_time(value) or (field == "whole_us" and not value):
            raise wrong(field, "microseconds")
        times[attribute] = value / 1e6
    curves: dict[str, Curve] = {}
    for field, attribute in _CURVES.items():
        points: Any = content.get(field)
        if field == "prompt_us" and field not in content:
            continue  # the speed of prompts is not predicted
        if field == "fetch_us" and field not in content:
            curves[attribute] = curves["stream"]  # a fetch copies the same bytes over the same link
            continue
        if not _is_curve(points):
            raise wrong(field, "[[n, microseconds], ...], both rising")
        curves[attribute] = Curve(tuple((n, us / 1e6) for n, us in points))
    fields: dict[str, Any] = {**texts, **sizes, **times, **curves}
    return Machine(**fields)


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12


def _is_curve(points: Any) -> bool:
    """Return whether points is a list of [n, microseconds] that a Curve accepts."""
    if not isinstance(points, list) or not 1 <= len(points) <= _MAX_POINTS:
        return False
    if not all(isinstance(p, list) and len(p) == 2 and all(map(_is_time, p)) for p in points):
        return False
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in zip(points, points[1:]))
    return rising and points[0][0] >= 1 and points[0][1] > 0
