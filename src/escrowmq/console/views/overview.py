"""The overview: each broker, and its recent numbers as small charts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from escrowmq.console import words
from escrowmq.console.asked import Page, Params
from escrowmq.console.core import Console
from escrowmq.console.pictures import spark
from escrowmq.console.sampling import Sample

LIVE_SECONDS = 4
_Value = Callable[[Sample], float | None]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its chart and a link to details."""

    name: str
    text: str
    unit: str
    picture: Markup
    top: str = ""
    """The value at the upper edge of the chart; the lower edge is 0."""
    to: str = ""
    urgent: bool = False


def overview(console: Console, params: Params) -> Page:
    """Show the overview page."""
    samples = console.sampler.samples()
    last = samples[-1] if samples else None
    health = console.admin.health()
    values = {
        "health": health,
        "last": last,
        "numbers": {} if last is None else last.numbers,
        "answered": {} if last is None else last.answered,
        "problem": "" if last is None else last.problem,
        "sections": sections(samples) if last is not None and last.numbers else [],
        "span": words.duration(samples[-1].at - samples[0].at) if len(samples) > 1 else "",
    }
    return Page("overview.html", "Overview", values, "/", live=LIVE_SECONDS)


def sections(samples: Sequence[Sample]) -> list[tuple[str, list[Figure]]]:
    """Return the charts under their headings."""

    def rate(name: str, *counters: str, to: str = "") -> Figure:
        return _rate(samples, name, counters, to)

    def level(name: str, value: _Value, unit: str = "", to: str = "", urgent: bool = False) -> Figure:
        return _level(samples, name, value, unit, to, urgent)

    def total(counter: str) -> _Value:
        return lambda sample: sample.total(counter)

    return [
        (
            "Needs an operator",
            [
                level("dead letters", lambda s: s.groups.dead if s.groups else None, to="/dead-letters", urgent=True),
                level("parked transactions", total("parked"), to="/transactions?state=parked", urgent=True),
                level("damaged places in the log", total("log_damaged_frames"), urgent=True),
            ],
        ),
        (
            "Messages",
            [
                rate("stored", "messages_total", "half_messages_total"),
                rate("delivered", "delivered_total", to="/groups"),
                rate("acknowledged", "acked_messages_total"),
                level("lag of all groups", lambda s: s.groups.lag if s.groups else None, "messages", to="/groups"),
            ],
        ),
        (
            "Transactions",
            [
                rate("committed", "committed_total", to="/transactions?state=committed"),
                rate("rolled back", "rolled_back_total", to="/transactions?state=rolled_back"),
                level("undecided", total("open_half_messages"), to="/transactions?state=open"),
                level("oldest undecided", lambda s: s.largest("oldest_half_age_seconds"), "time"),
                rate("check-backs asked", "checks_asked_total", to="/producers"),
                level("check-backs unanswered", total("checks_unanswered"), to="/producers"),
            ],
        ),
        (
            "Broker",
            [
                level("time to answer", lambda s: max(s.answered.values(), default=None), "time"),
                level("requests that wait", total("waiting_requests")),
                level("log on disk", total("log_stored_bytes"), "bytes"),
                level("disk free", total("disk_free_bytes"), "bytes"),
            ],
        ),
    ]


def _rate(samples: Sequence[Sample], name: str, counters: Sequence[str], to: str) -> Figure:
    """Return a counter's growth per second between samples, with gaps where brokers restarted or changed."""
    values: list[float | None] = [None]
    for before, after in itertools.pairwise(samples):
        grown = 0.0
        for counter in counters:
            first, second = before.total(counter), after.total(counter)
            if first is None or second is None or set(before.numbers) != set(after.numbers) or second < first:
                break
            grown += second - first
        else:
            values.append(grown / max(after.at - before.at, 1e-3))
            continue
        values.append(None)
    return _figure(samples, values, name, "a second", to, False)


def _level(samples: Sequence[Sample], name: str, value: _Value, unit: str, to: str, urgent: bool) -> Figure:
    return _figure(samples, [value(sample) for sample in samples], name, unit, to, urgent)


def _figure(
    samples: Sequence[Sample], values: Sequence[float | None], name: str, unit: str, to: str, urgent: bool
) -> Figure:
    return figure([sample.at for sample in samples], values, name, unit, to, urgent=urgent)


def figure(
    times: Sequence[float], values: Sequence[float | None], name: str, unit: str, to: str = "", *, urgent: bool = False
) -> Figure:
    """Return the last of ``values`` at ``times`` (monotonic seconds) with their chart."""
    write = {"time": words.duration, "bytes": words.size}.get(unit, _count)
    shown = "" if unit in ("time", "bytes") else unit
    now, top = values[-1], max((value for value in values if value is not None), default=0.0)
    label = f"{name}: {write(now)} {shown}".strip() + f"; the top of the chart is {write(top)}"
    picture = spark(times, values, max(times[-1] - times[0], 30.0), label)
    return Figure(name, write(now), shown, picture, write(top) if top else "", to, urgent and bool(now))


def _count(value: float | None) -> str:
    return words.number(value if value is None or value < 10 else float(round(value)))
