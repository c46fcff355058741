"""``report.html``: the result of an audit and its charts, on one page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from escrowmq.pipeline import timeline
from escrowmq.pipeline.audit.events import Events
from escrowmq.pipeline.audit.verdict import Verdict
from escrowmq.pipeline.coverage import describe_beginnings
from escrowmq.pipeline.pages import charts, svg
from escrowmq.pipeline.pages.html import AMBER, BLUE, GREEN, RED, SLATE, VIOLET, document, figure, section, table
from escrowmq.pipeline.pages.svg import Mark, Series

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NAME = "report.html"
BUCKETS = 160
"""Number of points in time in a chart."""

_KILLS = {"broker": (RED, "broker killed"), "shop": ("#be185d", "shop killed")}
_DECIDERS = (
    ("producer", "decided by the producer", BLUE),
    ("check", "decided by a check-back", GREEN),
    ("operator", "decided by the operator", AMBER),
    ("exhausted", "checks exhausted", RED),
    ("retention", "expired", SLATE),
)
_CONSUMER_COLORS = (VIOLET, "#0891b2", "#4d7c0f")
_MOST_ROWS = 100


@dataclass(frozen=True, slots=True)
class Pictures:
    """Counts by event and bucket of ``bucket_us`` from ``start_us`` (the first half message), and latencies by decider
    and step."""

    start_us: int
    bucket_us: int
    over_time: dict[str, list[int]]
    latencies: dict[str, dict[int, int]]

    @classmethod
    def of(cls, transactions: DataFrame, first_us: int | None, last_us: int | None) -> Pictures:
        """Collect the numbers of :func:`timeline.unpack`; empty if there are no transactions."""
        if first_us is None or last_us is None:
            return cls(0, 1, {}, {})
        bucket_us = max((last_us - first_us) // BUCKETS + 1, 1)
        counts = timeline.collect_counts(timeline.count_over_time(transactions, "state", first_us, bucket_us))
        latencies = timeline.collect_counts(timeline.count_latencies(transactions, "decided_by"))
        return cls(first_us, bucket_us, timeline.make_series(counts, BUCKETS), latencies)


def write_page(folder: Path, verdict: Verdict, pictures: Pictures, events: Events) -> Path:
    """Write ``report.html`` into the run folder. Returns its path."""
    path = folder / NAME
    made = f"made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    path.write_text(page(verdict, pictures, events, command=f"escrowmq audit {folder}", made=made), encoding="utf-8")
    return path


def page(verdict: Verdict, pictures: Pictures, events: Events, *, command: str = "", made: str = "") -> str:
    """Return the whole page as text. Its foot states how and when it was made."""
    parts = [_head(verdict), _charts(pictures, events), _comparisons(verdict), _findings(verdict)]
    parts += [_kills(events, pictures), _leaders(events, pictures)]
    return document("EscrowMQ audit", "".join(parts), command=command, made=made)


def _head(verdict: Verdict) -> str:
    words = "All sides agree" if verdict.agrees else "The sides disagree"
    mood = "agree" if verdict.agrees else "disagree"
    unseen = (
        f'<p class="note">The log may be incomplete: {escape(verdict.incomplete)}.</p>' if verdict.incomplete else ""
    )
    plain = ("orders", "committed", "rolled_back", "consumed", "kills", "checks")
    judged = ("lost", "repeated", "altered", "leaked", "orphaned")
    figures = "".join(figure(name, getattr(verdict, name), "") for name in plain)
    judgement = "".join(figure(name, v := getattr(verdict, name), "bad" if v else "good") for name in judged)
    return (
        "<h1>Did every message reach everyone it concerns, once?</h1>"
        '<p class="lead">The producer’s database, the broker’s log and every consumer’s database, '
        "compared by id and content on Spark.</p>"
        f'<div class="verdict {mood}">{words}</div>{unseen}<div class="figures">{figures}</div>'
        f'<div class="figures">{judgement}</div>'
    )


def _charts(pictures: Pictures, events: Events) -> str:
    if not pictures.over_time:
        return ""
    return _states(pictures, events) + _escrow(pictures, events) + _draw_checks(pictures, events) + _latency(pictures)


def _states(pictures: Pictures, events: Events) -> str:
    series = [
        Series(label, color, _cumulative(pictures, event))
        for event, label, color in (
            ("prepared", "prepared", SLATE),
            ("committed", "committed", BLUE),
            ("rolled_back", "rolled back", AMBER),
        )
    ]
    consumers = [who for who in dict.fromkeys(e["who"] for e in events.of("progress")) if who != "shop"]
    for who, color in zip(consumers, _CONSUMER_COLORS, strict=False):
        steps = [(_seconds(e["at_us"], pictures), e["number"]) for e in events.of("progress") if e["who"] == who]
        steps = [(0.0, 0), *[step for step in steps if step[0] > 0]]
        xs, values = [step[0] for step in steps], [step[1] for step in steps]
        series.append(Series(f"{who} applied", color, values, dashed=True, x=xs))
    axes = _time_axis(pictures, events)
    chart = svg.lines("Transactions over time", _times(pictures), series, y_label="transactions", **axes)
    return section(
        "States over time",
        "How many transactions were prepared and decided, and how many messages each consumer had applied. "
        "A triangle marks a kill -9.",
        chart,
    )


def _escrow(pictures: Pictures, events: Events) -> str:
    counts = dict(pictures.over_time)
    begun = counts.pop("prepared", [0] * BUCKETS)
    chart = charts.in_escrow(begun, counts.values(), pictures.bucket_us / 1e6, **_time_axis(pictures, events))
    return section(
        "In escrow",
        "Transactions whose half messages are stored and whose decision is still out. What a killed producer leaves "
        "behind stays here until the check-back settles it.",
        chart,
    )


def _draw_checks(pictures: Pictures, events: Events) -> str:
    asked = events.of("asked")
    if not asked:
        return ""
    wide = _times(pictures)[::2]
    answers = {
        "commit": ("answered commit", GREEN),
        "rollback": ("answered rollback", AMBER),
        "unknown": ("unknown", SLATE),
    }
    series = []
    for answer, (label, color) in answers.items():
        at = Counter(
            min(max(int(_seconds(e["at_us"], pictures) / (wide[1] - wide[0])), 0), len(wide) - 2)
            for e in asked
            if e["answer"] == answer
        )
        if at:
            series.append(Series(label, color, [at[n] for n in range(len(wide) - 1)]))
    chart = svg.bars(
        "Checks asked",
        wide,
        series,
        x_ticks=[(t, f"{t:g} s") for t in svg.nice_ticks(wide[-1], 8) if t <= wide[-1]],
        y_label="questions",
        height=charts.HEIGHT,
        **_time_axis(pictures, events),
    )
    return section(
        "Checks asked",
        "Each bar counts questions of the broker to the shop about transactions that stayed undecided too long, by the "
        "shop’s answer.",
        chart,
    )


def _latency(pictures: Pictures) -> str:
    found = pictures.latencies
    chart = charts.latency((label, color, found[by]) for by, label, color in _DECIDERS if by in found)
    note = "How long a transaction was in escrow, by who decided it."
    return section("Latency of decisions", note, chart) if chart else ""


def _comparisons(verdict: Verdict) -> str:
    rows = [
        [escape(s.expected), escape(s.found), *(f"{n:,}" for n in (s.ids, s.expected_rows, s.found_rows, s.wrong_ids))]
        for s in verdict.comparisons
    ]
    heads = ["what must be there", "where it must be", "#ids", "#rows expected", "#rows found", "#ids that differ"]
    note = "Each line lays two sides beside each other, id by id."
    if verdict.beginnings:
        begin = escape(describe_beginnings(verdict.beginnings))
        note += (
            f" The log does not hold all that was ever in it ({begin}): what left before, by retention or by hand, "
            "cannot be compared."
        )
    return section("What was compared", note, table(heads, rows))


def _findings(verdict: Verdict) -> str:
    if not verdict.findings:
        return ""
    shown = verdict.findings[:_MOST_ROWS]
    rows = [
        [
            f'<td class="kind">{escape(f.kind)}</td>',
            f"<code>{escape(f.id)}</code>",
            escape(f.between),
            str(f.expected),
            str(f.found),
            escape(f.reason),
        ]
        for f in shown
    ]
    more = verdict.findings_in_all - len(shown)
    note = f"{more:,} more are not shown." if more > 0 else ""
    return section("Findings", note, table(["kind", "id", "between", "#expected", "#found", "why"], rows))


def _kills(events: Events, pictures: Pictures) -> str:
    if not events.kills:
        return ""
    rows = [
        [f"{_seconds(e['at_us'], pictures):.1f} s", escape(e["who"]), escape(e.get("where", ""))] for e in events.kills
    ]
    return section(
        "Kills", "Each process was ended with SIGKILL and started again.", table(["#at", "who", "where"], rows)
    )


def _leaders(events: Events, pictures: Pictures) -> str:
    """Return when each broker led, for brokers that share a log; empty for others."""
    rows: list[list[str]] = []
    for e in sorted([*events.of("leads"), *events.of("answered")], key=lambda e: int(e["at_us"])):
        after = f"{e['seconds']:.2f} s" if "seconds" in e else ""
        if e["event"] == "leads":
            at = f"{max(_seconds(e['at_us'], pictures), 0.0):.1f} s"
            rows.append([at, escape(e["who"]), str(e["epoch"]), after, ""])
        elif rows:
            rows[-1][-1] = after
    if not rows:
        return ""
    note = (
        "Brokers that share a log: who led, and how long after the last leader’s kill it did. An order counts as the "
        "first if it was begun after the kill."
    )
    heads = ["#at", "who leads", "#epoch", "#after the kill", "#first order placed after"]
    return section("Changes of leader", note, table(heads, rows))


def _times(pictures: Pictures) -> list[float]:
    """Return seconds at the end of each bucket, 0 in front."""
    return [n * pictures.bucket_us / 1e6 for n in range(BUCKETS + 1)]


def _cumulative(pictures: Pictures, event: str) -> list[int]:
    return [0, *accumulate(pictures.over_time.get(event, [0] * BUCKETS))]


def _time_axis(pictures: Pictures, events: Events) -> dict[str, Any]:
    """Return the common settings of charts over time: the axis, and a mark per kill."""
    marks = []
    for e in events.kills:
        kind = "broker" if e["who"].startswith("broker-") else e["who"]  # of several, each has a name of its own
        color, group = _KILLS.get(kind, ("#0f766e", "service killed"))
        marks.append(Mark(max(_seconds(e["at_us"], pictures), 0.0), f"{e['who']} killed", color, group))
    return {"marks": marks, "x_label": "since the first half message"}


def _seconds(at_us: int, pictures: Pictures) -> float:
    return (at_us - pictures.start_us) / 1e6
