"""``escrowmq reconcile``: compares two topics, or a RocketMQ topic with one here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from typer import Option

from escrowmq.cli.failures import Exit
from escrowmq.cli.jobs import Master
from escrowmq.cli.options import PATIENCE, Json, Url, broker_time, check_folder, check_reachable, time_option
from escrowmq.cli.printing import console, moment, notice, print_facts, print_json, print_json_line, print_table
from escrowmq.errors import Code, error

if TYPE_CHECKING:
    from escrowmq.gateway.rocketmq import RocketmqTopic
    from escrowmq.pipeline.coverage import Beginning, Coverage
    from escrowmq.pipeline.reconcile import Report, Side


@dataclass
class _Topics:
    """The two topics that are compared, and how."""

    url: Url
    half: str | None = Option(None, help="The topic of the announced ids, or the view %half.")
    commits: str | None = Option(None, help="The topic of what was committed.")
    id: str = Option("key", help="Where a message's id is: key, body, message_id.")
    half_id: str | None = Option(None, help="The same for --half, where it is another there.")
    content: bool = Option(False, "--content", help="Compare bodies, too.")

    def sides(self, spark: Any, *, stream: bool, whole: bool) -> list[Side]:
        """Return the ids of both topics."""
        from escrowmq.pipeline.reconcile import read_side

        kinds = (self.half_id or self.id, self.id)
        return [
            read_side(spark, self.url, topic, kind, content=self.content, stream=stream, whole=whole)
            for topic, kind in zip(self.names(), kinds, strict=True)
        ]

    def names(self) -> tuple[str, str]:
        """Return both topics. Raises Misuse(BAD_ARGUMENT) if one is not given."""
        if self.half is None or self.commits is None:
            raise error(Code.BAD_ARGUMENT, "two topics are compared", "--half and --commits, or --rocketmq and --topic")
        return self.half, self.commits


@dataclass
class _Rocketmq:
    """A RocketMQ topic instead of ``--half``, and a topic here instead of ``--commits``."""

    rocketmq: str | None = Option(
        None, metavar="HOST:PORT/TOPIC", help="Compare a topic of RocketMQ 5 (address of its gRPC proxy), by key."
    )
    topic: str | None = Option(None, metavar="TOPIC", help="With --rocketmq: the topic here.")
    group: str | None = Option(None, help="With --rocketmq: a consumer group of its own there, never used before.")
    copy: Path | None = Option(None, metavar="DIR", help="With --rocketmq: its messages are copied there; resumable.")
    quiet: float = time_option("45s", "--quiet", "With --rocketmq: it is read when no older message came so long.")

    def source(self, topics: _Topics, streaming: _Stream) -> RocketmqTopic | None:
        """Return the RocketMQ topic; None without one. Raises Misuse(BAD_ARGUMENT) for options that do not fit
        together."""
        needed = {"topic": self.topic, "group": self.group, "copy": self.copy}
        if self.rocketmq is None:
            if given := [f"--{name}" for name, value in needed.items() if value is not None]:
                raise error(Code.BAD_ARGUMENT, f"{' '.join(given)} without --rocketmq", "--rocketmq HOST:PORT/TOPIC")
            return None
        if lacking := [f"--{name}" for name, value in needed.items() if value is None]:
            raise error(Code.BAD_ARGUMENT, f"--rocketmq needs {' '.join(lacking)}", "see docs/from-rocketmq.md")
        if topics.half or topics.commits or streaming.stream or topics.id != "key":
            raise error(Code.BAD_ARGUMENT, "--rocketmq compares with --topic, by key, and not as a stream")
        from escrowmq.gateway.rocketmq import RocketmqTopic

        keys = [os.environ.get(name, "") for name in ("ROCKETMQ_ACCESS_KEY", "ROCKETMQ_SECRET_KEY")]
        return RocketmqTopic.parse(self.rocketmq, self.group or "", *keys)


@dataclass
class _Findings:
    """The rule for findings, and where they are written."""

    grace: float = time_option("10min", "--grace", "So long after it was announced an id may be without commit.")
    settled_before: str | None = Option(None, metavar="TIME", help="Instead of --grace: a time, 2026-01-31T12:00:00Z.")
    limit: int = Option(100, "--limit", "-n", min=0, help="Findings to name; --out has all.")
    out: str | None = Option(None, metavar="DIR", help="Write all findings (Parquet) and report.json there.")


@dataclass
class _Stream:
    """A comparison that continues."""

    stream: bool = Option(False, "--stream", help="Continue, and print each finding when it is found.")
    checkpoint: str | None = Option(None, metavar="DIR", help="With --stream: where its progress is stored.")
    out_topic: str | None = Option(None, help="With --stream: the topic for findings, each once. Without it: printed.")
    lateness: float = time_option("1min", "--lateness", "With --stream: how far topics may be apart in reading.")
    once: bool = Option(False, "--once", help="With --stream: end after the messages that are stored now.")

    def check(self) -> None:
        """Raise Misuse(BAD_ARGUMENT) for options that do not fit together."""
        if self.stream and self.checkpoint is None:
            hint = "a folder; the same one resumes where it stopped"
            raise error(Code.BAD_ARGUMENT, "--stream needs --checkpoint", hint)
        for name in ("checkpoint", "out_topic", "once"):
            if getattr(self, name) and not self.stream:
                raise error(Code.BAD_ARGUMENT, f"--{name.replace('_', '-')} is of --stream")


def reconcile(
    topics: _Topics,
    findings: _Findings,
    streaming: _Stream,
    rocketmq: _Rocketmq,
    master: Master = None,
    json: Json = False,
) -> None:
    """Compare the ids of two topics: announced or committed alone, or with different content.

    With --rocketmq the first one is a topic of RocketMQ, and bodies are compared, too. Exit code 1 if there is a
    difference.
    """
    from escrowmq.pipeline.coverage import read_coverage
    from escrowmq.pipeline.failures import unwrap_errors
    from escrowmq.pipeline.reconcile import reconcile as compare
    from escrowmq.pipeline.reconcile.rocketmq import read_both
    from escrowmq.pipeline.session import local_session

    streaming.check()
    source = rocketmq.source(topics, streaming)
    names = topics.names() if source is None else (source.topic, rocketmq.topic or "")
    if findings.out is not None and "://" not in findings.out:
        check_folder(Path(findings.out), "--out")
    check_reachable(topics.url)
    before = None if streaming.stream else _before(findings.settled_before, findings.grace, topics.url)
    if source is not None and rocketmq.copy is not None:
        _copy(source, rocketmq.copy, rocketmq.quiet)
    with local_session("escrowmq reconcile", master=master) as spark, unwrap_errors():
        if before is None:
            return _run_stream(topics.sides(spark, stream=True, whole=False), topics.url, findings.grace, streaming)
        if source is None:
            seen = read_coverage(topics.url, names)
            sides = topics.sides(spark, stream=False, whole=not seen.incomplete)
        else:
            sides, seen = read_both(spark, rocketmq.copy or Path(), topics.url, *names)
        report = compare(
            *sides,
            copies=source is not None,
            settled_before=before,
            covered_from=_find_covered(seen.beginnings, findings.grace, before),
            incomplete=seen.incomplete,
            out=_absolute(findings.out),
            most=findings.limit,
        )
    _show(report, seen, json, ("half", "commits") if source is None else ("RocketMQ", "here"))
    if not report.agrees:
        raise typer.Exit(Exit.FINDING)


def _copy(source: RocketmqTopic, folder: Path, quiet_seconds: float) -> None:
    """Copy the RocketMQ topic."""
    from escrowmq.gateway.rocketmq import copy_topic

    with Console(stderr=True).status("RocketMQ") as status:

        def show(count: int) -> None:
            if count % 1000 == 0:
                status.update(f"RocketMQ: {count:,} messages")

        received = copy_topic(source, folder, quiet_seconds=quiet_seconds, progress=show)
    notice(f"{received:,} messages from RocketMQ, group {source.group}; all of them are in {folder}")


def _absolute(folder: str | None) -> str | None:
    """Return the absolute path of a local folder (Java may have another working directory); a URL unchanged."""
    return folder if folder is None or "://" in folder else str(Path(folder).absolute())


def _before(text: str | None, grace_seconds: float, url: str) -> datetime:
    """Return the given time; else the grace time before now, by the clock of the broker that stored the messages."""
    if text is None:
        from escrowmq.client.admin import Admin
        from escrowmq.connecting import connect

        with connect(url, read_only=True) if url.startswith("file:") else connect(url) as bus:
            now_us = broker_time(Admin(bus.router, PATIENCE))
        return datetime.fromtimestamp(now_us / 1e6, UTC) - timedelta(seconds=grace_seconds)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise error(Code.BAD_ARGUMENT, f"--settled-before: {text!r}", "such as 2026-01-31T12:00:00Z") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _find_covered(begin: Sequence[Beginning], grace_seconds: float, before: datetime) -> datetime | None:
    """Return the time from which both topics are complete: an id's counterpart is stored within the grace time. An
    empty queue is complete up to ``before``."""
    if not begin:
        return None
    ends_us = [before.timestamp() * 1e6 if one.since_us is None else one.since_us for one in begin]
    return datetime.fromtimestamp(max(ends_us) / 1e6, UTC) + timedelta(seconds=grace_seconds)


def _run_stream(sides: Sequence[Side], url: str, grace: float, options: _Stream) -> None:
    """Print or send findings until the stream ends or is interrupted."""
    from escrowmq.pipeline.reconcile import start, stream_findings
    from escrowmq.pipeline.reconcile.frames import as_rows

    def show(found: Side, _batch: int) -> None:
        for row in as_rows(found).toLocalIterator():
            print_json_line(row.asDict())

    found = stream_findings(*sides, grace_seconds=grace, lateness_seconds=options.lateness)
    topic, checkpoint = options.out_topic, _absolute(options.checkpoint) or ""
    each = show if topic is None else None
    query = start(found, checkpoint=checkpoint, url=url, topic=topic, each=each, once=options.once)
    notice("reconciling the stored messages" if options.once else "reconciling; Ctrl-C ends it")
    try:
        query.awaitTermination()
    finally:
        query.stop()


def _show(report: Report, seen: Coverage, json: bool, sides: tuple[str, str]) -> None:
    from escrowmq.pipeline.coverage import describe_beginnings

    if seen.beginnings:
        begin = describe_beginnings(seen.beginnings)
        notice(f"the topics no longer have all messages: {begin}; earlier ids are not compared")
    if seen.incomplete:
        notice(f"the log may be incomplete: {seen.incomplete}")
    if json:
        return print_json(report.to_json())
    rows = [
        (one.kind, one.id, one.halves, one.commits, moment(one.first_seen_us), moment(one.last_seen_us))
        for one in report.named
    ]
    if rows:
        print_table(("kind", "id", *(f">{side}" for side in sides), "first seen", "last seen"), rows, "")
    kinds = ("missing", "unexpected", "differing", "repeated", "nameless", "uncovered")
    counts = {kind: getattr(report, kind) for kind in kinds}
    rows_read = dict(zip((f"rows of {side}" for side in sides), (report.half_rows, report.commit_rows), strict=True))
    covered = {"covered from": report.covered_from} if report.covered_from else {}
    print_facts({"ids": report.ids, **rows_read, **counts, "settled before": report.settled_before, **covered})
    if report.agrees:
        console().print("[green]both sides agree[/green]")
