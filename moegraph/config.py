"""Engine settings: one frozen dataclass from which CLI options, docs rows and defaults all come."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import ConfigError
from .threads import MAX_THREADS
from .units import parse_bytes

KV_TYPES = ("f16", "q8_0", "q4_0")
EXPERT_POLICIES = ("lru", "lfu", "adaptive", "static")
# The headings of --help, in order.
GROUPS = ("Common", "Sampling", "Context", "Expert", "Diagnostic")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?", re.ASCII)


@dataclass(frozen=True)
class Setting:
    """How one field of EngineConfig or SamplingParams looks to a user.

    kind: 'int', 'float', 'choice', 'flag', or one of the strings 'device', 'size' (of memory) and
    'path'. minimum and maximum bound a number, both inclusive.
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
        """Return the allowed values in words, for messages and the docs table."""
        if self.choices:
            return ", ".join(self.choices)
        if self.minimum is not None:
            return f"{self.minimum} to {self.maximum}"
        return self.metavar or "on or off"


def _setting(kind: str, default: Any, flags: tuple[str, ...], help: str, **limits: Any) -> Any:
    """Return a dataclass field that carries a Setting (less its name) as metadata.

    default: None where it is found when the engine is loaded.
    """
    meta = {"kind": kind, "flags": flags, "help": help, **limits}
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs a model. Immutable; `validate()` checks every field."""

    device: str = _setting(
        "device",
        "auto",
        ("--device",),
        "Device that computes: auto takes the first CUDA device.",
        metavar="auto|cpu|cuda[:N]",
    )
    mode: str = _setting(
        "choice",
        "auto",
        ("--mode",),
        "whole: one graph for a token, needs every expert on the device. layered: several graphs.",
        choices=("auto", "layered", "whole"),
        group="Diagnostic",
    )
    n_ctx: int = _setting(
        "int",
        4096,
        ("-c", "--ctx-size"),
        "Context length in tokens; 0 takes the model's own.",
        minimum=0,
        maximum=1 << 22,
        group="Context",
    )
    n_ubatch: int = _setting(
        "int",
        512,
        ("-ub", "--ubatch-size"),
        "Prompt tokens computed in one pass.",
        minimum=1,
        maximum=1 << 16,
        group="Context",
    )
    n_threads: int | None = _setting(
        "int",
        None,
        ("-t", "--threads"),
        "CPU threads of a token; default: measured, up to the physical cores.",
        minimum=1,
        maximum=MAX_THREADS,
    )
    n_threads_batch: int | None = _setting(
        "int",
        None,
        ("-tb", "--threads-batch"),
        "CPU threads of prompts; default: -t, or the physical cores.",
        minimum=1,
        maximum=MAX_THREADS,
    )
    poll: int | None = _setting(
        "int",
        None,
        ("--poll",),
        "How long CPU threads spin before they sleep, 0 to 100; default: measured (50 or 0).",
        minimum=0,
        maximum=100,
    )
    type_k: str = _setting(
        "choice",
        "f16",
        ("-ctk", "--cache-type-k"),
        "Type of the K cache.",
        choices=KV_TYPES,
        group="Context",
    )
    type_v: str = _setting(
        "choice",
        "f16",
        ("-ctv", "--cache-type-v"),
        "Type of the V cache.",
        choices=KV_TYPES,
        group="Context",
    )
    pin_layers: int = _setting(
        "int",
        -1,
        ("--pin-layers",),
        "Layers whose experts all stay on the device; -1 lets the planner choose.",
        minimum=-1,
        maximum=1 << 10,
        group="Expert",
    )
    cache_slots: int = _setting(
        "int",
        -1,
        ("--cache-slots",),
        "Expert slots on the device for the other layers, in all; -1 lets the planner choose.",
        minimum=-1,
        maximum=1 << 20,
        group="Expert",
    )
    vram: str = _setting(
        "size",
        "auto",
        ("--vram",),
        "Device memory for everything, such as 8GiB; auto takes what is free, less a margin.",
        metavar="SIZE|auto",
        group="Expert",
    )
    profile: str = _setting(
        "path",
        "",
        ("--profile",),
        "Routing profile, new or not: fills the slots, and run and chat add what they saw. "
        "Default: MODEL.routing.json if there is one.",
        metavar="FILE|none",
        group="Expert",
    )
    profile_class: str = _setting(
        "path",
        "",
        ("--profile-class",),
        "Prompt class to fill from and to add to; without it, all fill and 'default' grows.",
        metavar="NAME",
        group="Expert",
    )
    policy: str = _setting(
        "choice",
        "lfu",
        ("--policy",),
        "Which experts keep their slots.",
        choices=EXPERT_POLICIES,
        group="Expert",
    )
    miss: str = _setting(
        "choice",
        "auto",
        ("--miss",),
        "Who computes an expert that is not on the device: the CPU where it is (up to 8 rows), the "
        "device after streaming it there, or both, by what this machine measured at start. For one "
        "row, the device fetches it without the host's help, if pinned; with auto, where quicker.",
        choices=("auto", "cpu", "stream"),
        group="Expert",
    )
    prefetch: str = _setting(
        "choice",
        "auto",
        ("--prefetch",),
        "Where the host fetches experts: also what the next layer will probably choose, if trying "
        "it made tokens quicker.",
        choices=("auto", "off"),
        group="Expert",
    )
    host_pin: str = _setting(
        "choice",
        "auto",
        ("--host-pin",),
        "Pin host copies of experts that may be needed: faster uploads, and the device can fetch "
        "them without the host's help; auto leaves the host some free memory.",
        choices=("auto", "all", "none"),
        group="Expert",
    )
    deterministic: bool = _setting(
        "flag",
        False,
        ("--deterministic",),
        "Let no timing decide who computes a missing expert: with --miss auto the device computes "
        "all, nothing is fetched on a guess, and the cache is never bypassed. Often slower.",
    )
    n_seq: int = _setting(
        "int",
        1,
        (),
        "Sequences the caches have room for (Python API only).",
        minimum=1,
        maximum=256,
    )
    cpu_reference: bool = _setting(
        "flag",
        False,
        ("--cpu-reference",),
        "On the CPU, use kernels whose result does not depend on batch width or threads.",
        group="Diagnostic",
    )

    def problems(self) -> list[str]:
        """Return every problem of this config as one line each; empty when it is valid."""
        found = [_problem(s, getattr(self, s.name)) for s in settings()]
        if self.cpu_reference is True and str(self.device).startswith("cuda"):
            found.append(
                f"cpu_reference needs the CPU device, got device={self.device!r}; "
                "use device 'cpu' or drop --cpu-reference"
            )
        return [line for line in found if line]

    def validate(self) -> EngineConfig:
        """Return self when every field is valid.

        Raises:
            ConfigError: names every wrong field, its value and the allowed range.
        """
        found = self.problems()
        if found:
            raise ConfigError("; ".join(found))
        return self


def settings() -> tuple[Setting, ...]:
    """Return the Setting of every EngineConfig field, in order."""
    return tuple(
        Setting(name=f.name, default=f.default, **f.metadata) for f in fields(EngineConfig)
    )


def _problem(setting: Setting, value: object) -> str:
    """Return what is wrong with one value, or an empty string."""
    if value is None and setting.default is None:
        return ""
    where = f"{setting.name} is {value!r}"
    if setting.flags:
        where += f" ({'/'.join(setting.flags)})"
    if setting.kind == "flag":
        return "" if isinstance(value, bool) else f"{where}; expected true or false"
    if setting.kind == "int":
        if isinstance(value, bool) or not isinstance(value, int):
            return f"{where}; expected an integer, {setting.allowed}"
        low, high = setting.minimum or 0, setting.maximum or 0
        return "" if low <= value <= high else f"{where}; allowed: {setting.allowed}"
    if not isinstance(value, str):
        return f"{where}; expected a string, {setting.allowed}"
    return "" if _is_known(setting, value) else f"{where}; allowed: {setting.allowed}"


def _is_known(setting: Setting, value: str) -> bool:
    if setting.choices:
        return value in setting.choices
    if setting.kind == "device":
        return _DEVICE.fullmatch(value) is not None
    if setting.kind == "size":
        return value == "auto" or is_size(value)
    return "\0" not in value


def debug_level() -> int:
    """Return MOEGRAPH_DEBUG: 0 quiet, 1 tracebacks of our own errors, 2 native logs too."""
    value = os.environ.get("MOEGRAPH_DEBUG", "")
    return int(value) if value.isdecimal() else 0


def is_size(text: str) -> bool:
    """Return whether a text is a size of memory, such as 8GiB; a bare number means GiB."""
    try:
        return parse_bytes(text, "g") > 0
    except ConfigError:
        return False
