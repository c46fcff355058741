"""The figures as a table (Markdown), and as a page with a picture."""

from __future__ import annotations

from html import escape
from typing import Any

WIDTH, ROW, LEFT = 960, 22, 330
OURS, OTHERS = "#5b3fd6", "#9aa3b2"


def table(content: dict[str, Any]) -> str:
    """A line per work and peer, the ratio to ours beside."""
    where, settings = content["machine"], content["settings"]
    lines = [
        f"{where['cpu']}, {where['cores']} cores, Python {where['python']}; {settings['rounds']} rounds of "
        f"{settings['seconds']:g} s in turns, bodies of {settings['body']} bytes",
        "",
        "| work | peer | median (low to high) | ours : theirs | server, client µs per message | bytes written per message |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    ours = {one["work"]: one["median"] for one in content["figures"] if one["peer"] == "EscrowMQ"}
    for one in content["figures"]:
        mine = ours.get(one["work"])
        ratio = f"{mine / one['median']:.2f}" if mine and one["median"] and one["peer"] != "EscrowMQ" else ""
        failed = f", {one['failed']:.0f} failed" if one["failed"] else ""
        lines.append(
            f"| {one['work']} | {one['peer']} | {_number(one['median'])} ({_number(one['low'])} to {_number(one['high'])}{failed}) | {ratio} "
            f"| {one['server_us']:,.0f}, {one['client_us']:,.0f} | {one['written_bytes']:,.0f} |"
        )
    for one in content["recovery"]:
        lines += ["", *_recovery(one)]
    lines += ["", *(f"- {peer}: {promise}" for peer, promise in content["promises"].items())]
    return "\n".join(lines)


def _recovery(one: dict[str, Any]) -> list[str]:
    lines = []
    if one["undecided"]:
        lines.append(
            f"{one['peer']}: {one['undecided']:,} undecided: kill -9 to the first transaction {one['serving_s']:.1f} s, "
            f"{one['asked']:,} asked {one['asked_s']:.1f} s later"
        )
    if one["queued"]:
        lines.append(
            f"{one['peer']}: memory {one['rest_mib']:,.0f} MiB at rest, {one['queued_mib']:,.0f} with {one['queued']:,} queued"
        )
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def page(content: dict[str, Any]) -> str:
    """A page of its own: the bars of every work, then the table as text."""
    works = list(dict.fromkeys(one["work"] for one in content["figures"]))
    charts = "".join(_bars(work, [one for one in content["figures"] if one["work"] == work]) for work in works)
    style = "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}pre{white-space:pre-wrap;font-size:12px}"
    return (
        f'<!doctype html><meta charset="utf-8"><title>EscrowMQ beside its peers</title><style>{style}</style>'
        f"<h1>EscrowMQ beside its peers</h1>{charts}<pre>{escape(table(content))}</pre>\n"
    )


def _bars(work: str, figures: list[dict[str, Any]]) -> str:
    """One chart: a bar per peer from zero, a thin line from the lowest to the highest round."""
    top = max(one["high"] for one in figures) or 1.0
    scale = (WIDTH - LEFT - 150) / top
    height = 34 + ROW * len(figures)
    better = "less" if figures[0]["less_is_better"] else "more"
    parts = [f'<text x="0" y="20" font-weight="600">{escape(work)} ({better} is better)</text>']
    for number, one in enumerate(figures):
        y = 34 + ROW * number
        color = OURS if one["peer"] == "EscrowMQ" else OTHERS
        end = LEFT + one["high"] * scale
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(one["peer"])}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{one["median"] * scale:.1f}" height="{ROW - 6}" fill="{color}"/>'
            f'<line x1="{LEFT + one["low"] * scale:.1f}" x2="{end:.1f}" y1="{y + 8}" y2="{y + 8}" stroke="#222"/>'
            f'<text x="{end + 8:.1f}" y="{y + 13}">{_number(one["median"])}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {height}" font-size="13" font-family="inherit">{"".join(parts)}</svg>'
