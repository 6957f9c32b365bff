"""One setting as a user sees it, and whether a value suits it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeGuard

from .errors import ConfigError
from .units import parse_bytes

_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?|rpc://[!-+\--~]{1,1000}", re.ASCII)
_SHARE = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


@dataclass(frozen=True)
class Setting:
    """How one field of EngineConfig or SamplingParams looks to a user.

    kind: 'int', 'float', 'choice', 'flag', or one of the strings 'device', 'size' (of memory),
    'split' (shares or sizes) and 'path', of which the first three may be lists. minimum and maximum
    bound a number, both inclusive.
    flags: the option's spellings, long one last; empty for a field of the Python API only.
    group: the heading under which --help lists the option, one of GROUPS.
    """

    name: str
    flags: tuple[str, ...]
    help: str
    kind: str
    default: Any
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    metavar: str | None = None
    group: str = "Common"

    @property
    def allowed(self) -> str:
        """Return the allowed values in words, for error messages."""
        if self.choices:
            return ", ".join(self.choices)
        if self.minimum is not None:
            return f"{self.minimum} to {self.maximum}"
        return self.metavar or "on or off"


def setting(kind: str, default: Any, flags: tuple[str, ...], help: str, **limits: Any) -> Any:
    """Return a dataclass field that carries a Setting (less its name) as metadata.

    default: None if the engine determines the value when it loads.
    """
    return field(default=default, metadata={"kind": kind, "flags": flags, "help": help, **limits})


def settings_of(kind: type) -> tuple[Setting, ...]:
    """Return the Setting of every field of a dataclass that carries one, in order."""
    found = (f for f in fields(kind) if f.metadata)
    return tuple(Setting(name=f.name, default=f.default, **f.metadata) for f in found)


def problem_of(setting: Setting, value: object) -> str:
    """Return what is wrong with one value, or an empty string."""
    if value is None and setting.default is None:
        return ""
    where = f"{setting.name} is {value!r}"
    if setting.flags:
        where += f" ({'/'.join(setting.flags)})"
    if setting.kind == "flag":
        return "" if isinstance(value, bool) else f"{where}; expected true or false"
    if setting.kind in ("int", "float"):
        if not _is_number(value, setting.kind):
            kind = "an integer" if setting.kind == "int" else "a number"
            return f"{where}; expected {kind}, {setting.allowed}"
        low, high = setting.minimum or 0, setting.maximum or 0
        # nan is not in any range
        return "" if low <= value <= high else f"{where}; allowed: {setting.allowed}"
    if not isinstance(value, str):
        return f"{where}; expected a string, {setting.allowed}"
    return "" if _is_known(setting, value) else f"{where}; allowed: {setting.allowed}"


def _is_number(value: object, kind: str) -> TypeGuard[float]:
    numbers = Integral if kind == "int" else Real  # numpy's too
    return isinstance(value, numbers) and not isinstance(value, bool)


def _is_known(setting: Setting, value: str) -> bool:
    if setting.choices:
        return value in setting.choices
    if setting.kind == "device":
        return value == "auto" or all(_DEVICE.fullmatch(one) for one in value.split(","))
    if setting.kind == "size":
        return value == "auto" or all(map(is_size, value.split(",")))
    if setting.kind == "split":
        return value == "" or all(_SHARE.fullmatch(one) or is_size(one) for one in value.split(","))
    return "\0" not in value


def is_size(text: str) -> bool:
    """Return whether text is a memory size above 0, such as 8GiB; a bare number means GiB."""
    try:
        return parse_bytes(text, "g") > 0
    except ConfigError:
        return False
