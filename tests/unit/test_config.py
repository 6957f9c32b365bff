"""Engine settings: defaults, limits, and messages that name field, value and range."""

from __future__ import annotations

import dataclasses

import pytest

from moegraph import errors
from moegraph.config import EngineConfig, settings
from moegraph.errors import ConfigError, MoegraphError, one_line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "gpu"),
        ("device", "cuda:"),
        ("device", "cuda:x"),
        ("device", "CPU "),
        ("device", 0),
        ("mode", "fast"),
        ("n_ctx", -2),
        ("n_ctx", 1 << 40),
        ("n_ctx", 4096.0),
        ("n_ctx", True),
        ("n_ctx", "4096"),
        ("n_ubatch", 0),
        ("n_threads", 0),
        ("n_threads", 513),
        ("n_threads_batch", 0),
        ("poll", -1),
        ("poll", 101),
        ("poll", "50"),
        ("n_ctx", None),
        ("type_k", "q3_K"),
        ("type_v", None),
        ("n_seq", 0),
        ("n_seq", 257),
        ("n_draft", -1),
        ("n_draft", 65),
        ("spec", "eagle"),
        ("draft", None),
        ("draft_max", 0),
        ("draft_max", 65),
        ("draft_p_min", 1.01),
        ("draft_p_min", float("nan")),
        ("draft_p_min", True),
        ("draft_p_min", "0.5"),
        ("budget", 0),
        ("budget", 66),
        ("ddtree_budget", 65),
        ("ddtree_temp", -1),
        ("cpu_reference", 1),
    ],
)
def test_a_wrong_value_is_named_with_its_field_and_what_is_allowed(
    field: str, value: object
) -> None:
    config = dataclasses.replace(EngineConfig(), **{field: value})
    with pytest.raises(ConfigError) as caught:
        config.validate()
    message = str(caught.value)
    setting = next(s for s in settings() if s.name == field)
    assert message.startswith(f"{field} is {value!r}")
    assert all(flag in message for flag in setting.flags)
    assert setting.allowed in message or "true or false" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cpu"},
        {"device": "cuda"},
        {"device": "cuda:7"},
        {"n_ctx": 0},
        {"n_ctx": 1 << 22},
        {"n_ubatch": 1},
        {"n_threads": 512},
        {"type_k": "q4_0"},
        {"n_threads": None},
        {"poll": 0},
        {"poll": 100},
        {"n_threads_batch": 1},
        {"mode": "whole"},
        {"draft_p_min": 1},
        {"draft_p_min": 0.75, "budget": 64, "draft_max": None},
        {"cpu_reference": True, "device": "cpu"},
    ],
)
def test_values_at_the_limits_are_allowed(changes: dict[str, object]) -> None:
    assert EngineConfig(**changes).problems() == []


def test_all_problems_are_reported_at_once() -> None:
    found = EngineConfig(n_ctx=-2, n_ubatch=0, type_k="f64").problems()
    assert [line.split()[0] for line in found] == ["n_ctx", "n_ubatch", "type_k"]


def test_exit_codes_are_the_documented_ones() -> None:
    codes = {
        name: cls.exit_code
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, MoegraphError)
    }
    assert codes == {
        "MoegraphError": 1,
        "ConfigError": 2,
        "RequestError": 2,
        "ContextOverflow": 2,
        "PoolFull": 2,
        "EngineBusy": 2,
        "QueueFull": 2,
        "ServiceClosed": 2,
        "ModelFileError": 3,
        "UnsupportedModel": 3,
        "NativeError": 4,
        "DeviceLost": 4,
        "OutOfDeviceMemory": 4,
        "Cancelled": 130,
        "InternalError": 1,
    }


def test_an_error_is_one_printable_line_whatever_went_into_it() -> None:
    message = str(MoegraphError("bad name \x1b[31m\n\u202e\ud800 end"))
    assert message.isprintable()
    assert message.startswith("bad name \\x1b[31m\\n\\u202e\\ud800")


def test_a_long_message_loses_its_middle_and_keeps_both_ends() -> None:
    for filler in ("x" * 100_000, "\x07" * 1000):
        line = one_line(f"file: {filler}; do this")
        assert len(line) <= 1200 and line.isprintable()
        assert line.startswith("file: ") and line.endswith("; do this")
