"""Sizes, rates, counts and durations as people read and type them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegraph.errors import ConfigError
from moegraph.units import (
    GiB,
    KiB,
    MiB,
    TiB,
    format_bytes,
    format_duration,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1023 * KiB, "1023 KiB"),
        (MiB - 1, "1.00 MiB"),
        (10 * MiB, "10.0 MiB"),
        (20_300 * MiB, "19.8 GiB"),
        (24 * GiB, "24.0 GiB"),
        (3 * TiB, "3.00 TiB"),
        (-MiB, "-1.00 MiB"),
    ],
)
def test_bytes_print_with_three_digits(n: int, text: str) -> None:
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("1k", KiB),
        ("1.5GiB", 3 * GiB // 2),
        ("300 MiB", 300 * MiB),
        ("8g", 8 * GiB),
        (" 2TB ", 2 * TiB),
        ("0.1k", 102),
    ],
)
def test_sizes_parse_in_powers_of_1024(text: str, n: int) -> None:
    assert parse_bytes(text) == n


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "1e9", "1..2", "GiB", "1 PB", "nan", "inf", "1.", ".5", "\u0661", "9" * 40],
)
def test_what_is_no_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 1 << 62))
def test_a_printed_size_parses_back_within_its_three_digits(n: int) -> None:
    back = parse_bytes(format_bytes(n))
    assert abs(back - n) <= 0.006 * n + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1e-9, "1.00 ns"),
        (12.3e-6, "12.3 us"),
        (0.9996, "1.00 s"),
        (59.94, "59.9 s"),
        (59.96, "1m 00s"),
        (185.4, "3m 05s"),
        (3599.6, "1h 00m"),
        (90_000.0, "25h 00m"),
        (-0.5, "-500 ms"),
        (math.inf, "-"),
        (math.nan, "-"),
    ],
)
def test_durations_print_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
