"""The Spark jobs as commands: ``escrowmq audit``, ``reconcile``, ``sweep`` and ``report``; also ``demo``."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from escrowmq.cli.exporting import Insecure, Metrics, serve_metrics
from escrowmq.cli.failures import Exit
from escrowmq.cli.options import DEFAULT_URL, PATIENCE, Json, Url, broker_time, check_folder, check_reachable, seconds
from escrowmq.cli.printing import console, moment, notice, print_facts, print_json, print_json_line, print_table
from escrowmq.errors import Code, error
from escrowmq.platform.signals import stop_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from escrowmq.pipeline.coverage import Beginning
    from escrowmq.pipeline.reconcile import Report, Side
    from escrowmq.pipeline.sweeps import Swept, schedule

Master = Annotated[
    str | None, typer.Option("--master", help="A Spark cluster (spark://HOST:PORT) instead of this machine.")
]


def demo(
    orders: Annotated[
        Path | None, typer.Option(help="Real orders: a .parquet or .csv file of invoice lines; else made-up ones.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep the run here; else in a new folder demo-run.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many orders to make up.")] = 2000,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first so many orders.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes up the same orders.")] = 1,
    shop_kills: Annotated[int, typer.Option(min=0, help="Kill the shop between its commit and the COMMIT.")] = 4,
    broker_kills: Annotated[int, typer.Option(min=0, help="Kill the broker; of two, the one that leads.")] = 2,
    service_kills: Annotated[int, typer.Option(min=0, help="Kill each consumer between its commit and its ack.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Orders placed at the same time.")] = 24,
    audit: Annotated[bool, typer.Option(help="Compare all sides with Spark at the end.")] = True,
    log: Annotated[
        str | None,
        typer.Option(
            metavar="kafka",
            help="On a leader and a standby, with their log on a Kafka of the demo's own (needs Maven, which fetches "
            "it once).",
        ),
    ] = None,
) -> None:
    """Run a shop, a cart service and a points service on a broker, kill them all, and audit the result.

    Exit code 1 when the audit finds anything lost, repeated, altered, leaked or undecided.
    """
    import prometheus_client  # noqa: F401  # the demo's broker needs it

    from escrowmq.demo import DemoOptions, run

    if audit:
        import escrowmq.pipeline.audit  # noqa: F401  # what the end needs is missed before the beginning

    verdict = run(
        DemoOptions(
            folder=folder,
            orders=orders,
            count=count,
            limit=limit,
            seed=seed,
            shop_kills=shop_kills,
            broker_kills=broker_kills,
            service_kills=service_kills,
            threads=threads,
            audit=audit,
            log=log,
        )
    )
    if verdict is not None and not verdict.settled:
        raise typer.Exit(Exit.FINDING)


def audit(
    folder: Annotated[Path, typer.Argument(help="A run folder, as `escrowmq demo` leaves one.")],
    json: Json = False,
    page: Annotated[bool, typer.Option(help="Also draw report.html.")] = True,
    master: Master = None,
) -> None:
    """Compare orders, broker log and consumers' databases of a run by id and content; name every difference.

    Writes verdict.json and report.html into the folder. Exit code 1 when the sides do not agree.
    """
    from escrowmq.demo.screen import show_verdict
    from escrowmq.pipeline.audit import run

    if folder.is_dir():  # else it is no run folder
        check_folder(folder, "the run folder")
    with Console(stderr=True).status("audit") as status:
        audited = run if master is None else partial(run, master=master)
        verdict = audited(folder, progress=lambda text: status.update(f"audit: {text}"), page=page)
    if json:
        print_json(verdict.to_json())
    else:
        show_verdict(console(), verdict)
        notice(f"{folder / 'verdict.json'}" + (f"  {folder / 'report.html'}" if page else ""))
    if not verdict.agrees:
        raise typer.Exit(Exit.FINDING)


def report(
    url: Url = DEFAULT_URL,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for report.html and report.json.")] = Path(),
    json: Json = False,
    master: Master = None,
) -> None:
    """Write report.html and report.json: volumes, decision latency, check-backs, pending work and trends.

    A data folder (--url file:FOLDER) is only read, and may be in use.
    """
    from escrowmq.pipeline.report import report as measured
    from escrowmq.pipeline.report import write_report

    check_folder(out, "--out")
    check_reachable(url)
    with Console(stderr=True).status("report") as status:
        found = measured(url, master=master, progress=lambda text: status.update(f"report: {text}"))
        write_report(out, found)
    if json:
        print_json(found.to_json())
    else:
        if found.incomplete:
            notice(f"the report may be incomplete: {found.incomplete}")
        notice(f"{out / 'report.html'}  {out / 'report.json'}")


def sweep(
    orders: Annotated[
        list[str],
        typer.Option("--orders", metavar="URL", help="A database of orders; once for every shard, in their order."),
    ],
    products: Annotated[str, typer.Option("--products", metavar="URL", help="The database of products and freezes.")],
    unpaid_after: Annotated[
        str, typer.Option("--unpaid-after", metavar="TIME", help="Unpaid orders are over so long after their pay_by.")
    ] = "0s",
    orphan_after: Annotated[
        str, typer.Option("--orphan-after", metavar="TIME", help="A freeze so old should have its order.")
    ] = "10min",
    only: Annotated[str | None, typer.Option("--only", help="One of the sweeps: orders, freezes.")] = None,
    tables: Annotated[
        Path | None, typer.Option("--tables", metavar="FILE", help="JSON: names of tables and columns that differ.")
    ] = None,
    shard_by: Annotated[
        str | None,
        typer.Option(
            "--shard-by",
            metavar="COLUMN",
            help="Of freezes: orders are in shard crc32(COLUMN) modulo shards. Without it all shards are asked.",
        ),
    ] = None,
    events: Annotated[
        str | None, typer.Option("--events", metavar="TOPIC", help="Announce timed-out orders through the outbox.")
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            "--every", metavar="TIME", help="Go on, on this schedule; of several machines one sweeps at a time."
        ),
    ] = None,
    alarm: Annotated[
        str | None, typer.Option("--alarm", metavar="URL", help="Post what could not be settled here, as JSON.")
    ] = None,
    metrics: Metrics = None,
    insecure: Insecure = False,
    master: Master = None,
    json: Json = False,
) -> None:
    """Time unpaid orders out, release the freezes of paid ones as sold, give back stock that was frozen without an
    order.

    Run it every few minutes, or with --every. It may be killed, and run twice at once. Without --every the exit code is
    1 if something could not be settled; the next run tries again.
    """
    from escrowmq.pipeline.session import local_session
    from escrowmq.pipeline.sweeps import Books, Databases, schedule, sweep_freezes, sweep_orders

    if only not in (None, "orders", "freezes"):
        raise error(Code.BAD_ARGUMENT, f"--only {only}", "orders or freezes")
    books = Books() if tables is None else Books.read(tables)
    books = replace(books, shard_by=shard_by or books.shard_by, events=events or books.events)
    databases = Databases(tuple(orders), products)
    unpaid, orphan = seconds(unpaid_after, "--unpaid-after") or 0.0, seconds(orphan_after, "--orphan-after") or 0.0
    pause = seconds(every, "--every")
    if pause is not None and pause <= 0:
        raise error(Code.BAD_ARGUMENT, f"--every {every}", "a time such as 15min")
    if pause is None and metrics is not None:
        raise error(Code.BAD_ARGUMENT, "--metrics without --every", "a single run is over before anybody looks")
    if alarm is not None:
        schedule.check_alarm(alarm)
    books.check(databases.orders, databases.products)  # before Spark starts

    def run() -> dict[str, Swept]:
        done: dict[str, Swept] = {}
        with local_session("escrowmq sweep", master=master, rows=1000) as spark:
            if only != "freezes":
                done["orders"] = sweep_orders(spark, databases, books=books, unpaid_seconds=unpaid)
            if only != "orders":
                done["freezes"] = sweep_freezes(spark, databases, books=books, orphan_seconds=orphan)
        return done

    if pause is not None:
        _sweep_on_schedule(run, products, pause, alarm, metrics, insecure, json)
        return
    found = run()
    _show_swept(found, print_json if json else None)
    if any(swept.failed for swept in found.values()):
        if alarm is not None:
            schedule.post(alarm, schedule.make_failed_event(found))
        raise typer.Exit(Exit.FINDING)


def _sweep_on_schedule(
    run: schedule.Sweeps,
    products: str,
    pause: float,
    alarm: str | None,
    metrics: str | None,
    insecure: bool,
    json: bool,
) -> None:
    from escrowmq.pipeline.sweeps import schedule

    stop, totals = threading.Event(), schedule.Totals()

    def show(found: Mapping[str, Swept] | None) -> None:
        if found is not None:
            _show_swept(found, print_json_line if json else None)

    made = lambda: schedule.collector(totals)  # noqa: E731
    with stop_signals(stop.set), serve_metrics(metrics, insecure, made, lambda: {"status": "ok"}) as at:
        notice(f"sweeping every {pause:g} s{f', metrics at {at}' if at else ''}; Ctrl-C stops it")
        schedule.keep_sweeping(run, products, pause, stop, totals=totals, on_run=show, alarm=alarm)


def _show_swept(found: Mapping[str, Swept], print_as_json: Callable[[Mapping[str, Any]], None] | None) -> None:
    if print_as_json is not None:
        print_as_json({name: swept.to_json() for name, swept in found.items()})
        return
    rows = [(name, act, count) for name, swept in found.items() for act, count in swept.acts.items()]
    print_table(("sweep", "what", ">count"), rows, "nothing to do")
    for swept in found.values():
        for trans_id, problem in swept.alerts:
            notice(f"{trans_id}: {problem}")


def reconcile(
    url: Url,
    half: Annotated[str, typer.Option("--half", help="The topic of the announced ids, or the view %half.")],
    commits: Annotated[str, typer.Option("--commits", help="The topic of what was committed.")],
    id: Annotated[str, typer.Option("--id", help="Where a message's id is: key, body, message_id.")] = "key",
    half_id: Annotated[
        str | None, typer.Option("--half-id", help="The same for --half, where it is another there.")
    ] = None,
    content: Annotated[bool, typer.Option("--content", help="Compare bodies, too.")] = False,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="So long after it was announced an id may be without commit.")
    ] = "10min",
    settled_before: Annotated[
        str | None,
        typer.Option("--settled-before", metavar="TIME", help="Instead of --grace: a time, 2026-01-31T12:00:00Z."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Findings to name; --out has all.")] = 100,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Write all findings (Parquet) and report.json there.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Go on, and tell what is found as it is.")] = False,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="DIR", help="With --stream: where it remembers how far it is.")
    ] = None,
    out_topic: Annotated[
        str | None,
        typer.Option("--out-topic", help="With --stream: the topic for findings, each once. Without it: printed."),
    ] = None,
    lateness: Annotated[
        str, typer.Option("--lateness", metavar="TIME", help="With --stream: how far topics may be apart in reading.")
    ] = "1min",
    once: Annotated[bool, typer.Option("--once", help="With --stream: end with what is there now.")] = False,
    master: Master = None,
    json: Json = False,
) -> None:
    """Compare the ids of two topics: announced or committed alone, or with different content.

    Exit code 1 if there is a difference.
    """
    from escrowmq.pipeline.coverage import Coverage, describe_beginnings, read_coverage
    from escrowmq.pipeline.failures import unwrap_errors
    from escrowmq.pipeline.reconcile import read_side, stream_findings
    from escrowmq.pipeline.reconcile import reconcile as compare
    from escrowmq.pipeline.session import local_session

    if stream and checkpoint is None:
        raise error(Code.BAD_ARGUMENT, "--stream needs --checkpoint", "a folder; the same one goes on where it stopped")
    for name, given in (("--checkpoint", checkpoint), ("--out-topic", out_topic), ("--once", once)):
        if given and not stream:
            raise error(Code.BAD_ARGUMENT, f"{name} is of --stream")
    if out is not None and "://" not in out:
        check_folder(Path(out), "--out")
    check_reachable(url)
    checkpoint, out = _absolute(checkpoint), _absolute(out)
    grace_seconds, lateness_seconds = seconds(grace, "--grace") or 0.0, seconds(lateness, "--lateness") or 0.0
    before = None if stream else _before(settled_before, grace_seconds, url)
    with local_session("escrowmq reconcile", master=master) as spark, unwrap_errors():
        seen = Coverage() if stream else read_coverage(url, [half, commits])
        whole = not stream and not seen.incomplete
        sides = [
            read_side(spark, url, topic, kind, content=content, stream=stream, whole=whole)
            for topic, kind in ((half, half_id or id), (commits, id))
        ]
        if stream:
            assert checkpoint is not None
            found = stream_findings(*sides, grace_seconds=grace_seconds, lateness_seconds=lateness_seconds)
            return _stream(found, checkpoint, url, out_topic, once)
        assert before is not None
        covered, incomplete = _find_covered(seen.beginnings, grace_seconds, before), seen.incomplete
        report = compare(
            *sides, settled_before=before, covered_from=covered, incomplete=incomplete, out=out, most=limit
        )
    if seen.beginnings:
        begin = describe_beginnings(seen.beginnings)
        notice(f"not all is there that was ever in the topics: {begin}; what was seen before is not judged")
    if incomplete:
        notice(f"the log may be incomplete: {incomplete}")
    if json:
        print_json(report.to_json())
    else:
        _show(report)
    if not report.agrees:
        raise typer.Exit(Exit.FINDING)


def _absolute(folder: str | None) -> str | None:
    """Return a folder of this machine by its full name (Java may run elsewhere); ``hdfs://...`` and the like as
    they are."""
    return folder if folder is None or "://" in folder else str(Path(folder).absolute())


def _before(text: str | None, grace_seconds: float, url: str) -> datetime:
    """Return the time that is given; else so long before now, by the clock of the broker, which has stored the
    sightings."""
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
    """From when on both topics hold all that there was: what matches a sighting comes within the grace time. Of an
    empty queue nothing is held."""
    if not begin:
        return None
    ends_us = [before.timestamp() * 1e6 if one.since_us is None else one.since_us for one in begin]
    return datetime.fromtimestamp(max(ends_us) / 1e6, UTC) + timedelta(seconds=grace_seconds)


def _stream(found: Side, checkpoint: str, url: str, topic: str | None, once: bool) -> None:
    """Tell what is found as it is, until it ends or is interrupted."""
    from escrowmq.pipeline.reconcile import start
    from escrowmq.pipeline.reconcile.streaming import as_rows

    def tell(found: Side, _batch: int) -> None:
        for row in as_rows(found).toLocalIterator():
            print_json_line(row.asDict())

    each = tell if topic is None else None
    query = start(found, checkpoint=checkpoint, url=url, topic=topic, each=each, once=once)
    notice("reconciling; Ctrl-C ends it" if not once else "reconciling what is there")
    try:
        query.awaitTermination()
    finally:
        query.stop()


def _show(report: Report) -> None:
    rows = [
        (one.kind, one.id, one.halves, one.commits, moment(one.first_seen_us), moment(one.last_seen_us))
        for one in report.named
    ]
    if rows:
        print_table(("kind", "id", ">half", ">commits", "first seen", "last seen"), rows, "")
    counts = {kind: getattr(report, kind) for kind in ("missing", "unexpected", "differing", "nameless", "uncovered")}
    rows_read = {"half rows": report.half_rows, "commit rows": report.commit_rows}
    covered = {"covered from": report.covered_from} if report.covered_from else {}
    print_facts({"ids": report.ids, **rows_read, **counts, "settled before": report.settled_before, **covered})
    if report.agrees:
        console().print("[green]both sides agree[/green]")
