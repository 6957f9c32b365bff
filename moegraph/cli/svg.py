"""Small plots as SVG text: lines over an axis, a heat map, stacked bars. No dependencies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

# Distinct to colour-blind readers, on white and on dark pages (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
_LEVELS = 16
_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 44, 56

Points = Sequence[tuple[float, float]]


class _Drawing:
    """Elements of a drawing; coordinates in pixels, y downwards."""

    def __init__(self, title: str, width: int = _WIDTH, height: int = _HEIGHT) -> None:
        self.width, self.height = width, height
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]
        self.text(width / 2, 24, title, anchor="middle", size=15)

    def add(self, element: str) -> None:
        self._parts.append(element)

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", size: int = 12,
        turn: bool = False,
    ) -> None:  # fmt: skip
        rotate = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
        self.add(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="#333333"{rotate}>{escape(text)}</text>'
        )

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.add(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}"/>'
        )

    def line(self, points: Points, colour: str, width: float = 1.0) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.add(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
        )

    def legend(self, x: float, y: float, names: Sequence[str]) -> None:
        for at, name in enumerate(names):
            self.rect(x, y + 18 * at - 9, 12, 10, COLOURS[at % len(COLOURS)])
            self.text(x + 18, y + 18 * at, name)

    def end(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


class _Axis:
    """Maps values to pixels."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self.low, self.high = low, high if high > low else low + 1.0
        self.first, self.last = first, last

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Return about five round values in range."""
        rough = (self.high - self.low) / 5
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
        start = math.ceil(self.low / step - 1e-9)
        found = [at * step for at in range(start, start + 12)]
        return [value for value in found if value <= self.high + step * 1e-9]


def line_chart(
    title: str, x_label: str, y_label: str, series: Mapping[str, Points],
    y_range: tuple[float, float] | None = None,
) -> str:  # fmt: skip
    """Return a line chart; series: points (x, y) in order of x, by name."""
    xs = [x for points in series.values() for x, _ in points] or [0.0]
    ys = [y for points in series.values() for _, y in points] or [0.0]
    low, high = y_range or (min(0.0, *ys), max(ys) * 1.05)
    d = _Drawing(title)
    x_axis = _Axis(min(xs), max(xs), _LEFT, d.width - _RIGHT)
    y_axis = _Axis(low, high, d.height - _BOTTOM, _TOP)
    _frame(d, x_axis, y_axis, x_label, y_label)
    for at, points in enumerate(series.values()):
        colour = COLOURS[at % len(COLOURS)]
        path = [(x_axis.at(x), y_axis.at(y)) for x, y in points]
        d.line(path, colour, 2.0)
        for x, y in path:
            d.add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    lowest = d.height - _BOTTOM - 12
    d.legend(d.width - _RIGHT - 150, lowest - 18 * (len(series) - 1), list(series))
    return d.end()


def heat_map(
    title: str, x_label: str, y_label: str, rows: Sequence[Sequence[float]]
) -> str:  # fmt: skip
    """Return a heat map of values of 0 or more, dark for the largest; one row of cells each."""
    n_columns = max((len(row) for row in rows), default=0)
    largest = max((value for row in rows for value in row), default=0.0)
    cell = max(2.0, min(640 / max(n_columns, 1), 24.0))
    height = max(4.0, min(480 / max(len(rows), 1), 16.0))
    d = _Drawing(
        title, int(_LEFT + cell * n_columns + _RIGHT), int(_TOP + height * len(rows) + _BOTTOM)
    )
    for level, path in enumerate(_cell_paths(rows, largest)):
        if path:
            d.add(
                f'<path transform="translate({_LEFT} {_TOP}) scale({cell:.3f} {height:.3f})" '
                f'fill="{_shade(level / (_LEVELS - 1))}" d="{path}"/>'
            )
    bottom = _TOP + height * len(rows)
    for column in range(0, n_columns, max(1, n_columns // 8)):
        d.text(_LEFT + cell * column, bottom + 16, str(column))
    for row in range(0, len(rows), max(1, len(rows) // 10)):
        d.text(_LEFT - 6, _TOP + height * row + 10, str(row), anchor="end")
    d.text(_LEFT + cell * n_columns / 2, bottom + 40, x_label, anchor="middle")
    d.text(18, _TOP + height * len(rows) / 2, y_label, anchor="middle", turn=True)
    return d.end()


def stacked_bars(title: str, y_label: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """Return bars by name, each a stack of named parts of 0 or more."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    tallest = max((sum(bar.values()) for bar in bars.values()), default=0.0)
    d = _Drawing(title)
    right = d.width - _RIGHT - 150
    y_axis = _Axis(0.0, tallest * 1.05, d.height - _BOTTOM, _TOP)
    _frame(d, _Axis(0, 1, _LEFT, right), y_axis, "", y_label, x_ticks=False)
    pitch = (right - _LEFT) / max(len(bars), 1)
    for at, (name, bar) in enumerate(bars.items()):
        x, so_far = _LEFT + pitch * (at + 0.2), 0.0
        for part, value in bar.items():
            top, bottom = y_axis.at(so_far + value), y_axis.at(so_far)
            colour = COLOURS[parts.index(part) % len(COLOURS)]
            d.rect(x, top, pitch * 0.6, bottom - top, colour)
            so_far += value
        d.text(x + pitch * 0.3, d.height - _BOTTOM + 18, name, anchor="middle")
    d.legend(right + 20, _TOP + 12, parts)
    return d.end()


def _cell_paths(rows: Sequence[Sequence[float]], largest: float) -> list[str]:
    """Return for each level the cells that have it, runs of equal ones as one rectangle."""
    paths = [""] * _LEVELS
    for y, row in enumerate(rows):
        # a root shows the rare ones, too: popularity is very uneven
        levels = [
            round((_LEVELS - 1) * math.sqrt(value / largest)) if largest else 0 for value in row
        ]
        start = 0
        for x in range(1, len(levels) + 1):
            if x == len(levels) or levels[x] != levels[start]:
                paths[levels[start]] += f"M{start} {y}h{x - start}v1h-{x - start}z"
                start = x
    return paths


def _shade(share: float) -> str:
    """Return a colour from almost white to dark blue."""
    light, dark = (247, 251, 255), (8, 48, 107)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(light, dark))


def _frame(
    d: _Drawing, x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str, x_ticks: bool = True
) -> None:
    """Draw axes, grid lines, ticks and labels."""
    for value in y_axis.ticks():
        y = y_axis.at(value)
        d.line(((x_axis.first, y), (x_axis.last, y)), "#dddddd")
        d.text(x_axis.first - 6, y + 4, f"{value:g}", anchor="end")
    for value in x_axis.ticks() if x_ticks else ():
        x = x_axis.at(value)
        d.line(((x, y_axis.first), (x, y_axis.first + 4)), "#333333")
        d.text(x, y_axis.first + 18, f"{value:g}", anchor="middle")
    d.line(
        ((x_axis.first, y_axis.last), (x_axis.first, y_axis.first), (x_axis.last, y_axis.first)),
        "#333333",
    )
    d.text((x_axis.first + x_axis.last) / 2, d.height - 14, x_label, anchor="middle")
    d.text(18, (y_axis.first + y_axis.last) / 2, y_label, anchor="middle", turn=True)
