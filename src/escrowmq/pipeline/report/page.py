"""``report.html`` and ``report.json``: the report as a page, and its numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from escrowmq.pipeline.pages import charts, svg
from escrowmq.pipeline.pages.html import document, figure, figures, section, table
from escrowmq.pipeline.pages.svg import AMBER, BLUE, GREEN, RED, SLATE, VIOLET, Series
from escrowmq.pipeline.report.measures import Report

JSON, PAGE = "report.json", "report.html"

_TOPIC_COLORS = (BLUE, GREEN, VIOLET, AMBER, "#0891b2", "#be185d", "#4d7c0f")
_MOST = 50
"""Rows of a table."""
_OUTCOMES = {"committed": BLUE, "rolled_back": AMBER, "expired": RED}


def write_report(folder: Path, report: Report) -> None:
    """Write ``report.json`` and ``report.html`` into ``folder``, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report.to_json(), indent=2)
    series = re.sub(r"\[[\d,\s]+\]", lambda found: " ".join(found[0].split()), text)  # numbers side by side
    (folder / JSON).write_text(series + "\n", encoding="utf-8")
    (folder / PAGE).write_text(page(report), encoding="utf-8")


def page(report: Report) -> str:
    """Return the whole report as the text of an HTML page."""
    parts = [_head(report), _volumes(report), _latency(report), _checks(report), _waits(report), _escrow(report)]
    when = f"as of {_moment(report.as_of_us)} UTC" if report.as_of_us else ""
    return document("EscrowMQ report", "".join(parts), command=f"escrowmq report --url {report.url}", made=when)


def _head(report: Report) -> str:
    when = f"{_moment(report.as_of_us)} UTC" if report.as_of_us else "an empty log"
    lag, dead = (sum(group[name] for group in report.consumers) for name in ("lag", "dead"))
    parked = sum(group["parked"] for group in report.producers)
    counts = {name: _number(report, name) for name in ("transactions", "committed", "rolled_back")}
    counts = {"messages": sum(topic["messages"] for topic in report.topics), **counts}
    counts["checks sent"] = _number(report, "asked")
    care = [
        figure("in escrow", _number(report, "undecided")),
        figure("parked", parked, "bad" if parked else "good"),
        figure("dead letters", dead, "bad" if dead else "good"),
        figure("consumer lag", lag),
    ]
    unseen = f'<p class="note">It may be incomplete: {escape(report.incomplete)}.</p>' if report.incomplete else ""
    return (
        f'<h1>What is in the broker</h1><p class="lead"><code>{escape(report.url)}</code> · as of '
        f"{when}</p>{unseen}{figures(*map(figure, counts, counts.values()))}{figures(*care)}"
    )


def _volumes(report: Report) -> str:
    if not report.topics:
        return section("Messages", "There is no topic yet.", "")
    shown = [topic["topic"] for topic in report.topics[: len(_TOPIC_COLORS)] if topic["messages"]]
    series = [Series(name, color, report.volumes[name]) for name, color in zip(shown, _TOPIC_COLORS, strict=False)]
    rest = [values for name, values in report.volumes.items() if name not in shown]
    if rest:
        series.append(Series("others", SLATE, [sum(values) for values in zip(*rest, strict=True)]))
    chart = _over_time(report, "Messages over time", series, "messages") if series else ""
    rows = []
    for topic in report.topics[:_MOST]:
        counts = [f"{topic[name]:,}" for name in ("messages", "committed")]
        times = ["" if at is None else _moment(at * 1_000_000) for at in (topic["first_s"], topic["last_s"])]
        rows.append([escape(topic["topic"]), *counts, *times, _trend(report.volumes.get(topic["topic"], []))])
    heads = ["topic", "#messages", "#of transactions", "#first", "#last", "#trend"]
    more = f" {len(report.topics) - _MOST} more topics are not listed." if len(report.topics) > _MOST else ""
    note = "Visible messages. The trend compares the last quarter of the time shown with the quarter before."
    return section("Messages", note + more, chart + table(heads, rows))


def _trend(values: Sequence[int]) -> str:
    """Return a text such as ``↑ +12%``: the sum of the last quarter of ``values`` compared with the quarter before; ""
    if both are 0."""
    size = len(values) // 4
    before, now = sum(values[-2 * size : -size]), sum(values[-size:])
    if not size or not (before or now):
        return ""
    if not before:
        return "new"
    change = (now - before) / before
    arrow = "→" if abs(change) < 0.05 else "↑" if change > 0 else "↓"
    return f"{arrow} {change:+.0%}".replace("-0%", "+0%")


def _latency(report: Report) -> str:
    if not report.latencies:
        return section("How long decisions take", "No transaction has been decided yet.", "")
    steps = report.latency_steps
    chart = charts.latency((_words(state), _OUTCOMES.get(state, SLATE), steps[state]) for state in steps)
    times = ("p50_us", "p95_us", "p99_us", "most_us")
    rows = [
        [_words(row["state"]), f"{row['transactions']:,}", *(_short(row[name]) for name in times)]
        for row in report.latencies
    ]
    heads = ["outcome", "#transactions", "#half within", "#95 % within", "#99 % within", "#longest"]
    note = "From the half message to the decision that was first, both durable."
    return section("How long decisions take", note, chart + table(heads, rows))


def _checks(report: Report) -> str:
    counts = {name: sum(values) for name, values in report.ended.items()}
    parked = sum(group["parked"] for group in report.producers)
    shown = {
        "checks sent": _number(report, "asked"),
        "transactions checked": _number(report, "asked_about"),
        "decided by a check": counts.get("check", 0),
        "checks exhausted": counts.get("exhausted", 0) + parked,
        "by an operator": counts.get("operator", 0),
    }
    rare = [
        Series(words, color, report.ended[name])
        for name, (words, color) in charts.DECIDERS.items()
        if name in report.ended and name != "producer"
    ]
    title = "Decisions that were not the producer's own"
    chart = _over_time(report, title, rare, "transactions", height=charts.HEIGHT) if rare else ""
    note = "Transactions whose producer did not decide them; over time: the decisions of others."
    return section("Check-backs", note, figures(*map(figure, shown, shown.values())) + chart)


def _waits(report: Report) -> str:
    held = [group for group in report.producers if group["open"] or group["parked"]]
    rows = [
        [
            escape(group["group"]),
            f"{group['open']:,}",
            f"{group['parked']:,}",
            _short(report.as_of_us - group["oldest_us"]) if group["oldest_us"] else "",
            _code(group["broker"]),
        ]
        for group in sorted(held, key=lambda group: -(group["open"] + group["parked"]))[:_MOST]
    ]
    inside = table(["producer group", "#open", "#parked", "#oldest open", "broker"], rows) if rows else ""
    oldest = report.totals.get("oldest_us")
    age = f" The oldest has waited {_short(report.as_of_us - oldest)}." if oldest else ""
    text = f"Transactions without a decision, by producer group.{age}" if rows else "All transactions are decided."
    escrow = section("Pending decisions", text, inside)
    behind = sorted(report.consumers, key=lambda group: -group["lag"])[:_MOST]
    names = ("waiting", "leased", "retrying", "lag", "dead")
    rows = []
    for g in behind:
        counts = [f"{g[name]:,}" for name in names]
        rows.append([escape(g["group"]), escape(", ".join(g["topics"])), *counts, _code(g["broker"])])
    heads = ["consumer group", "topics", "#waiting", "#leased", "#retrying", "#lag", "#dead letters", "broker"]
    text = "Messages that a group has not acknowledged yet." if rows else "There is no consumer group."
    causes = {"not received": "waiting", "in flight": "leased", "to be retried": "retrying", "dead letters": "dead"}
    pending = {cause: sum(group[name] for group in report.consumers) for cause, name in causes.items()}
    inside = figures(*map(figure, pending, pending.values())) + table(heads, rows) if rows else ""
    return escrow + section("Pending messages", text, inside)


def _escrow(report: Report) -> str:
    if not any(report.begun):
        return ""
    axis = {"x_ticks": _ticks(report), "x_label": "time (UTC)"}
    chart = charts.in_escrow(report.begun, report.ended.values(), report.bucket_us / 1e6, **axis)
    return section("In escrow over time", "Transactions that were prepared and not yet decided.", chart)


def _over_time(report: Report, title: str, series: Sequence[Series], unit: str, height: int = svg.HEIGHT) -> str:
    edges = [n * report.bucket_us / 1e6 for n in range(len(series[0].values) + 1)]
    rates = [replace(one, values=[n * 60e6 / report.bucket_us for n in one.values]) for one in series]
    label = f"{unit} per minute"
    return svg.bars(title, edges, rates, x_ticks=_ticks(report), x_label="time (UTC)", y_label=label, height=height)


_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)


def _ticks(report: Report) -> list[tuple[float, str]]:
    """Return the ticks of the time axis, at round times of the clock: seconds after the report's start, and their
    text."""
    seconds = len(report.begun) * report.bucket_us // 1_000_000
    step = next((step for step in _STEPS if seconds / step <= 8), -(-seconds // 8 // 86_400) * 86_400)
    start = report.start_us // 1_000_000
    form = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86_400 else "%Y-%m-%d"
    first = -(-start // step) * step
    return [
        (at - start, datetime.fromtimestamp(at, UTC).strftime(form)) for at in range(first, start + seconds + 1, step)
    ]


def _number(report: Report, name: str) -> int:
    return report.totals.get(name) or 0


def _moment(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _short(us: float) -> str:
    """Return a duration in microseconds as a text of three digits, in the unit that fits: ``1.5 h``."""
    for unit, size in (("d", 86_400e6), ("h", 3_600e6), ("min", 60e6), ("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} µs"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _words(state: str) -> str:
    return state.replace("_", " ")
