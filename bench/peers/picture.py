"""The figures as one picture (SVG): a chart per work, a bar per peer, a thin line from its lowest to its highest
round."""

from __future__ import annotations

from html import escape
from typing import Any

from figures import summary
from tables import number
from works import UNITS

WIDTH, ROW, HEAD, LEFT, RIGHT, GAP = 960, 22, 30, 230, 130, 14
OURS, VARIANTS, OTHERS, INK, SOFT = "#5b3fd6", "#a99be8", "#9aa3b2", "#1f2937", "#64748b"


def picture(content: dict[str, Any]) -> str:
    """An SVG file."""
    parts, y = [], 0
    entries = [one for one in summary(content) if one["shown"]]
    for work in content["works"]:
        mine = [one for one in entries if one["work"] == work["name"]]
        if mine:
            parts.append(f'<g transform="translate(0 {y})">{_bars(work, mine)}</g>')
            y += HEAD + ROW * len(mine) + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {max(y, 1)}" role="img" aria-label="EscrowMQ '
        'beside its peers" '
        f'font-family="system-ui, DejaVu Sans, sans-serif" font-size="13" fill="{INK}">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _bars(work: dict[str, Any], entries: list[dict[str, Any]]) -> str:
    key = work["shows"][0]
    better = "more is better" if key == "rate" else "less is better"
    top = max(one["shown"][key]["high"] for one in entries) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / top
    parts = [
        f'<text x="8" y="20" font-weight="600">{escape(work["name"])}, {UNITS[key]}</text>'
        f'<text x="{WIDTH - 8}" y="20" text-anchor="end" fill="{SOFT}">{better}</text>'
    ]
    for row, one in enumerate(entries):
        y = HEAD + ROW * row
        shown = one["shown"][key]
        ours = one["peer"].startswith("EscrowMQ")
        color = OURS if one["peer"] == "EscrowMQ" else VARIANTS if ours else OTHERS
        end = LEFT + shown["high"] * scale
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(one["peer"])}</text>'
            f'<rect x="{LEFT}" y="{y + 1}" width="{max(shown["median"] * scale, 1):.1f}" height="{ROW - 6}" rx="2" '
            f'fill="{color}">'
            f"<title>{escape(one['peer'])}: {number(shown['low'])} to {number(shown['high'])}</title></rect>"
            f'<line x1="{LEFT + shown["low"] * scale:.1f}" x2="{end:.1f}" y1="{y + 9}" y2="{y + 9}" stroke="{INK}"/>'
            f'<text x="{end + 8:.1f}" y="{y + 13}">{number(shown["median"])}</text>'
        )
    return "".join(parts)
