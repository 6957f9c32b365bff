"""Building blocks of the plots: SVG elements, colours for light and dark pages, axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

# Colour-blind readers can tell these apart (Okabe and Ito); the second is for dark pages.
COLOURS = (
    ("#0072b2", "#56b4e9"), ("#d55e00", "#ff9248"), ("#009e73", "#2fd1a5"), ("#cc79a7", "#e8a3c9"),
    ("#b07a00", "#e69f00"), ("#5b5bd6", "#a5a5ff"), ("#6b6b6b", "#bdbdbd"),
)  # fmt: skip
FONT_SIZE = 12
# Average width of a character of common sans-serif fonts at FONT_SIZE, rounded up a little.
CHAR_WIDTH = 6.6

Points = Sequence[tuple[float, float]]


def _style() -> str:
    """Return the style sheet; classes l0, l1, ... colour the lines of series, a0, a1, ... areas."""
    sheets = []
    for dark in (0, 1):
        page, ink, grid = (("#ffffff", "#333333", "#dddddd"), ("#1b1b1f", "#d8d8d8", "#3a3a40"))[
            dark
        ]
        rules = [
            f".page{{fill:{page}}}", f"text{{fill:{ink}}}", f".axis{{stroke:{ink}}}",
            f".grid{{stroke:{grid}}}", f".frame{{stroke:{ink};fill:none}}",
            *(f".l{n}{{stroke:{pair[dark]}}}.a{n}{{fill:{pair[dark]}}}"
              for n, pair in enumerate(COLOURS)),
        ]  # fmt: skip
        sheets.append("".join(rules))
    return (
        f"polyline,line{{fill:none}}{sheets[0]}@media (prefers-color-scheme: dark){{{sheets[1]}}}"
    )


class Drawing:
    """Elements of a drawing; coordinates in pixels, y downwards."""

    def __init__(self, title: str, subtitle: str, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" '
            f'font-size="{FONT_SIZE}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_style()}</style>",
            f'<rect class="page" width="{width}" height="{height}"/>',
        ]
        self.text(width / 2, 24, _cut(title, width, 15), anchor="middle", size=15)
        if subtitle:
            self.text(width / 2, 42, _cut(subtitle, width, FONT_SIZE), anchor="middle")

    def add(self, element: str) -> None:
        """Append an element."""
        self._parts.append(element)

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", size: int = FONT_SIZE,
        turn: bool = False,
    ) -> None:  # fmt: skip
        """Append text. y: its base line. turn: write it upwards."""
        rotate = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
        self.add(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
            f"{rotate}>{escape(text)}</text>"
        )

    def area(
        self, x: float, y: float, width: float, height: float, style: str, tip: str = ""
    ) -> None:
        """Append a filled rectangle. tip: the text shown under the pointer."""
        inside = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        self.add(
            f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}"{inside}'
        )

    def line(self, points: Points, style: str, width: float = 1.0, dash: str = "") -> None:
        """Append a line through points. style: a class of the style sheet."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.add(f'<polyline class="{style}" points="{path}" stroke-width="{width}"{dashed}/>')

    def dot(self, x: float, y: float, style: str, tip: str) -> None:
        """Append a point of a curve."""
        self.add(
            f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
            f"<title>{escape(tip)}</title></circle>"
        )

    def end(self) -> str:
        """Return the drawing as SVG text."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def text_width(text: str) -> float:
    """Return the approximate width of a text in pixels."""
    return CHAR_WIDTH * len(text)


def _cut(text: str, width: float, size: int) -> str:
    """Return text, with its middle replaced by an ellipsis if it is too wide."""
    most = max(8, int((width - 16) / (CHAR_WIDTH * size / FONT_SIZE)))
    if len(text) <= most:
        return text
    return f"{text[: most // 2 - 1]}\u2026{text[-(most // 2 - 1) :]}"


class Axis:
    """Maps values to pixels, linearly."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self.low, self.high = low, high if high > low else low + 1.0
        self.first, self.last = first, last

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Return about five round values in range."""
        step = self.step()
        start = math.ceil(self.low / step - 1e-9)
        found = [at * step for at in range(start, start + 12)]
        return [value for value in found if value <= self.high + step * 1e-9]

    def ticks_with_ends(self) -> list[float]:
        """Return both ends and the round values between that are not too close to an end."""
        near = 0.4 * self.step()
        inner = [
            value for value in self.ticks() if value - self.low > near and self.high - value > near
        ]
        return [self.low, *inner, self.high]

    def step(self) -> float:
        """Return the distance between two ticks."""
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        return next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))


class LogAxis(Axis):
    """Maps values to pixels by their logarithm; 0 is at the first pixel, before a gap."""

    _ZERO = 22.0

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        positive = [value for value in values if value > 0] or [1.0]
        self.has_zero = any(value <= 0 for value in values)
        low, high = _round_below(min(positive)), _round_above(max(positive))
        super().__init__(low, high if high > low else 10 * low, first, last)

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        if value <= 0:
            return self.first
        gap = math.copysign(self._ZERO, self.last - self.first) if self.has_zero else 0.0
        share = math.log(value / self.low) / math.log(self.high / self.low)
        start = self.first + gap
        return start + share * (self.last - start)

    def ticks(self) -> list[float]:
        """Return 1, 2 and 5 times powers of ten in range, fewer over many decades."""
        decades = math.log10(self.high / self.low)
        factors = (1, 2, 5) if decades < 4 else (1,)
        first = math.floor(math.log10(self.low) + 1e-9)
        found = [m * 10.0**p for p in range(first, first + int(decades) + 2) for m in factors]
        inside = [v for v in found if self.low * 0.999 <= v <= self.high * 1.001]
        return ([0.0] if self.has_zero else []) + inside


def _round_below(value: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not above value."""
    power = 10.0 ** math.floor(math.log10(value))
    return max(m * power for m in (1, 2, 5) if m * power <= value * 1.0001)


def _round_above(value: float) -> float:
    """Return 1, 2, 5 or 10 times a power of ten, not below value."""
    power = 10.0 ** math.floor(math.log10(value))
    return min(m * power for m in (1, 2, 5, 10) if m * power >= value * 0.9999)


def apart(places: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Return places moved so that they are at least distance apart and within low..high."""
    order = sorted(range(len(places)), key=lambda at: places[at])
    found = [0.0] * len(places)
    last = low - distance
    for at in order:
        last = found[at] = max(places[at], last + distance)
    last = high + distance
    for at in reversed(order):
        last = found[at] = min(found[at], last - distance)
    return found
