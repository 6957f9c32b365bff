"""Plots as SVG text, without dependencies: line charts, a heat map, bars of shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .drawing import COLOURS, Axis, Drawing, LogAxis, Points, apart, text_width

_LEVELS = 48
_WIDTH, _PANEL = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 60, 44
# The heat map marks how many experts get these shares of a layer's choices: a guide to how many
# slots the layer needs.
_CUMULATIVE = (0.5, 0.8, 0.95)


@dataclass(frozen=True)
class Panel:
    """One of several plots over the same x axis; series: points (x, y) in order of x, by name.

    log: a logarithmic y axis; 0 has its own place below a gap.
    y_range: both ends of the y axis; None: from the data.
    """

    y_label: str
    series: Mapping[str, Points]
    log: bool = False
    y_range: tuple[float, float] | None = None


def line_chart(
    title: str, x_label: str, y_label: str, series: Mapping[str, Points],
    y_range: tuple[float, float] | None = None,
) -> str:  # fmt: skip
    """Return a line chart; series: points (x, y) in order of x, by name. y begins at 0."""
    ys = [y for points in series.values() for _, y in points] or [0.0]
    y_range = y_range or (min(0.0, *ys), max(ys) * 1.05)
    return line_panels(title, "", x_label, [Panel(y_label, series, y_range=y_range)])


def line_panels(
    title: str, subtitle: str, x_label: str, panels: Sequence[Panel],
    second_x: tuple[str, float] | None = None,
) -> str:  # fmt: skip
    """Return line charts above each other, with the name of each curve at its end.

    second_x: label and factor of a second row of ticks, which shows x times the factor.
    """
    everything = [panel.series for panel in panels]
    xs = [x for all_of in everything for points in all_of.values() for x, _ in points] or [0.0]
    labels = [label for all_of in everything for _, label in _groups(all_of)] or [""]
    right = _RIGHT + 14 + max(text_width(label) for label in labels)
    below = _BOTTOM + (34 if second_x else 0)
    d = Drawing(title, subtitle, _WIDTH, _TOP + (_PANEL + 24) * len(panels) - 24 + below)
    x_axis = Axis(min(xs), max(xs), _LEFT, d.width - right)
    for at, panel in enumerate(panels):
        top = _TOP + (_PANEL + 24) * at
        _panel(d, panel, x_axis, top, top + _PANEL, at == len(panels) - 1)
    bottom = d.height - below
    middle = (x_axis.first + x_axis.last) / 2
    d.text(middle, bottom + 36, x_label, anchor="middle")
    if second_x:
        label, factor = second_x
        other = Axis(x_axis.low * factor, x_axis.high * factor, x_axis.first, x_axis.last)
        for value in other.ticks_with_ends():
            d.line(((other.at(value), bottom + 44), (other.at(value), bottom + 48)), "axis")
            d.text(other.at(value), bottom + 60, f"{value:.3g}", anchor="middle")
        d.line(((other.first, bottom + 44), (other.last, bottom + 44)), "axis")
        d.text(middle, bottom + 74, label, anchor="middle")
    return d.end()


def _groups(series: Mapping[str, Points]) -> list[tuple[list[str], str]]:
    """Return groups of equal curves, each with its label: 'lru = adaptive'."""
    groups: list[list[str]] = []
    for name, points in series.items():
        equal = next((g for g in groups if list(series[g[0]]) == list(points)), None)
        if equal is None:
            groups.append([name])
        else:
            equal.append(name)
    return [(names, " = ".join(names)) for names in groups]


def _panel(
    d: Drawing, panel: Panel, x_axis: Axis, top: float, bottom: float, x_ticks: bool
) -> None:
    """Draw one plot: axes, curves, and their names at the right."""
    ys = [y for points in panel.series.values() for _, y in points] or [0.0]
    y_axis: Axis
    if panel.log:
        y_axis = LogAxis(ys, bottom, top)
    else:
        low, high = panel.y_range or _range_of(ys)
        y_axis = Axis(low, high, bottom, top)
    _frame(d, x_axis, y_axis, panel.y_label, x_ticks)
    numbers = {name: at % len(COLOURS) for at, name in enumerate(panel.series)}
    groups = [(names, label) for names, label in _groups(panel.series) if panel.series[names[0]]]
    ends = [y_axis.at(panel.series[names[0]][-1][1]) for names, _ in groups]
    places = apart(ends, 15.0, top + 4, bottom - 2)
    for (names, label), end, place in zip(groups, ends, places, strict=True):
        points = panel.series[names[0]]
        path = [(x_axis.at(x), y_axis.at(y)) for x, y in points]
        for at, name in enumerate(names):
            # Equal curves overlap: the later ones are drawn as dashes over the first.
            d.line(path, f"l{numbers[name]}", 2.0, f"{6} {6 * at}" if at else "")
        for (x, y), (px, py) in zip(points, path, strict=True):
            d.dot(px, py, f"a{numbers[names[0]]}", f"{label}: {x:g}, {y:.4g}")
        last = path[-1][0]
        d.line(((last + 4, end), (last + 12, place)), f"l{numbers[names[0]]}")
        d.text(last + 14, place + 4, label)


def _range_of(ys: Sequence[float]) -> tuple[float, float]:
    """Return round ends of a y axis that includes the data."""
    axis = Axis(min(ys), max(ys), 0.0, 1.0)
    step = axis.step()
    low = step * math.floor(axis.low / step + 1e-9)
    return low, step * math.ceil(axis.high / step - 1e-9)


def _frame(d: Drawing, x_axis: Axis, y_axis: Axis, y_label: str, x_ticks: bool) -> None:
    """Draw axes, grid lines, ticks and the y label."""
    for value in y_axis.ticks():
        y = y_axis.at(value)
        d.line(((x_axis.first, y), (x_axis.last, y)), "grid")
        d.text(x_axis.first - 6, y + 4, f"{value:g}", anchor="end")
    for value in x_axis.ticks_with_ends():
        x = x_axis.at(value)
        d.line(((x, y_axis.first), (x, y_axis.first + 4)), "axis")
        if x_ticks:
            d.text(x, y_axis.first + 18, f"{value:g}", anchor="middle")
    d.line(
        ((x_axis.first, y_axis.last), (x_axis.first, y_axis.first), (x_axis.last, y_axis.first)),
        "axis",
    )
    d.text(16, (y_axis.first + y_axis.last) / 2, y_label, anchor="middle", turn=True)


def heat_map(
    title: str, subtitle: str, x_label: str, rows: Sequence[Sequence[float]], cumulative: bool
) -> str:
    """Return a heat map of shares with one row of cells for each layer; the largest is darkest.

    rows: for each expert, the share of the tokens that chose it, 0 to 1. The colour scale is a
    square root, as the colour bar says. cumulative: rows are sorted, largest first; also draw how
    many experts get 50, 80 and 95 % of a row's choices.
    """
    n_columns = max((len(row) for row in rows), default=0)
    largest = max((value for row in rows for value in row), default=0.0)
    cell = max(2.0, min(560 / max(n_columns, 1), 24.0))
    height = max(4.0, min(480 / max(len(rows), 1), 16.0))
    right, bottom = _LEFT + cell * n_columns, _TOP + height * len(rows)
    d = Drawing(title, subtitle, max(480, int(right + 110)), int(max(bottom, _TOP + 120) + 78))
    for level, path in enumerate(_cell_paths(rows, largest)):
        if path:
            d.add(
                f'<path transform="translate({_LEFT} {_TOP}) scale({cell:.3f} {height:.3f})" '
                f'fill="{_shade(level / (_LEVELS - 1))}" d="{path}"/>'
            )
    for column in range(0, n_columns, _round_step(n_columns, 8)):
        d.text(_LEFT + cell * (column + 0.5), bottom + 16, str(column), anchor="middle")
    for row in range(0, len(rows), _round_step(len(rows), 10)):
        d.text(_LEFT - 6, _TOP + height * (row + 0.5) + 4, str(row), anchor="end")
    d.text((_LEFT + right) / 2, bottom + 36, x_label, anchor="middle")
    d.text(18, (_TOP + bottom) / 2, "layer", anchor="middle", turn=True)
    if cumulative and n_columns:
        _cumulative_lines(d, rows, cell, height, bottom)
    _tips(d, rows, height, right)
    _colour_bar(d, right + 24, largest)
    return d.end()


def _round_step(n: int, n_ticks: int) -> int:
    """Return a round step that gives about n_ticks ticks over n cells."""
    return next(m * int(10**p) for p in range(9) for m in (1, 2, 5) if m * 10**p * n_ticks >= n)


def _reached(row: Sequence[float], share: float) -> int:
    """Return how many cells of a row, largest first, hold the given share of its sum."""
    need, so_far = share * sum(row) * (1 - 1e-9), 0.0
    for at, value in enumerate(row):
        if so_far >= need:
            return at
        so_far += value
    return len(row)


def _cumulative_lines(
    d: Drawing, rows: Sequence[Sequence[float]], cell: float, height: float, bottom: float
) -> None:
    """Draw where each row reaches 50, 80 and 95 % of its choices, and name the lines."""
    x = float(_LEFT)
    d.text(x, bottom + 58, "experts that hold")
    x += text_width("experts that hold") + 10
    for at, share in enumerate(_CUMULATIVE):
        steps = []
        for il, row in enumerate(rows):
            edge = _LEFT + cell * _reached(row, share)
            steps += [(edge, _TOP + height * il), (edge, _TOP + height * (il + 1))]
        style = f"l{(1, 3, 2)[at]}"
        d.line(steps, style, 2.0)
        d.line(((x, bottom + 54), (x + 20, bottom + 54)), style, 2.0)
        d.text(x + 25, bottom + 58, f"{share:.0%}".replace("%", " %"))
        x += 66
    d.text(x, bottom + 58, "of the choices")


def _tips(d: Drawing, rows: Sequence[Sequence[float]], height: float, right: float) -> None:
    """Add to every row a text that shows under the pointer."""
    for il, row in enumerate(rows):
        falling = sorted(row, reverse=True)
        counts = ", ".join(
            f"{100 * share:.0f} % in {_reached(falling, share)}" for share in _CUMULATIVE
        )
        best = f"; most chosen by {100 * falling[0]:.1f} % of tokens" if falling else ""
        d.add(
            f'<rect x="{_LEFT}" y="{_TOP + height * il:.1f}" width="{right - _LEFT:.1f}" '
            f'height="{height:.1f}" fill="#000000" fill-opacity="0">'
            f"<title>{escape(f'layer {il}: {counts} experts{best}')}</title></rect>"
        )


def _colour_bar(d: Drawing, x: float, largest: float) -> None:
    """Draw the colour scale beside a heat map, labelled with shares."""
    n, tall = 24, 120.0
    for at in range(n):
        y = _TOP + tall * (n - 1 - at) / n
        d.add(
            f'<path fill="{_shade(at / (n - 1))}" d="M{x:.1f} {y:.1f}h12v{tall / n + 0.3:.2f}h-12z"'
            "/>"
        )
    d.add(f'<path class="frame" d="M{x:.1f} {_TOP}h12v{tall:.0f}h-12z"/>')
    for part in (0.0, 0.25, 0.5, 1.0):
        y = _TOP + tall * (1 - math.sqrt(part))
        d.text(x + 17, y + 4, f"{100 * largest * part:.3g} %")
    d.text(x - 4, _TOP + tall + 18, "of tokens")
    d.text(x - 4, _TOP + tall + 33, "(root scale)")


def share_bars(
    title: str, unit: str, bars: Mapping[str, Mapping[str, float]], notes: Sequence[str] = ()
) -> str:
    """Return one bar for each name, divided by the shares of its parts.

    All bars have the same length, so that 1 ms can be read beside 100 ms. Below each bar stand the
    values in `unit`, and below the plot the notes.
    """
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    left = 24 + max((text_width(name) for name in bars), default=0.0)
    d = Drawing(title, "", _WIDTH, 72 + 52 * len(bars) + 18 * len(notes) + 10)
    width, x = d.width - left - 110, left
    for at, part in enumerate(parts):
        d.area(x, 40, 12, 10, f"a{at % len(COLOURS)}")
        d.text(x + 17, 49, part)
        x += 34 + text_width(part)
    for at, (name, bar) in enumerate(bars.items()):
        y, total, x = 64 + 52 * at, sum(bar.values()), left
        d.text(left - 8, y + 16, name, anchor="end")
        for part, value in bar.items():
            long = width * value / total if total else 0.0
            d.area(
                x, y, long, 22, f"a{parts.index(part) % len(COLOURS)}",
                f"{part}: {value:.3g} {unit}",
            )  # fmt: skip
            x += long
        d.text(left + width + 8, y + 16, f"{total:.3g} {unit}")
        d.text(left, y + 37, ", ".join(f"{part} {value:.3g}" for part, value in bar.items()))
    for at, line in enumerate(notes):
        d.text(16, 64 + 52 * len(bars) + 18 * at + 12, line)
    return d.end()


def _cell_paths(rows: Sequence[Sequence[float]], largest: float) -> list[str]:
    """Return the SVG path of the cells of each colour level; a run of cells is one rectangle."""
    paths = [""] * _LEVELS
    for y, row in enumerate(rows):
        # The square root keeps rarely chosen experts visible.
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
