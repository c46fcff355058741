"""Puts the tables of a run where the documents have a place for them, and the picture beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from picture import picture
from tables import absences, details, goals_table, peers_table, recoveries, report, where

GRPC_BEGIN, GRPC_END = "<!-- grpc: written by bench/peers --grpc -->", "<!-- grpc: end -->"
BEGIN, END = "<!-- peers: written by bench/peers -->", "<!-- peers: end -->"
PICTURE = "peers.svg"


def fill(root: Path, content: dict[str, Any]) -> list[Path]:
    """Write docs/speed.md and docs/peers.svg of a checkout. Returns what was written."""
    if content.get("grpc"):
        return [place(root / "docs" / "speed.md", report(content), GRPC_BEGIN, GRPC_END)]
    speed = [
        where(content),
        goals_table(content),
        f"![bars of the medians of all peers]({PICTURE})",
        peers_table(content),
    ]
    speed += [details(content), recoveries(content), absences(content)]
    (root / "docs" / PICTURE).write_text(picture(content))
    return [
        place(root / "docs" / "speed.md", "\n\n".join(part for part in speed if part)),
        root / "docs" / PICTURE,
    ]


def place(path: Path, text: str, first: str = BEGIN, last: str = END) -> Path:
    """Between two marks. Raises ValueError if the document has none."""
    before, begin, rest = path.read_text().partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{path} has no place for the tables: {first} ... {last}")
    path.write_text(f"{before}{first}\n\n{text}\n\n{last}{after}")
    return path


def page(path: Path, content: dict[str, Any]) -> None:
    """A page (Markdown) with all tables; its picture stands beside it."""
    beside = path.with_suffix(".svg")
    beside.write_text(picture(content))
    path.write_text(f"# EscrowMQ beside its peers\n\n{report(content)}\n\n![bars of all medians]({beside.name})\n")
