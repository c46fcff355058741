"""Small charts of numbers over time, as SVG without scripts or inline styles."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

WIDTH, HEIGHT, EDGE = 240, 48, 2
_PICTURE = Markup(
    '<svg class="spark" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" aria-label="{label}">'
    '<path class="under" d="{under}"/>{lines}</svg>'
)
_LINE = Markup('<path class="line" d="{}"/>')


def spark(times: Sequence[float], values: Sequence[float | None], span: float, label: str) -> Markup:
    """Draw ``values`` at ``times`` (seconds, ascending) over the last ``span`` seconds. The line has gaps where a value
    is None. The axis starts at zero, so that a flat line near the top is normal and a rise is visible."""
    points = [(time, value) for time, value in zip(times, values, strict=True) if not times or time >= times[-1] - span]
    known = [value for _, value in points if value is not None]
    if not known:
        return Markup("")
    top = max(known) or 1.0
    last = times[-1]
    pieces: list[list[tuple[float, float]]] = [[]]
    for time, value in points:
        if value is None:
            pieces.append([])
            continue
        across = WIDTH - EDGE - (last - time) / span * (WIDTH - 2 * EDGE)
        pieces[-1].append((across, HEIGHT - EDGE - value / top * (HEIGHT - 2 * EDGE)))
    drawn = [piece for piece in pieces if piece]
    ground = HEIGHT - EDGE
    under = " ".join(
        f"M{piece[0][0]:.1f} {ground} L{_points(piece)} L{piece[-1][0]:.1f} {ground} Z"
        for piece in drawn
        if len(piece) > 1
    )
    lines = Markup("").join(_LINE.format(f"M{_points(piece if len(piece) > 1 else piece * 2)}") for piece in drawn)
    return _PICTURE.format(width=WIDTH, height=HEIGHT, label=label, under=under, lines=lines)


def _points(piece: Sequence[tuple[float, float]]) -> str:
    return " L".join(f"{across:.1f} {down:.1f}" for across, down in piece)
