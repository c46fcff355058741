"""Plain charts as SVG text: lines over time, bars of a histogram."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

BLUE, GREEN, AMBER, RED, VIOLET, SLATE = "#2563eb", "#059669", "#d97706", "#dc2626", "#7c3aed", "#64748b"
WIDTH, HEIGHT = 960, 300
LEFT, RIGHT, TOP, BOTTOM = 92, 20, 34, 46
"""Pixels around the plotting area of a chart."""
LETTER = 7.5
"""Pixels of one letter of a tick's or a legend's text, at most."""
LEGEND_LINE, LEGEND_GAP = 20, 36
"""Pixels between two lines of a legend, and beside the letters of an entry: its square, and the space to the next."""


@dataclass(frozen=True, slots=True)
class Series:
    """One named series: ``values[i]`` belongs to ``x[i]`` of its chart. ``filled`` also draws the area below."""

    name: str
    color: str
    values: Sequence[float]
    filled: bool = False
    dashed: bool = False
    x: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment that is marked by a vertical line; ``group`` is its name in the legend."""

    at: float
    label: str
    color: str
    group: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A chart's plotting area: its data ranges, and the pixels of a value."""

    x_range: tuple[float, float]
    y_top: float
    height: int = HEIGHT

    def x(self, value: float) -> float:
        """Return the pixels from the left edge at which a data value is drawn. Values outside the range are drawn at
        its end."""
        low, high = self.x_range
        return LEFT + min(max((value - low) / ((high - low) or 1), 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the pixels from the top edge at which a data value is drawn. Values outside the range are drawn at its
        end."""
        return self.height - BOTTOM - min(max(value / (self.y_top or 1), 0.0), 1.0) * (self.height - TOP - BOTTOM)


def nice_ticks(top: float, about: int = 5) -> list[float]:
    """Return about ``about`` round numbers, evenly spaced, from 0 to at least ``top``."""
    if top < 1e-9:
        return [0.0, 1.0]
    rough = top / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    step = max(step, 1.0) if top >= 1 else step
    return [step * n for n in range(math.ceil(top / step) + 1)]


def lines(
    title: str,
    x: Sequence[float],
    series: Sequence[Series],
    *,
    x_ticks: Sequence[tuple[float, str]] | None = None,
    marks: Sequence[Mark] = (),
    x_label: str = "",
    y_label: str = "",
    height: int = HEIGHT,
) -> str:
    """Return a chart as SVG: lines over a common x axis, in seconds from 0 unless ``x_ticks`` are given, with marks as
    dashed verticals. ``title`` is not drawn; it is the label for screen readers."""
    ticks = nice_ticks(max((max(s.values, default=0) for s in series), default=0))
    ends = [each[-1] for each in (x, *(s.x for s in series if s.x)) if each]
    span = max([*ends, *(mark.at for mark in marks)], default=1.0)
    frame = Frame((0.0, span or 1.0), ticks[-1], height)
    x_ticks = x_ticks if x_ticks is not None else [(t, f"{t:g} s") for t in nice_ticks(span, 8) if t <= span]
    parts = [_axes(frame, ticks, x_ticks, x_label, y_label)]
    parts += [_line(frame, s.x if s.x is not None else x, s) for s in series]
    return _chart(title, frame, parts, series, marks)


def bars(
    title: str,
    edges: Sequence[float],
    series: Sequence[Series],
    *,
    x_ticks: Sequence[tuple[float, str]] = (),
    marks: Sequence[Mark] = (),
    x_label: str = "",
    y_label: str = "",
    height: int = HEIGHT,
    scale: Callable[[float], float] = float,
) -> str:
    """Return a chart of stacked bars as SVG. Bar i lies between ``edges[i]`` and ``edges[i+1]``. ``scale`` shapes the y
    axis (for example :func:`math.sqrt`, so that a bar of one is visible beside a bar of thousands). ``title`` as in
    :func:`lines`."""
    count = len(edges) - 1
    stacked = [sum(s.values[i] for s in series) for i in range(count)]
    ticks = _scale_ticks(max(stacked, default=0), scale)
    frame = Frame((edges[0], edges[-1]), scale(ticks[-1]), height)
    parts = [_axes(frame, ticks, x_ticks, x_label, y_label, scale)]
    for i in range(count):
        below = 0.0
        left, right = frame.x(edges[i]) + 0.75, frame.x(edges[i + 1]) - 0.75
        for s in series:
            if value := s.values[i]:
                top, bottom = frame.y(scale(below + value)), frame.y(scale(below))
                parts.append(
                    f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 1):.1f}" '
                    f'height="{max(bottom - top, 1):.1f}" rx="1.5" fill="{s.color}">'
                    f"<title>{escape(s.name)}: {value:,}</title></rect>"
                )
                below += value
    return _chart(title, frame, parts, series, marks)


def _scale_ticks(top: float, scale: Callable[[float], float]) -> list[float]:
    """Return the values of ticks for a y axis up to ``top``: evenly spaced numbers, or powers of ten if ``scale`` bends
    it."""
    if scale is float:
        return nice_ticks(top)
    powers = [float(10**n) for n in range(0, max(math.ceil(math.log10(max(top, 1))), 1) + 1)]
    while len(powers) > 1 and powers[-2] >= top:
        powers.pop()
    best = nice_ticks(top)[-1]
    return [0.0, *[p for p in powers if p < best and 0.04 < scale(p) / scale(best) < 0.85], best]


def _chart(title: str, frame: Frame, parts: Sequence[str], series: Sequence[Series], marks: Sequence[Mark]) -> str:
    legend = [(s.name, s.color) for s in series] + sorted({(mark.group, mark.color) for mark in marks})
    inside = "".join([*parts, *(_mark(frame, mark) for mark in marks)])
    named, lines_of_names = _legend(legend)
    above = LEGEND_LINE * (lines_of_names - 1)
    if above:  # the legend needs more than the line that is kept for it: the plot moves down
        inside = f'<g transform="translate(0 {above})">{inside}</g>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {frame.height + above}" role="img" aria-label="{escape(title, quote=True)}" '
        f'xmlns="http://www.w3.org/2000/svg">{inside}{named}</svg>'
    )


def _axes(
    frame: Frame,
    y_ticks: Sequence[float],
    x_ticks: Sequence[tuple[float, str]],
    x_label: str,
    y_label: str,
    scale: Callable[[float], float] = float,
) -> str:
    bottom, right = frame.height - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y_ticks:
        y = frame.y(scale(tick))
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,.0f}</text>')
    for value, text in x_ticks:
        x = frame.x(value)
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}"/>')
        at_edge = x + len(text) * LETTER / 2 > WIDTH  # there it would be cut off
        at, anchor = (WIDTH, "end") if at_edge else (x, "middle")
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 19}" text-anchor="{anchor}">{escape(text)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    x, y = (LEFT + right) / 2, (TOP + bottom) / 2
    centred = '<text class="label" text-anchor="middle"'
    parts.append(f'{centred} x="{x}" y="{frame.height - 8}">{escape(x_label)}</text>')
    parts.append(f'{centred} x="14" y="{y}" transform="rotate(-90 14 {y})">{escape(y_label)}</text>')
    return "".join(parts)


def _line(frame: Frame, x: Sequence[float], series: Series) -> str:
    if not series.values:
        return ""
    path = "M" + " L".join(
        f"{frame.x(at):.1f},{frame.y(value):.1f}" for at, value in zip(x, series.values, strict=True)
    )
    area = ""
    if series.filled:
        below = f"L{frame.x(x[-1]):.1f},{frame.y(0):.1f} L{frame.x(x[0]):.1f},{frame.y(0):.1f}"
        area = f'<path d="{path} {below} Z" fill="{series.color}" opacity="0.14"/>'
    dash = ' stroke-dasharray="6 4"' if series.dashed else ""
    stroke = f'fill="none" stroke="{series.color}" stroke-width="2" stroke-linejoin="round"{dash}'
    return f'{area}<path d="{path}" {stroke}/>'


def _mark(frame: Frame, mark: Mark) -> str:
    x = frame.x(mark.at)
    return (
        f'<g class="mark"><title>{escape(mark.label)} at {mark.at:.1f} s</title>'
        f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{frame.height - BOTTOM}" stroke="{mark.color}" '
        f'stroke-width="1.3" stroke-dasharray="2 3"/>'
        f'<path d="M{x - 4.5:.1f},{TOP - 6} h9 l-4.5,7 z" fill="{mark.color}"/></g>'
    )


def _legend(entries: Sequence[tuple[str, str]]) -> tuple[str, int]:
    """Return the SVG of a legend above the plot (names and colours, left to right), and its number of lines. Widths are
    estimated from the number of characters."""
    parts, x, line = [], float(LEFT), 0
    for name, color in entries:
        width = LEGEND_GAP + LETTER * len(name)
        if x > LEFT and x + width > WIDTH:
            x, line = float(LEFT), line + 1
        y = LEGEND_LINE * line
        parts.append(f'<rect x="{x:.0f}" y="{y + 6}" width="12" height="12" rx="3" fill="{color}"/>')
        parts.append(f'<text class="legend" x="{x + 18:.0f}" y="{y + 16}">{escape(name)}</text>')
        x += width
    return "".join(parts), line + 1
