"""Engine settings: defaults, limits, and messages that name field, value and range."""

from __future__ import annotations

import dataclasses
import math

import pytest

from moegraph import errors
from moegraph.config import EngineConfig, settings
from moegraph.errors import ConfigError, MoegraphError, one_line
from moegraph.setting import Setting, problem_of


def wrong_values(setting: Setting) -> list[object]:
    """Return values that a setting must refuse."""
    if setting.minimum is not None and setting.maximum is not None:
        return [setting.minimum - 1, setting.maximum + 1, "5", True, math.nan]
    if setting.kind == "device":
        return ["gpu", "cuda:", "cuda:x", "CPU ", 0]
    return {"flag": [1], "choice": ["q3_K", None]}.get(setting.kind, [0])


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.name)
def test_a_wrong_value_is_named_with_its_field_and_what_is_allowed(setting: Setting) -> None:
    for value in wrong_values(setting):
        config = dataclasses.replace(EngineConfig(), **{setting.name: value})
        with pytest.raises(ConfigError) as caught:
            config.validate()
        message = str(caught.value)
        assert message.startswith(f"{setting.name} is {value!r}")
        assert all(flag in message for flag in setting.flags)
        assert setting.allowed in message or "true or false" in message


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.name)
def test_values_at_the_limits_are_allowed(setting: Setting) -> None:
    bounds = () if setting.minimum is None else (setting.minimum, setting.maximum)
    for value in (*bounds, *setting.choices, setting.default):
        assert problem_of(setting, value) == ""


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
