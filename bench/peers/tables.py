"""The figures as Markdown: goals and what was had instead, one table of all works and peers, and every figure with what
is beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from figures import summary
from goals import OURS, verdicts
from works import UNITS


def report(content: dict[str, Any]) -> str:
    """All tables."""
    parts = [
        where(content),
        "" if content.get("grpc") else goals_table(content),
        peers_table(content),
        details(content),
        recoveries(content),
        absences(content),
    ]
    return "\n\n".join(part for part in parts if part)


def where(content: dict[str, Any]) -> str:
    """The machine and the settings, in one sentence."""
    machine, settings = content["machine"], content["settings"]
    sync = (
        f"; a 1.3 kB write and its sync took {statistics.median(content['sync_ms']):.2f} ms"
        if content["sync_ms"]
        else ""
    )
    return (
        f"{machine['cpu']}, {machine['cores']} cores for servers and clients together, Python {machine['python']}; "
        f"{settings['rounds']} rounds "
        f"of {settings['seconds']:g} s in turns ({settings['extra_rounds']} of works and peers that no goal names), "
        f"bodies of {settings['body']:,} "
        f"bytes, medians, in brackets the lowest and the highest round{sync}."
    )


def goals_table(content: dict[str, Any]) -> str:
    """Every goal, and what this run had."""
    said = {True: "met", False: "**not met**", None: "?"}
    rows = [(one.work, one.wanted, one.had, said[one.met]) for one in verdicts(content, summary(content))]
    return _markdown(("work", "goal", "this run", ""), rows)


def peers_table(content: dict[str, Any], names: Sequence[str] = ()) -> str:
    """A line per figure, a column per peer; at the head of each column what an answer of that peer says."""
    entries = {(one["work"], one["peer"]): one for one in summary(content)}
    peers = [one for one in content["peers"] if not names or one["name"] in names]
    heads = [f"{one['name']}: {one['promise']}" for one in peers]
    rows = []
    for work in content["works"]:
        for key in work["shows"]:
            cells = [_cell(entries.get((work["name"], peer["name"])), peer, key) for peer in peers]
            if any(any(letter.isdigit() for letter in cell) for cell in cells):
                rows.append((f"{work['name']}, {UNITS[key]}", *cells))
    return _markdown(("work", *heads), rows) if rows else ""


def _cell(entry: dict[str, Any] | None, peer: dict[str, Any], key: str) -> str:
    if entry is None:
        return "not here" if peer["missing"] else "–"
    if not entry["shown"]:
        return "failed"
    text = _spread(entry["shown"][key])
    if beside := entry["beside_rate"]:
        text += f", {beside:,.0f}/s beside it"
    return text + (f", {entry['failed']:,.0f} calls failed" if entry["failed"] else "")


def _spread(shown: dict[str, float]) -> str:
    median, low, high = (number(shown[name]) for name in ("median", "low", "high"))
    return median if low == high else f"{median} ({low} to {high})"


def details(content: dict[str, Any]) -> str:
    """A line per work and peer, the ratio to ours, and what it cost."""
    entries = [one for one in summary(content) if one["shown"]]
    ours = {one["work"]: one["shown"] for one in entries if one["peer"] == OURS}
    rows = []
    for one in entries:
        key = next(iter(one["shown"]))
        mine = ours.get(one["work"], {}).get(key, {}).get("median")
        ratio = (
            f"{mine / one['shown'][key]['median']:.2f}"
            if mine and one["shown"][key]["median"] and one["peer"] != OURS
            else ""
        )
        shown = "; ".join(f"{UNITS[name]} {_spread(values)}" for name, values in one["shown"].items())
        costs = f"{one['server_us']:,.0f}, {one['client_us']:,.0f}"
        rows.append((one["work"], one["peer"], shown, ratio, costs, f"{one['written_per_body_byte']:.2f}"))
    heads = (
        "work",
        "peer",
        "figure",
        "ours : theirs",
        "µs of processor time per message: server, client",
        "bytes written per body byte",
    )
    return _markdown(heads, rows) if rows else ""


def recoveries(content: dict[str, Any]) -> str:
    """Recovery with undecided half messages, and memory."""
    rows = []
    for one in content["recovery"]:
        if one["failure"]:
            rows.append((one["peer"], f"failed: {one['failure']}", "", "", "", ""))
            continue
        serving = asked = question = "–"
        if one["undecided"] and one["asked_s"] is not None:
            serving = f"{one['serving_s']:.1f} s"
            asked = f"{one['asked']:,} in {one['asked_s']:.1f} s"
            question = f"{one['bytes_per_question']:,.0f}"
        memory = ("–", "–")
        if one["queued"]:
            memory = (f"{one['rest_mib']:,.0f} MiB", f"{one['queued_mib']:,.0f} MiB with {one['queued']:,}")
        rows.append((one["peer"], serving, asked, question, *memory))
    if not rows:
        return ""
    undecided = max((one["undecided"] or 0 for one in content["recovery"]), default=0)
    heads = ("peer", f"kill -9 with {undecided:,} undecided: to the first transaction", "all asked, then")
    heads = (*heads, "bytes written per question", "memory after one message", "memory with messages queued")
    shown = len(heads) if any(one["queued"] for one in content["recovery"]) else 4
    return _markdown(heads[:shown], [row[:shown] for row in rows])


def absences(content: dict[str, Any]) -> str:
    """Why a peer, or a figure of it, is not in the tables."""
    lines = [f"- {one['name']} is not in the tables: {one['missing']}" for one in content["peers"] if one["missing"]]
    lines += [f"- {one['name']}: {one['remark']}." for one in content["peers"] if one["remark"] and not one["missing"]]
    for one in content["peers"]:
        reasons: dict[str, list[str]] = {}
        for work, reason in {} if one["missing"] else one["lacks"].items():
            reasons.setdefault(reason, []).append(work)
        lines += [f"- {one['name']}, no figure for {', '.join(works)}: {reason}." for reason, works in reasons.items()]
    for failure in content["failures"]:
        reason = " ".join(failure["reason"].split())[-300:]
        lines.append(
            f"- {failure['peer']}, {failure['work'] or 'all works'}, round {failure['round'] + 1}: failed: {reason}"
        )
    return "\n".join(lines)


def number(value: float) -> str:
    """With as many digits as are worth reading."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in line) + " |" for line in lines
    )
