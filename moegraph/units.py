"""Format sizes, counts, shares and durations for people; parse sizes that they type."""

from __future__ import annotations

import math
import re

from .errors import ConfigError

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TiB = 1024 * GiB

_FACTORS = {"": 1, "k": KiB, "m": MiB, "g": GiB, "t": TiB}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)[ ]?([kmgt]?)(?:i?b)?", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str, unit: str = "") -> int:
    """Parse '512', '1.5GiB', '300 MiB', '8g' into bytes; all prefixes are powers of 1024.

    unit: prefix of a bare number ('g' reads '6' as 6 GiB).
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"not a size: {text!r}; write a number with KiB, MiB, GiB or TiB")
    number, prefix = match.groups()
    bare = text.strip().lower() == number
    factor = _FACTORS[unit.lower() if bare else prefix.lower()]
    whole, _, fraction = number.partition(".")
    return int(whole) * factor + (int(fraction) * factor // 10 ** len(fraction) if fraction else 0)


def format_bytes(n: int) -> str:
    """Return n bytes as '17 B', '1.50 MiB', '20.3 GiB': three digits, powers of 1024."""
    return "-" + format_bytes(-n) if n < 0 else _scaled(n, KiB, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_count(n: int) -> str:
    """Return n as '999', '1.23 K', '34.7 B': three digits, powers of 1000, for parameters."""
    return _scaled(n, 1000, ("", "K", "M", "B", "T"))


def _scaled(n: int, base: int, names: tuple[str, ...]) -> str:
    if n < base:
        return f"{n} {names[0]}".rstrip()
    power = 1
    # 1023.5 would print as 1024: use the next prefix
    while n >= (base - 0.5) * base**power and power < len(names) - 1:
        power += 1
    return f"{_three_digits(n / base**power)} {names[power]}"


def format_share(share: float) -> str:
    """Return a share, 0 to 1, as '16.2 %', '25 %' or '100 %'; less than 1 is at most '99.9 %'."""
    percent = min(100.0 * share, 99.9) if share < 1.0 else 100.0 * share
    return f"{percent:.1f}".removesuffix(".0") + " %"


def format_duration(seconds: float) -> str:
    """Return a duration as '850 ns', '12.3 us', '4.56 ms', '7.89 s', '3m 05s' or '2h 04m'."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0:
        return "-" + format_duration(-seconds)
    for factor, name in ((1e-9, "ns"), (1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * factor:
            return f"{_three_digits(seconds / factor)} {name}" if seconds else "0 s"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    minutes = round(seconds / 60)
    return f"{minutes // 60}h {minutes % 60:02d}m"


def round_up(n: int, multiple: int) -> int:
    """Round n up to a multiple."""
    return -(-n // multiple) * multiple


def octave(n: int) -> int:
    """Return one number for all n up to a power of two and above half of it; 0 up to one."""
    return max(n - 1, 0).bit_length()


def _three_digits(value: float) -> str:
    """Return value with three significant digits and no exponent."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
