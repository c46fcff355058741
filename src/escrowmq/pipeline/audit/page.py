"""``report.html``: the result of an audit and its charts, on one page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as f

from escrowmq.pipeline import timeline
from escrowmq.pipeline.audit.events import Events
from escrowmq.pipeline.audit.verdict import Verdict
from escrowmq.pipeline.coverage import describe_beginnings
from escrowmq.pipeline.pages import charts, svg
from escrowmq.pipeline.pages.html import document, figure, figures, section, table
from escrowmq.pipeline.pages.svg import AMBER, BLUE, GREEN, RED, SLATE, VIOLET, Mark, Series
from escrowmq.pipeline.transactions import find_times

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NAME = "report.html"
BUCKETS = 160
"""Number of points in time in a chart."""

FEW_IDS = 100_000
"""The times of at most so many ids are selected before they go to Java."""

_KILLS = {"broker": (RED, "broker killed"), "shop": ("#be185d", "shop killed")}
_CONSUMER_COLORS = (VIOLET, "#0891b2", "#4d7c0f")
_KINDS = {"lost": RED, "repeated": AMBER, "altered": VIOLET, "leaked": BLUE, "orphaned": SLATE}
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
_MOST_ROWS = 100
_NULL = "<i>NULL</i>"
_QUESTION = "Did every message reach everyone it concerns, once?"


@dataclass(frozen=True, slots=True)
class Pictures:
    """Counts by event and bucket of ``bucket_us`` from ``start_us`` (the first half message), and latencies by decider
    and step. ``pending`` counts undecided transactions by state; ``differences`` counts ids by kind of finding, and by
    the bucket in which their first half message was stored."""

    start_us: int
    bucket_us: int
    over_time: dict[str, list[int]]
    latencies: dict[str, dict[int, int]]
    pending: dict[str, int] = field(default_factory=dict)
    differences: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, transactions: DataFrame, begun: DataFrame, first_us: int | None, last_us: int | None) -> Pictures:
        """Collect the numbers of a frame of transactions and of the undecided half messages in ``begun`` (of
        :func:`read_transactions`), without differences; empty if there are no transactions."""
        if first_us is None or last_us is None:
            return cls(0, 1, {}, {})
        bucket_us = max((last_us - first_us) // BUCKETS + 1, 1)
        counts, latencies = timeline.count_charts(
            transactions, first_us, bucket_us, ended_by="state", latency_by="decided_by"
        )
        undecided = (
            begun.where("state IS NOT NULL").groupBy("state").agg(f.countDistinct("transaction").alias("number"))
        )
        pending = {row["state"]: row["number"] for row in undecided.collect()}
        return cls(first_us, bucket_us, timeline.make_series(counts, BUCKETS), latencies, pending)

    def add_differences(self, begun: DataFrame, wrong: DataFrame) -> Pictures:
        """Collect the differences from the ids of ``begun`` (of :func:`read_transactions`) and findings (``kind,
        id``)."""
        if not self.over_time:
            return self
        found = timeline.collect_counts(_count_differences(begun, wrong, self.start_us, self.bucket_us))
        return replace(self, differences=timeline.make_series(found, BUCKETS))


def _count_differences(begun: DataFrame, wrong: DataFrame, start_us: int, bucket_us: int) -> DataFrame:
    """Convert findings → ``kind, bucket, number`` of ids, by the bucket of ``bucket_us`` in which their first half
    message was stored, numbered from ``start_us`` on. Ids without a half message are left out."""
    ids = wrong.select("kind", f.xxhash64("id").alias("hashed")).distinct()
    few = [row["hashed"] for row in ids.select("hashed").distinct().limit(FEW_IDS + 1).collect()]
    times = find_times(begun, few if len(few) <= FEW_IDS else None)
    bucket = ((f.min("stored_us") - start_us) / bucket_us).cast("int").alias("bucket")
    at = times.join(ids, "hashed").groupBy("kind", "hashed").agg(bucket)
    return at.groupBy("kind", "bucket").agg(f.count("*").alias("number"))


def write_page(folder: Path, verdict: Verdict, pictures: Pictures, events: Events) -> Path:
    """Write ``report.html`` into the run folder. Returns its path."""
    path = folder / NAME
    made = f"made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    command = f"escrowmq audit {folder}" + (f" --sample {verdict.sample}" if verdict.sample else "")
    path.write_text(page(verdict, pictures, events, command=command, made=made), encoding="utf-8")
    return path


def page(verdict: Verdict, pictures: Pictures, events: Events, *, command: str = "", made: str = "") -> str:
    """Return the audit's page as HTML text. Its foot shows the ``command`` and when it was ``made``."""
    parts = [_head(verdict)]
    if pictures.over_time:
        parts += [_draw_flow(pictures, events), *(draw(pictures, events) for draw in (_states, _escrow, _draw_checks))]
        parts += [_latency(pictures), _draw_pending(pictures)]
    parts += [_comparisons(verdict), _draw_differences(verdict, pictures, events), _draw_differing(verdict)]
    parts.append(_findings(verdict))
    parts += [_kills(events, pictures), _leaders(events, pictures)]
    return document(f"EscrowMQ audit {verdict.title}".strip(), "".join(parts), command=command, made=made)


def _head(verdict: Verdict) -> str:
    mood, words = ("agree", "All sides agree") if verdict.agrees else ("disagree", "The sides disagree")
    note = f"The log may be incomplete: {escape(verdict.incomplete)}."
    unseen = f'<p class="note">{note}</p>' if verdict.incomplete else ""
    if verdict.sample:
        unseen += f'<p class="note">A sample: {verdict.sample} of the ids. All numbers are those of the sample.</p>'
    plain = ("ids", "committed", "rolled_back", "consumed", "checks", *(["kills"] if verdict.kills else []))
    judged = {name: getattr(verdict, name) for name in ("lost", "repeated", "altered", "leaked", "orphaned")}
    return (
        f"<h1>{escape(verdict.title) or _QUESTION}</h1>"
        '<p class="lead">The producer’s database, the broker’s log and every consumer’s database, '
        f'compared by id and content on Spark.</p><div class="verdict {mood}">{words}</div>{unseen}'
        + figures(*(figure(name, getattr(verdict, name)) for name in plain))
        + figures(*(figure(name, value, "bad" if value else "good") for name, value in judged.items()))
    )


def _draw_flow(pictures: Pictures, events: Events) -> str:
    series = [
        Series(event.replace("_", " "), color, [n * 60e6 / pictures.bucket_us for n in pictures.over_time[event]])
        for event, color in (("committed", BLUE), ("rolled_back", AMBER), ("expired", RED))
        if event in pictures.over_time
    ]
    note = "Transactions that were decided, per minute."
    axes = {"y_label": "per minute", "height": charts.HEIGHT, **_time_axis(pictures, events)}
    return section("Flow per minute", note, svg.bars("Flow per minute", _times(pictures), series, **axes))


def _draw_pending(pictures: Pictures) -> str:
    causes = {"open": "not decided by the producer", "parked": "checks exhausted"}
    shown = [figure(cause, pictures.pending.get(state, 0)) for state, cause in causes.items()]
    note = "Transactions without a decision, by cause."
    return section("Pending work", note, figures(*shown)) if any(pictures.pending.values()) else ""


def _draw_differences(verdict: Verdict, pictures: Pictures, events: Events) -> str:
    found = pictures.differences
    series = [Series(kind, color, found[kind]) for kind, color in _KINDS.items() if kind in found]
    if not series:
        return ""
    axes = {"y_label": "ids", "height": charts.HEIGHT, **_time_axis(pictures, events)}
    counted = {kind: getattr(verdict, kind) for kind in _KINDS}
    undated = sum(counted.values()) - sum(sum(one.values) for one in series)
    note = "Ids with findings, by the time at which the log stored their first half message."
    note += f" {undated:,.0f} without a half message are not shown." if undated > 0 else ""
    chart = svg.bars("Differences over time", _times(pictures), series, **axes)
    return section("Differences over time", note, chart)


def _states(pictures: Pictures, events: Events) -> str:
    series = [
        Series(event.replace("_", " "), color, [0, *accumulate(pictures.over_time.get(event, [0] * BUCKETS))])
        for event, color in (("prepared", SLATE), ("committed", BLUE), ("rolled_back", AMBER))
    ]
    consumers = [who for who in dict.fromkeys(e["who"] for e in events.of("progress")) if who != "shop"]
    for who, color in zip(consumers, _CONSUMER_COLORS, strict=False):
        steps = [(_seconds(e["at_us"], pictures), e["number"]) for e in events.of("progress") if e["who"] == who]
        xs, values = zip((0.0, 0), *[step for step in steps if step[0] > 0], strict=True)
        series.append(Series(f"{who} applied", color, values, dashed=True, x=xs))
    axes = _time_axis(pictures, events)
    chart = svg.lines("Transactions over time", _times(pictures), series, y_label="transactions", **axes)
    note = "Prepared and decided transactions, and messages that each consumer had applied. A triangle marks a kill -9."
    return section("States over time", note, chart)


def _escrow(pictures: Pictures, events: Events) -> str:
    counts = dict(pictures.over_time)
    begun = counts.pop("prepared", [0] * BUCKETS)
    chart = charts.in_escrow(begun, counts.values(), pictures.bucket_us / 1e6, **_time_axis(pictures, events))
    note = (
        "Transactions whose half messages are stored and that are not decided. Those of a killed producer stay here "
        "until a check-back decides them."
    )
    return section("In escrow", note, chart)


def _draw_checks(pictures: Pictures, events: Events) -> str:
    asked = events.of("asked")
    if not asked:
        return ""
    wide = _times(pictures)[::2]
    series = []
    for answer, color in {"commit": GREEN, "rollback": AMBER, "unknown": SLATE}.items():
        places = [_seconds(e["at_us"], pictures) // wide[1] for e in asked if e["answer"] == answer]
        at = Counter(min(max(int(place), 0), len(wide) - 2) for place in places)
        if at:
            series.append(Series(f"answered {answer}", color, [at[n] for n in range(len(wide) - 1)]))
    axes = {"y_label": "checks", "height": charts.HEIGHT, **_time_axis(pictures, events)}
    chart = svg.bars("Check-backs", wide, series, **axes)
    note = "Checks of transactions that stayed undecided too long, by the shop’s answer."
    return section("Check-backs", note, chart)


def _latency(pictures: Pictures) -> str:
    found = pictures.latencies
    named = ((label, color, found[by]) for by, (label, color) in charts.DECIDERS.items() if by in found)
    chart, note = charts.latency(named), "How long a transaction was in escrow, by who decided it."
    return section("Latency of decisions", note, chart) if chart else ""


def _comparisons(verdict: Verdict) -> str:
    rows = [
        [escape(s.expected), escape(s.found), *(f"{n:,}" for n in (s.ids, s.expected_rows, s.found_rows, s.wrong_ids))]
        for s in verdict.comparisons
    ]
    heads = ["what must be there", "where it must be", "#ids", "#rows expected", "#rows found", "#ids that differ"]
    note = "Each line compares two sides, id by id."
    if verdict.beginnings:
        begin = escape(describe_beginnings(verdict.beginnings))
        note += f" The log does not begin at its first message ({begin}): earlier messages cannot be compared."
    return section("What was compared", note, table(heads, rows))


def _draw_differing(verdict: Verdict) -> str:
    if not verdict.differing:
        return ""
    rows = []
    for one in verdict.differing:
        head = [escape(one.between), f"<code>{escape(one.column)}</code>", f"{one.ids:,} of {one.examined:,}"]
        for pair in one.pairs:
            values = (
                _NULL if value is None else f"<code>{escape(value)}</code>" for value in (pair.expected, pair.found)
            )
            rows.append([*head, f"<code>{escape(pair.id)}</code>", *values])
            head = [""] * 3
    heads = ["between", "column", "#altered ids", "id", "expected", "found"]
    note = "The column that differs in most altered ids, with the first of them."
    return section("Columns that differ most", note, table(heads, rows))


def _findings(verdict: Verdict) -> str:
    if not verdict.findings:
        return ""
    shown = verdict.findings[:_MOST_ROWS]
    rows = []
    for one in shown:
        name = [f'<td class="kind">{escape(one.kind)}</td>', f"<code>{escape(one.id)}</code>"]
        rows.append([*name, escape(one.between), str(one.expected), str(one.found), escape(one.reason)])
    more = verdict.findings_in_all - len(shown)
    note = f"{more:,} more are not shown." if more > 0 else ""
    return section("Findings", note, table(["kind", "id", "between", "#expected", "#found", "why"], rows))


def _kills(events: Events, pictures: Pictures) -> str:
    if not events.kills:
        return ""
    rows = [
        [f"{_seconds(e['at_us'], pictures):.1f} s", escape(e["who"]), escape(e.get("where", ""))] for e in events.kills
    ]
    note = "Each process was ended with SIGKILL and started again."
    return section("Kills", note, table(["#at", "who", "where"], rows))


def _leaders(events: Events, pictures: Pictures) -> str:
    """Return the HTML of a table of changes of leader, of brokers that share a log; "" without such events."""
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
    """Return the x axis of the charts: 0, then the seconds at which each bucket ends."""
    return [n * pictures.bucket_us / 1e6 for n in range(BUCKETS + 1)]


def _time_axis(pictures: Pictures, events: Events) -> dict[str, Any]:
    """Return the options that all charts over time pass to ``svg``: label and ticks of the x axis, and a mark per
    killed process."""
    marks = []
    for e in events.kills:
        kind = "broker" if e["who"].startswith("broker-") else e["who"]  # of several, each has a name of its own
        color, group = _KILLS.get(kind, ("#0f766e", "service killed"))
        marks.append(Mark(max(_seconds(e["at_us"], pictures), 0.0), f"{e['who']} killed", color, group))
    span = BUCKETS * pictures.bucket_us / 1e6
    size, unit = next((one for one in _UNITS if span >= 3 * one[0]), _UNITS[-1])
    ticks = [(t * size, f"{t:g} {unit}") for t in svg.nice_ticks(span / size, 8) if t * size <= span]
    return {"marks": marks, "x_label": "since the first half message", "x_ticks": ticks}


def _seconds(at_us: int, pictures: Pictures) -> float:
    return (at_us - pictures.start_us) / 1e6
