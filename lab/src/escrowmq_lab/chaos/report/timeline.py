"""The timeline of a run: messages in and out over time, and below it, on the same axis, the faults of each node. Text,
colours and shapes are classes of ``report.css``. A fault is marked by its shape as well as by its colour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape

from escrowmq.pipeline.pages.svg import nice_ticks
from escrowmq_lab.chaos.check import Flow
from escrowmq_lab.chaos.plan import Blow, Happening
from escrowmq_lab.chaos.progress import WORDS
from escrowmq_lab.chaos.report.record import Record

WIDTH, LEFT, RIGHT = 960, 92, 16
HEAD, HALF, DOWN, LANE, FOOT, GAP = 50, 84, 44, 19, 48, 20
"""Heights in pixels: the legends, each half of the flow, the nodes down, one node, the axis, and a gap."""
BAR = 13
"""Height of a fault in pixels."""
THINNEST = 2.5
"""Minimum width of a fault in pixels, to be visible."""
BUCKETS = 400
"""Maximum number of bars of a flow."""
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400)


@dataclass(frozen=True, slots=True)
class Axis:
    """Time from left to right: seconds since 1970."""

    begin: float
    end: float

    def x(self, at: float) -> float:
        """Return the x position in pixels; times outside are at the edge."""
        part = (at - self.begin) / max(self.end - self.begin, 1e-9)
        return LEFT + min(max(part, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    @property
    def span(self) -> float:
        """Length in seconds."""
        return self.end - self.begin


def timeline(record: Record) -> str:
    """Draw the whole timeline as SVG."""
    axis = Axis(record.begun_us / 1e6, max(record.ended_us, record.begun_us + 1_000_000) / 1e6)
    nodes = record.nodes
    flow_top, down_top = HEAD, HEAD + 2 * HALF + GAP
    lanes_top = down_top + DOWN + GAP
    bottom = lanes_top + LANE * len(nodes)
    parts = [
        _draw_settling(axis, record, flow_top, bottom),
        _draw_rounds(axis, record, flow_top, bottom),
        _draw_flow(axis, record.flow, flow_top),
        _draw_down(axis, record, down_top),
        _draw_lanes(axis, record, lanes_top),
        _draw_times(axis, bottom),
        _draw_legend(),
    ]
    height = bottom + FOOT
    title = "Messages over time, and below them what was done to each node"
    return (
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def spark(seconds: Mapping[int, int], axis: Axis, name: str) -> str:
    """Draw a small chart of one flow, for a row of a table."""
    width, height = 100, 24
    _, values = _buckets([seconds], axis, most=50)
    top = max(values, default=0) or 1
    step = width / max(len(values), 1)
    points = "".join(
        f"L{n * step:.1f},{height - value / top * (height - 2):.1f}h{step:.1f}" for n, value in enumerate(values)
    )
    path = f"M0,{height}{points}V{height}Z" if values else ""
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name, quote=True)}" '
        f'xmlns="http://www.w3.org/2000/svg"><path class="out" d="{path}"/></svg>'
    )


def _draw_settling(axis: Axis, record: Record, top: float, bottom: float) -> str:
    """Draw the time after the last fault."""
    left, right = axis.x(record.faults_until_us / 1e6), WIDTH - RIGHT
    if right - left < 1:
        return ""
    band = f'<rect class="calm" x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{bottom - top}"/>'
    line = f'<line class="until" x1="{left:.1f}" y1="{top}" x2="{left:.1f}" y2="{bottom}"/>'
    how = "not at rest" if record.findings.of("unsettled") else "at rest"
    text = f"faults end; {how} after {record.settle_seconds:.0f} s"
    anchor, at = ("start", left + 4) if right - left > 190 else ("end", left - 5)
    return f'{band}{line}<text class="tick" x="{at:.1f}" y="{top + 10}" text-anchor="{anchor}">{text}</text>'


def _draw_rounds(axis: Axis, record: Record, top: float, bottom: float) -> str:
    """Draw a faint line at the begin of each round, and some of their numbers."""
    period, rounds = record.options.period, record.options.rounds
    width = axis.x(axis.begin + period) - LEFT
    every = next((n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if n * width >= 28), rounds)
    parts = []
    for number in range(1, rounds + 1):
        at = axis.begin + (number - 1) * period
        if at > record.faults_until_us / 1e6:
            break
        x, named = axis.x(at), number == 1 or number % every == 0
        if named or width >= 5:
            klass = "grid strong" if named else "grid"
            parts.append(f'<line class="{klass}" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>')
        if named:
            parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 13}" text-anchor="middle">{number}</text>')
    parts.append(f'<text class="label" x="{LEFT - 8}" y="{bottom + 13}" text-anchor="end">round</text>')
    return "".join(parts)


def _draw_flow(axis: Axis, flow: Flow, top: float) -> str:
    """Draw confirmed messages above the middle line, effects below it, on one scale."""
    width, confirmed = _buckets(flow.confirmed.values(), axis)
    _, done = _buckets(flow.effects.values(), axis)
    ticks = nice_ticks(max([*confirmed, *done], default=0) / width, 3)
    middle, scale = top + HALF, (HALF - 4) / ticks[-1]
    parts = []
    for tick in ticks[1:]:
        for y in (middle - tick * scale, middle + tick * scale):
            parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,.0f}</text>')
    for values, sign, klass in ((confirmed, -1, "in"), (done, 1, "out")):
        steps = "".join(
            f"L{axis.x(axis.begin + n * width):.1f},{middle + sign * value / width * scale:.1f}"
            f"H{axis.x(axis.begin + (n + 1) * width):.1f}"
            for n, value in enumerate(values)
        )
        parts.append(f'<path class="{klass}" d="M{LEFT},{middle}{steps}V{middle}Z"/>')
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{middle}" x2="{WIDTH - RIGHT}" y2="{middle}"/>')
    parts.append(f'<text class="tick" x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">0</text>')
    parts.append(_vertical_text("messages a second", middle))
    return "".join(parts)


def _draw_down(axis: Axis, record: Record, top: float) -> str:
    """Draw the number of nodes down over time."""
    nodes = len(record.nodes)
    steps = sorted(step for one in record.happenings for step in ((one.at_us, 1), (one.until_us, -1)))
    bottom, scale = top + DOWN, DOWN / nodes
    path, now = f"M{LEFT},{bottom}", 0
    for at, step in steps:
        now += step
        path += f"H{axis.x(at / 1e6):.1f}V{bottom - max(now, 0) * scale:.1f}"
    ticks = "".join(
        f'<line class="grid" x1="{LEFT}" y1="{bottom - n * scale:.1f}" x2="{WIDTH - RIGHT}" '
        f'y2="{bottom - n * scale:.1f}"/><text class="tick" x="{LEFT - 8}" '
        f'y="{bottom - n * scale + 4:.1f}" text-anchor="end">{n}</text>'
        for n in (0, nodes)
    )
    return f'{ticks}<path class="down" d="{path}V{bottom}Z"/>{_vertical_text("not whole", top + DOWN / 2)}'


def _draw_lanes(axis: Axis, record: Record, top: float) -> str:
    places = {node: n for n, node in enumerate(record.nodes)}
    parts = []
    for node, n in places.items():
        y, name = top + n * LANE + LANE / 2, escape(node.removeprefix("program-"))
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    for one in record.happenings:
        parts.append(_draw_fault(axis, one, top + places[one.node] * LANE + LANE / 2))
    return "".join(parts)


def _draw_fault(axis: Axis, one: Happening, middle: float) -> str:
    left, right = axis.x(one.at_us / 1e6), axis.x(one.until_us / 1e6)
    since = one.at_us / 1e6 - axis.begin
    words = (
        f"round {one.round}: {one.node} {WORDS[one.blow]} at {since:.1f} s,"
        f" for {(one.until_us - one.at_us) / 1e6:.2f} s"
    )
    shape = _draw_shape(one.blow, left, middle, max(right - left, THINNEST))
    return f"<g>{shape}<title>{escape(words)}</title></g>"


def _draw_shape(blow: Blow, x: float, middle: float, width: float) -> str:
    """Draw a fault: a kill is a full bar; others differ in height or are hollow, to be distinct without colours."""
    top, height = middle - BAR / 2, float(BAR)
    if blow is Blow.CUT:
        height = BAR / 2 - 1
    elif blow is Blow.SILENCE:
        top, height = middle + 1, BAR / 2 - 1
    elif blow is Blow.FILL:
        top, height = middle - BAR / 6, BAR / 3
    return f'<rect class="{blow.value}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _draw_times(axis: Axis, bottom: float) -> str:
    step = next((step for step in _STEPS if axis.span / step <= 10), _STEPS[-1])
    parts = [f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}"/>']
    for n in range(int(axis.span // step) + 1):
        x, minutes, seconds = axis.x(axis.begin + n * step), *divmod(n * step, 60)
        anchor = "middle" if n else "start"
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{bottom + 20}" x2="{x:.1f}" y2="{bottom + 25}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 38}" text-anchor="{anchor}">{minutes}:{seconds:02}</text>'
        )
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{bottom + 20}" x2="{WIDTH - RIGHT}" y2="{bottom + 20}"/>')
    parts.append(f'<text class="label" x="{LEFT - 8}" y="{bottom + 38}" text-anchor="end">min:s</text>')
    return "".join(parts)


def _draw_legend() -> str:
    """Draw two lines: the flows, and the kinds of faults."""
    parts, x = [], float(LEFT)
    for klass, words in (
        ("in", "confirmed to producers"),
        ("out", "effects at consumers"),
        ("down", "nodes not whole"),
    ):
        parts.append(f'<rect class="{klass}" x="{x:.0f}" y="4" width="14" height="12"/>')
        parts.append(f'<text class="legend" x="{x + 20:.0f}" y="14">{words}</text>')
        x += 44 + 7 * len(words)
    x = float(LEFT)
    for blow, words in WORDS.items():
        parts.append(_draw_shape(blow, x, 32, 14))
        parts.append(f'<text class="legend" x="{x + 20:.0f}" y="36">{words}</text>')
        x += 44 + 7 * len(words)
    return "".join(parts)


def _vertical_text(text: str, middle: float) -> str:
    return (
        f'<text class="label" x="14" y="{middle:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle:.0f})">{text}</text>'
    )


def _buckets(flows: Iterable[Mapping[int, int]], axis: Axis, most: int = BUCKETS) -> tuple[int, list[int]]:
    """Count rows per bucket from the begin of the axis. Returns a bucket's width in whole seconds, and the counts."""
    width = max(int(axis.span // most) + 1, 1)
    counts = [0] * max(int(axis.span // width) + 1, 1)
    first = int(axis.begin)
    for seconds in flows:
        for second, count in seconds.items():
            if 0 <= (place := (second - first) // width) < len(counts):
                counts[place] += count
    return width, counts
