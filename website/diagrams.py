"""Draw the diagrams of docs/pictures: one SVG file each, which follows the light or dark colours of the reader."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #24292f }
.paper { fill: #fff }
.who { font-weight: 600 }
.small { font-size: 12px; fill: #57606a; stroke: #fff; stroke-width: 4px; paint-order: stroke }
.small.in { stroke: none }
.line { stroke: #57606a; fill: none }
.dash { stroke-dasharray: 5 4 }
.life { stroke: #d0d7de }
.box { fill: #f6f8fa; stroke: #57606a }
.tip { fill: #57606a }
.note { fill: #ddf4ff; stroke: #54aeff }
.bad { fill: #ffebe9; stroke: #ff8182 }
.escrow { fill: #fff8c5; stroke: #d4a72c }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.paper { fill: #0d1117 }
.small { fill: #9198a1; stroke: #0d1117 }
.line { stroke: #9198a1 }
.life { stroke: #3d444d }
.box { fill: #151b23; stroke: #9198a1 }
.tip { fill: #9198a1 }
.note { fill: #121d2f; stroke: #388bfd }
.bad { fill: #25171c; stroke: #f85149 }
.escrow { fill: #272115; stroke: #bb8009 }
}
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>
"""
STEP, TOP, SIDE = 44, 84, 110

Step = tuple[int, int, str, str]
"""From, to, text, kind: ``""`` is a request, ``dash`` a request that may be lost or comes later, ``note`` a note over
the participants *from* to *to*, and ``bad`` a note about a failure."""

DIAGRAMS: dict[str, tuple[str, list[str], list[Step]]] = {
    "barrier": (
        "A half message with a barrier",
        ["your program", "your database", "broker", "consumer"],
        [
            (0, 2, "send: half message", ""),
            (2, 2, "durable, invisible", "note"),
            (0, 1, "change + row, one COMMIT", ""),
            (0, 2, "COMMIT", "dash"),
            (0, 2, "crash before COMMIT? check-back", "bad"),
            (2, 0, "what became of it?", "dash"),
            (0, 1, "is the row there?", "dash"),
            (0, 2, "COMMIT or ROLLBACK", "dash"),
            (2, 3, "the message, visible now", ""),
            (3, 2, "acknowledge, after the effect", ""),
        ],
    ),
    "outbox": (
        "A message table (outbox) and its relay",
        ["your program", "your database", "relay", "broker", "consumer"],
        [
            (0, 1, "change + message, COMMIT", ""),
            (2, 1, "lease rows, in order per key", ""),
            (2, 3, "send, under the row's id", ""),
            (3, 2, "durable", ""),
            (2, 1, "delete the rows", ""),
            (1, 3, "crash? the rows are sent again under the same ids: no second copy", "bad"),
            (3, 4, "the message", ""),
            (4, 3, "acknowledge, after mark + effect", ""),
        ],
    ),
    "modes": (
        "A producer-driven mode (Driven)",
        ["your program", "your database", "broker", "consumer"],
        [
            (0, 1, "row: STORED", ""),
            (0, 2, "prepare, under the row's id", ""),
            (0, 1, "change + row: COMMITTING", ""),
            (0, 2, "commit", ""),
            (2, 0, "committed", ""),
            (0, 1, "delete the row", ""),
            (0, 2, "crash? redrive() finishes each row from its state", "bad"),
            (2, 3, "the message", ""),
            (3, 2, "acknowledge, after mark + effect", ""),
        ],
    ),
    "compensation": (
        "Compensation: nobody can be asked",
        ["your program", "your database", "broker", "consumer", "scheduler"],
        [
            (0, 2, "send: half message", ""),
            (0, 1, "change + announced id, one COMMIT", ""),
            (0, 2, "COMMIT, one way: it may be lost", "dash"),
            (2, 3, "the message, if COMMIT arrived", "dash"),
            (3, 4, "finished id, after mark + effect", "dash"),
            (1, 4, "announced ids", ""),
            (1, 4, "announced and not finished: look it up, repair it once", "note"),
            (4, 2, "commit, by id", "dash"),
        ],
    ),
}


def draw_sequence(title: str, names: list[str], steps: list[Step]) -> str:
    """Draw a sequence diagram as SVG: a column for each participant, a row for each step."""
    gap = 200
    width, height = 2 * SIDE + gap * (len(names) - 1), TOP + STEP * len(steps) + 14
    at = [SIDE + gap * column for column in range(len(names))]
    parts = []
    for x, name in zip(at, names, strict=True):
        parts.append(f'<path class="life" d="M{x} 52V{height - 10}"/>')
        parts.append(f'<rect class="box" x="{x - 70}" y="16" width="140" height="36" rx="6"/>')
        parts.append(f'<text class="who" x="{x}" y="39" text-anchor="middle">{escape(name)}</text>')
    for row, (start, end, text, kind) in enumerate(steps):
        y = TOP + STEP * row + 16
        middle = (at[start] + at[end]) / 2
        if kind in ("note", "bad"):
            half = max((at[end] - at[start]) / 2 + 40, 4 * len(text))
            middle = min(max(middle, half + 6), width - half - 6)
            parts.append(
                f'<rect class="{kind}" x="{middle - half:g}" y="{y - 22}" width="{2 * half:g}" height="30" rx="6"/>'
            )
            parts.append(f'<text x="{middle:g}" y="{y - 2}" text-anchor="middle">{escape(text)}</text>')
            continue
        inset = 2 if end > start else -2
        parts.append(
            f'<path class="line {kind}" marker-end="url(#tip)" d="M{at[start] + inset} {y}H{at[end] - inset}"/>'
        )
        parts.append(f'<text class="small" x="{middle:g}" y="{y - 7}" text-anchor="middle">{escape(text)}</text>')
    return wrap(title, width, height, parts)


def wrap(title: str, width: int, height: int, parts: list[str]) -> str:
    """Wrap the parts of a drawing into an SVG document."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    paper = f'<rect class="paper" width="{width}" height="{height}" rx="8"/>'
    return f"{head}\n<title>{escape(title)}</title>\n{STYLE}{paper}\n" + "\n".join(parts) + "\n</svg>\n"


def draw_idea() -> str:
    """Draw the picture of the README: a program, a broker with its escrow, and a consumer."""

    def box(x: int, y: int, width: int, height: int, kind: str, *lines: str) -> list[str]:
        found = [f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>']
        first = y + height / 2 - 9 * (len(lines) - 1) + 5
        for number, text in enumerate(lines):
            style = "who" if number == 0 else "small in"
            found.append(
                f'<text class="{style}" x="{x + width / 2:g}" y="{first + 18 * number:g}" text-anchor="middle">'
                f"{escape(text)}</text>"
            )
        return found

    def arrow(path: str, text: str, x: int, y: int, kind: str = "") -> list[str]:
        return [
            f'<path class="line {kind}" marker-end="url(#tip)" d="{path}"/>',
            f'<text class="small" x="{x}" y="{y}" text-anchor="middle">{escape(text)}</text>',
        ]

    parts = [
        *box(20, 30, 170, 64, "box", "your program", "one local transaction"),
        *box(20, 206, 170, 64, "box", "your database", "change + one row"),
        '<rect class="box" x="460" y="10" width="190" height="280" rx="8"/>',
        '<text class="who" x="555" y="36" text-anchor="middle">broker, one log</text>',
        *box(475, 56, 160, 64, "escrow", "in escrow", "durable, invisible"),
        *box(475, 206, 160, 64, "note", "visible", "offset in a queue"),
        *box(770, 206, 140, 64, "box", "consumers", "effect, acknowledge"),
        *arrow("M190 50H473", "1  half message", 326, 43),
        *arrow("M60 94V204", "2  COMMIT", 94, 154),
        *arrow("M190 78H473", "3  COMMIT", 326, 71),
        *arrow("M555 120V204", "decided", 582, 168),
        *arrow("M473 108C390 108 350 224 192 224", "crash before 3? check-back", 288, 142, "dash"),
        *arrow("M190 252H473", "the row answers: COMMIT or ROLLBACK", 326, 270, "dash"),
        *arrow("M635 238H768", "4  receive", 708, 230),
    ]
    return wrap("EscrowMQ: a message stays in escrow until your database transaction has decided", 930, 300, parts)


def draw() -> dict[str, str]:
    """Draw all diagrams. Returns their texts by the name of the file."""
    found = {f"{name}.svg": draw_sequence(*diagram) for name, diagram in DIAGRAMS.items()}
    return found | {"idea.svg": draw_idea()}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    for name, text in draw().items():
        (folder / name).write_text(text)
