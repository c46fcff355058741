"""``chaos.html`` and ``chaos.json``: a run on one self-contained page without scripts, and its numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path

from escrowmq.pipeline.pages.html import document, figure, section, table
from escrowmq_lab.chaos.findings import KEPT, Tally
from escrowmq_lab.chaos.progress import WORDS
from escrowmq_lab.chaos.report.record import JSON, PAGE, Record
from escrowmq_lab.chaos.report.timeline import Axis, spark, timeline


def write_report(folder: Path, record: Record) -> Path:
    """Write both into ``folder``, created if necessary. Returns the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON).write_text(json.dumps(record.to_json(), indent=1) + "\n", encoding="utf-8")
    path = folder / PAGE
    path.write_text(page(record), encoding="utf-8")
    return path


def page(record: Record) -> str:
    """Render the whole page."""
    parts = [_head(record), _picture(record)]
    parts += [_findings(record)] if not record.findings.ok else []
    parts += [_modes(record), _faults(record), _promises(record), _run_facts(record)]
    style = resources.files("escrowmq_lab.chaos.report").joinpath("report.css").read_text(encoding="utf-8")
    return document(
        "EscrowMQ chaos run", "".join(parts), made=f"made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC", style=style
    )


def verdict(record: Record) -> str:
    """Summarize the result in a sentence or two."""
    others = len(record.happenings) - record.kills
    faults = f"{_plural(record.kills, 'kill')} and {_plural(others, 'other blow')} on {len(record.options.nodes)} nodes"
    if not record.findings.ok:
        kinds: dict[str, int] = {}
        for (what, _), count in sorted(record.findings.numbers.items()):
            kinds[what] = kinds.get(what, 0) + count
        return f"Promises were broken: {', '.join(f'{count:,} {what}' for what, count in kinds.items())}; {faults}."
    business = record.total("business")
    if not business:
        return f"Nothing was broken, and nothing shown: no message was placed; {faults}."
    more = ""
    if record.repeats:
        more = f" ({', '.join(sorted(record.repeats))}: at least once)"
    return (
        f"Each of {business:,} messages whose transaction committed had its effect exactly once{more}, and nothing "
        "else had any: "
        f"{_plural(len(record.findings.tallies), 'delivery mode')}, {faults}, compared by id and content."
    )


def _head(record: Record) -> str:
    ok = record.findings.ok
    numbers = [
        figure("intended", record.total("intended")),
        figure("committed by their producer", record.total("business")),
        figure("confirmed", record.total("confirmed")),
        figure("with an effect", record.total("effects")),
        figure("recovered, never confirmed", record.total("recovered")),
    ]
    faults = [
        figure("kills", record.kills),
        figure("other blows", len(record.happenings) - record.kills),
        figure("nodes not whole at once", record.most_at_once),
        figure("confirmed a second", round(record.rate("confirmed"))),
        figure("effects a second", round(record.rate("effects"))),
    ]
    kinds = ("lost", "leaked", "unexpected", "repeated", "altered", "misplaced", "contradiction")
    judged = [figure(kind, count := record.findings.of(kind), "bad" if count else "good") for kind in kinds]
    judged += [figure(kind, count, "bad") for kind in ("unsettled", "failed") if (count := record.findings.of(kind))]
    moment = datetime.fromtimestamp(record.begun_us / 1e6, UTC)
    return (
        "<h1>Killed, paused, cut off, filled up: did every message arrive, once?</h1>"
        f'<p class="lead">{_nodes(record)}; {_plural(record.options.rounds, "round")} of {record.options.period:g} s, '
        f"from {moment:%Y-%m-%d %H:%M:%S} UTC, seed {record.options.seed}</p>"
        f'<div class="verdict {"agree" if ok else "disagree"}">{escape(verdict(record))}</div>'
        f'<div class="figures">{"".join(judged)}</div><div class="figures">{"".join(numbers)}</div>'
        f'<div class="figures">{"".join(faults)}</div>'
    )


def _picture(record: Record) -> str:
    note = (
        "Above the middle line what producers were told is done, below it the effects in the consumers' databases, all "
        "modes together, "
        "each second. Then how many nodes were not whole at once, and what was done to each: point at a bar to read "
        "it. "
        "A blow lasts until its node said that it was ready again."
    )
    return section("Faults under the flow of messages", note, timeline(record))


def _findings(record: Record) -> str:
    rows = [
        [
            f'<td class="kind">{escape(one.what)}</td>',
            escape(one.mode or "–"),
            f'<td class="id"><code>{escape(one.subject)}</code></td>',
            escape(one.detail),
        ]
        for one in record.findings.broken
    ]
    left = sum(record.findings.numbers.values()) - len(rows)
    more = f" {left:,} more are counted and not listed: the first {KEPT} of each kind and mode are." if left > 0 else ""
    note = f"Each with what the databases say of it; a database that is not named has nothing of it.{more}"
    return section("What was broken", note, table(["finding", "mode", "id or node", "what stands where"], rows))


def _modes(record: Record) -> str:
    axis = Axis(record.begun_us / 1e6, record.ended_us / 1e6)
    names = ("intended", "doomed", "business", "confirmed", "effects", "recovered", "repeats")
    rows = [
        [
            f"<b>{escape(name)}</b>",
            *(_number(getattr(tally, number)) for number in names),
            *_format_wait(tally),
            _format_broken(record, name),
            f"<td>{spark(record.flow.effects.get(name, {}), axis, f'effects of {name} over time')}</td>",
        ]
        for name, tally in record.findings.tallies.items()
    ]
    if len(rows) > 1:
        rows.append(
            [
                "<b>all</b>",
                *(_number(record.total(number)) for number in names),
                "",
                "",
                _format_broken(record, None),
                "",
            ]
        )
    heads = ["mode", "#intended", "#rolled back", "#business", "#confirmed", "#effects", "#recovered", "#repeats"]
    heads += ["#half within", "#longest", "#findings", "over time"]
    note = (
        "Ids, not rows. Business: their local transaction committed, so each must have its effect, and no other may. "
        "Rolled back: on "
        "purpose. Recovered: with an effect, though their producer died or was told nothing. Times are those from the "
        "business row to the "
        "first effect, by wall clocks, through every fault in between."
    )
    return section("Each delivery mode", note, f'<div class="wide">{table(heads, rows)}</div>')


def _faults(record: Record) -> str:
    kinds = list(WORDS)
    blows = record.blows
    rows = [
        [
            escape(node),
            *(_number(blows[node, kind]) for kind in kinds),
            _number(sum(blows[node, kind] for kind in kinds)),
        ]
        for node in record.nodes
    ]
    sums = [sum(blows[node, kind] for node in record.nodes) for kind in kinds]
    rows.append(["<b>all</b>", *map(_number, sums), _number(sum(sums))])
    heads = ["node", *(f"#{WORDS[kind]}" for kind in kinds), "#all"]
    note = (
        "Killed: SIGKILL, started again. Paused: SIGSTOP, then SIGCONT. Cut off: connections closed, new ones refused. "
    )
    note += "In silence: connections stay, and nothing passes. Disk full: nothing more can be written."
    listed = [
        [
            str(one.round),
            escape(one.node),
            WORDS[one.blow],
            f"{(one.at_us - record.begun_us) / 1e6:.2f}",
            f"{(one.until_us - one.at_us) / 1e6:.2f}",
        ]
        for one in sorted(record.happenings, key=lambda one: one.at_us)
    ]
    every = (
        "<details><summary>Every blow, one by one "
        f"({len(listed):,})</summary>{table(['#round', 'node', 'was', '#at, s', '#for, s'], listed)}</details>"
    )
    return section("Faults", note, table(heads, rows) + every) + section(
        "Nodes struck in one round", "How many rounds struck so many of the nodes.", _counts(record)
    )


def _counts(record: Record) -> str:
    """Draw a bar for each number of nodes."""
    size, height, step, left = len(record.options.nodes), 130, 52, 12
    struck = record.struck
    top = max(struck.values(), default=1)
    parts = []
    for n in range(1, size + 1):
        x, tall = left + (n - 1) * step, struck[n] / top * (height - 50)
        y = height - 26 - tall
        parts.append(
            f'<rect class="bar" x="{x}" y="{y:.1f}" width="{step - 14}" height="{max(tall, 0.5):.1f}" rx="2"/>'
        )
        parts.append(
            f'<text class="legend" x="{x + (step - 14) / 2}" y="{y - 5:.1f}" text-anchor="middle">{struck[n]}</text>'
        )
        parts.append(f'<text class="tick" x="{x + (step - 14) / 2}" y="{height - 9}" text-anchor="middle">{n}</text>')
    label = "Rounds by how many nodes they struck: " + ", ".join(f"{n}: {struck[n]}" for n in range(1, size + 1))
    return (
        f'<svg class="counts" viewBox="0 0 {2 * left + size * step} {height}" role="img" aria-label="{label}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _promises(record: Record) -> str:
    if not record.promises:
        return ""
    rows = [[f"<b>{escape(name)}</b>", escape(promise)] for name, promise in record.promises.items()]
    return section("What each mode promises, and whose database holds the mark", "", table(["mode", "promise"], rows))


def _run_facts(record: Record) -> str:
    options = record.options
    facts = {
        "run it again": f"<code>{escape(record.command)}</code>",
        "which gives": "the same faults at the same times; what they meet is never quite the same",
        "seed": str(options.seed),
        "modes": escape(", ".join(options.modes)),
        "rate": f"at most {options.rate:g} messages a second, all producers together",
        "down for": "drawn for each blow, up to half of the period" if options.down is None else f"{options.down:g} s",
        "databases": "SQLite files" if options.database_url is None else escape(options.database_url.partition(":")[0]),
        "lasted": f"{record.fault_seconds:.0f} s of faults, {record.settle_seconds:.0f} s until everything was at rest",
        **{name: escape(str(value)) for name, value in record.findings.counts.items()},
        **{name: escape(value) for name, value in record.versions.items()},
    }
    inside = "".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in facts.items())
    return section("How it was run", "", f"<dl>{inside}</dl>")


def _nodes(record: Record) -> str:
    options = record.options
    kinds = {"producer": options.producers, "broker": options.brokers, "consumer": options.consumers}
    return ", ".join(_plural(count, kind) for kind, count in kinds.items()) + ", each a process of its own"


def _format_broken(record: Record, mode: str | None) -> str:
    numbers: Sequence[tuple[str, int]] = [
        (what, count) for (what, of), count in sorted(record.findings.numbers.items()) if mode in (None, of)
    ]
    if not numbers:
        return '<td class="number none">0</td>'
    if mode is None:
        return f'<td class="number kind">{sum(count for _, count in numbers):,}</td>'
    return f'<td class="number kind">{", ".join(f"{count:,} {what}" for what, count in numbers)}</td>'


def _format_wait(tally: Tally) -> tuple[str, str]:
    if tally.waited_us is None:
        return '<td class="number none">–</td>', '<td class="number none">–</td>'
    return _format_duration(tally.waited_us[0]), _format_duration(tally.waited_us[2])


def _number(value: int) -> str:
    return f"{value:,}" if value else '<td class="number none">0</td>'


def _plural(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _format_duration(us: int) -> str:
    """Format a duration with two or three digits, in a suitable unit."""
    return f"{us / 1e6:.3g} s" if us >= 1_000_000 else f"{us / 1e3:.3g} ms"
