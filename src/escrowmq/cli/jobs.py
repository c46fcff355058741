"""The Spark jobs as commands: ``escrowmq audit``, ``sweep`` and ``report``; also ``demo``. ``reconcile`` has its own
module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import (
    DEFAULT_URL,
    Brokers,
    Json,
    MetricsOptions,
    Url,
    admin_at,
    check_folder,
    check_reachable,
    choice_option,
    time_option,
)
from escrowmq.cli.printing import console, notice, print_json, print_json_line, print_table
from escrowmq.errors import Code, error
from escrowmq.platform.signals import stop_signals

if TYPE_CHECKING:
    from escrowmq.pipeline.audit.verdict import Verdict
    from escrowmq.pipeline.sweeps import Books, Swept, schedule

Master = Annotated[str | None, Option(help="A Spark cluster (spark://HOST:PORT) instead of this machine.")]


@dataclass
class _Demo:
    """The options of the demo; the names are those of ``DemoOptions``."""

    orders: Path | None = Option(None, help="Real orders: a .parquet or .csv file of invoice lines; else made-up ones.")
    folder: Path | None = Option(None, help="Keep the run here; else in a new folder demo-run.")
    count: int = Option(2000, min=1, help="How many orders to make up.")
    limit: int | None = Option(None, min=1, help="Use only the first so many orders.")
    seed: int = Option(1, help="The same seed makes up the same orders.")
    shop_kills: int = Option(4, min=0, help="Kill the shop between its commit and the COMMIT.")
    broker_kills: int = Option(2, min=0, help="Kill the broker; of two, the one that leads.")
    service_kills: int = Option(1, min=0, help="Kill each consumer between its commit and its ack.")
    threads: int = Option(24, min=1, help="Orders placed at the same time.")
    audit: bool = Option(True, help="Compare all sides with Spark at the end.")
    log: str | None = Option(
        None,
        metavar="kafka",
        help="On a leader and a standby, with their log on a Kafka of the demo's own (needs Maven, which fetches it "
        "once).",
    )


def demo(options: _Demo) -> None:
    """Run a shop, a cart service and a points service on a broker, kill them all, and audit the result.

    Exit code 1 when the audit finds anything lost, repeated, altered, leaked or undecided.
    """
    import prometheus_client  # noqa: F401  # the demo's broker needs it

    from escrowmq.demo import DemoOptions, run

    if options.audit:
        import escrowmq.pipeline.audit  # noqa: F401  # report missing packages of the audit before the run

    verdict = run(DemoOptions(**vars(options)))
    if verdict is not None and not verdict.settled:
        raise typer.Exit(Exit.FINDING)


@dataclass
class _Manifest:
    """The manifest of an audit, and what is done with it instead of an audit."""

    folder: Path = Argument(..., help="The folder of manifest.json.")
    check: bool = Option(False, "--check", help="Only report all errors of the manifest, with their lines.")
    init: bool = Option(False, "--init", help="Only write a manifest, from --database and the topics at --url.")
    database: list[str] = Option(
        [],
        metavar="URL",
        help="With --init: the producer's first, then consumers'. ${NAME} is an environment variable.",
    )
    topic: list[str] = Option([], metavar="NAME", help="With --init: a topic; without it all topics.")
    url: Url = DEFAULT_URL

    def prepare(self, json: bool) -> None:
        """Write a manifest, or report its errors. Exit code 1 if it has some."""
        from escrowmq.pipeline.audit.checking import check
        from escrowmq.pipeline.audit.drafting import draft

        if self.init:
            if not self.database:
                raise error(Code.BAD_ARGUMENT, "--init needs --database", "a URL or a SQLite file, once for each")
            with admin_at(self.url) as admin:
                topics = self.topic or [topic["name"] for topic in admin.topics()]
            _, notes = draft(self.folder, self.url, topics, self.database)
            for note in notes:
                notice(note)
            notice(f"{self.folder / 'manifest.json'}: read it, then: escrowmq audit {self.folder} --check")
            return
        problems = check(self.folder)
        if json:
            print_json({"problems": [asdict(problem) for problem in problems]})
        else:
            print_table((">line", "field", "problem"), [(p.line, p.field, p.text) for p in problems], "no errors")
        if problems:
            raise typer.Exit(Exit.FINDING)


@dataclass
class _Auditing:
    """The options of an audit, and of the files that it writes."""

    page: bool = Option(True, help="Also draw report.html.")
    rows: bool = Option(False, "--rows", help="Read all rows, instead of checksums first; the verdict is the same.")
    junit: Path | None = Option(None, metavar="FILE", help="Also write a JUnit file: a test case per comparison.")
    sample: str | None = Option(None, metavar="PERCENT", help="Compare only so many ids, such as 1%, by their hash.")
    state: Path | None = Option(None, metavar="FILE", help="Remember the log's sums: the next audit reads what is new.")
    watch: float | None = time_option(None, "--watch", "Repeat the audit; --metrics serves the last result.")
    keep_classes: bool = Option(
        False, "--keep-classes", help="Keep what Java has loaded (160 MB in your cache): Spark then starts faster."
    )

    def check(self, metrics: MetricsOptions) -> None:
        """Raise Misuse(BAD_ARGUMENT) for options that do not fit together."""
        if self.watch is not None and self.watch <= 0:
            raise error(Code.BAD_ARGUMENT, f"--watch {self.watch:g}", "a time such as 15min")
        if self.watch is None and metrics.metrics is not None:
            raise error(Code.BAD_ARGUMENT, "--metrics without --watch", "a single audit ends too soon to be scraped")
        if self.watch is not None and self.keep_classes:
            raise error(Code.BAD_ARGUMENT, "--keep-classes with --watch", "keep them once, with an audit before it")

    def run(self, folder: Path, master: str | None) -> Verdict:
        """Audit once, and write what is asked for."""
        from escrowmq.pipeline.audit import run
        from escrowmq.pipeline.audit.verdict import write_junit

        with Console(stderr=True).status("audit") as status:
            audited = run if master is None else partial(run, master=master)
            audited = partial(audited, windows=0 if self.rows else None, sample=self.sample, state=self.state)
            audited = partial(audited, keeps_classes=self.keep_classes, page=self.page)
            verdict = audited(folder, progress=lambda text: status.update(f"audit: {text}"))
        if self.junit is not None:
            write_junit(self.junit, verdict)
        return verdict


def audit(
    of: _Manifest, auditing: _Auditing, metrics: MetricsOptions, json: Json = False, master: Master = None
) -> None:
    """Compare databases and the broker's log by id and content, as manifest.json says; name every difference.

    Writes verdict.json and report.html into the folder. Exit code 1 when the sides do not agree.
    """
    if of.init or of.check:
        return of.prepare(json)
    auditing.check(metrics)
    folder = of.folder
    from escrowmq.pipeline.audit import watching

    if folder.is_dir():  # else it is no run folder
        check_folder(folder, "the run folder")
    if auditing.watch is None:
        verdict = auditing.run(folder, master)
        _show_audited(verdict, folder, auditing.page, print_json if json else None)
        if not verdict.agrees:
            raise typer.Exit(Exit.FINDING)
        return
    stop, watched = threading.Event(), watching.Watched()
    with stop_signals(stop.set), metrics.serve(lambda: watching.collector(watched)) as at:
        notice(f"auditing every {auditing.watch:g} s{f', metrics at {at}' if at else ''}; Ctrl-C stops it")
        show = partial(_show_audited, folder=folder, page=auditing.page, write=print_json_line if json else None)
        watching.keep_auditing(lambda: auditing.run(folder, master), auditing.watch, stop, watched, show)


def _show_audited(
    verdict: Verdict, folder: Path, page: bool, write: Callable[[Mapping[str, Any]], None] | None
) -> None:
    from escrowmq.demo.screen import show_verdict

    if write is not None:
        write(verdict.to_json())
        return
    show_verdict(console(), verdict)
    notice(f"{folder / 'verdict.json'}" + (f"  {folder / 'report.html'}" if page else ""))


def report(
    brokers: Brokers,
    out: Path = Option(".", "--out", "-o", help="The folder for report.html and report.json."),
    master: Master = None,
) -> None:
    """Write report.html and report.json: volumes, decision latency, check-backs, pending work and trends.

    A data folder (--url file:FOLDER) is only read, and may be in use.
    """
    from escrowmq.pipeline.report import report as measured
    from escrowmq.pipeline.report import write_report

    check_folder(out, "--out")
    url = brokers.url
    check_reachable(url)
    with Console(stderr=True).status("report") as status:
        found = measured(url, master=master, progress=lambda text: status.update(f"report: {text}"))
        write_report(out, found)
    if brokers.json:
        print_json(found.to_json())
    else:
        if found.incomplete:
            notice(f"the report may be incomplete: {found.incomplete}")
        notice(f"{out / 'report.html'}  {out / 'report.json'}")


_PASSWORDS = " Passwords: better in PGPASSWORD or ~/.my.cnf, where ps does not show them."


@dataclass
class _Books:
    """The databases of orders and freezes, and their tables."""

    orders: list[str] = Option(
        ..., metavar="URL", help=f"A database of orders; once for every shard, in their order.{_PASSWORDS}"
    )
    products: str = Option(..., metavar="URL", help=f"The database of products and freezes.{_PASSWORDS}")
    tables: Path | None = Option(None, metavar="FILE", help="JSON: names of tables and columns that differ.")
    shard_by: str | None = Option(
        None,
        metavar="COLUMN",
        help="Of freezes: orders are in shard crc32(COLUMN) modulo shards. Without it all shards are queried.",
    )
    events: str | None = Option(None, metavar="TOPIC", help="Announce timed-out orders through the outbox.")

    def books(self) -> Books:
        """Return the names of tables and columns, after checking them in the databases."""
        from escrowmq.pipeline.sweeps import Books

        books = Books() if self.tables is None else Books.read(self.tables)
        books = replace(books, shard_by=self.shard_by or books.shard_by, events=self.events or books.events)
        books.check(tuple(self.orders), self.products)  # before Spark starts
        return books


@dataclass
class _Sweeping:
    """What is swept, and when."""

    unpaid_after: float = time_option("0s", "--unpaid-after", "An unpaid order times out this long after its pay_by.")
    orphan_after: float = time_option("10min", "--orphan-after", "A freeze so old should have its order.")
    only: str | None = choice_option(None, ["orders", "freezes"], "--only", help="One of the sweeps")
    every: float | None = time_option(None, "--every", "Repeat on this schedule; one machine sweeps at a time.")
    alarm: str | None = Option(None, metavar="URL", help="Post what could not be settled here, as JSON.")

    def check(self, metrics: MetricsOptions) -> None:
        """Raise Misuse(BAD_ARGUMENT) for options that do not fit together."""
        from escrowmq.pipeline.sweeps import schedule

        if self.every is not None and self.every <= 0:
            raise error(Code.BAD_ARGUMENT, f"--every {self.every:g}", "a time such as 15min")
        if self.every is None and metrics.metrics is not None:
            raise error(Code.BAD_ARGUMENT, "--metrics without --every", "a single run ends too soon to be scraped")
        if self.alarm is not None:
            schedule.check_alarm(self.alarm)


def sweep(of: _Books, sweeping: _Sweeping, metrics: MetricsOptions, master: Master = None, json: Json = False) -> None:
    """Time unpaid orders out, release the freezes of paid ones as sold, give back stock that was frozen without an
    order.

    Run it every few minutes, or with --every. It may be killed, and run twice at once. Without --every the exit code is
    1 if something could not be settled; the next run tries again.
    """
    from escrowmq.pipeline.session import local_session
    from escrowmq.pipeline.sweeps import Databases, schedule, sweep_freezes, sweep_orders

    sweeping.check(metrics)
    books, databases = of.books(), Databases(tuple(of.orders), of.products)

    def run() -> dict[str, Swept]:
        done: dict[str, Swept] = {}
        with local_session("escrowmq sweep", master=master, rows=1000) as spark:
            if sweeping.only != "freezes":
                done["orders"] = sweep_orders(spark, databases, books=books, unpaid_seconds=sweeping.unpaid_after)
            if sweeping.only != "orders":
                done["freezes"] = sweep_freezes(spark, databases, books=books, orphan_seconds=sweeping.orphan_after)
        return done

    if sweeping.every is not None:
        return _sweep_on_schedule(run, of.products, sweeping, metrics, json)
    found = run()
    _show_swept(found, print_json if json else None)
    if any(swept.failed for swept in found.values()):
        if sweeping.alarm is not None:
            schedule.post(sweeping.alarm, schedule.make_failed_event(found))
        raise typer.Exit(Exit.FINDING)


def _sweep_on_schedule(
    run: schedule.Sweeps, products: str, sweeping: _Sweeping, metrics: MetricsOptions, json: bool
) -> None:
    from escrowmq.pipeline.sweeps import schedule

    stop, totals = threading.Event(), schedule.Totals()
    pause = sweeping.every or 0.0

    def show(found: Mapping[str, Swept] | None) -> None:
        if found is not None:
            _show_swept(found, print_json_line if json else None)

    with stop_signals(stop.set), metrics.serve(lambda: schedule.collector(totals)) as at:
        notice(f"sweeping every {pause:g} s{f', metrics at {at}' if at else ''}; Ctrl-C stops it")
        schedule.keep_sweeping(run, products, pause, stop, totals=totals, on_run=show, alarm=sweeping.alarm)


def _show_swept(found: Mapping[str, Swept], print_as_json: Callable[[Mapping[str, Any]], None] | None) -> None:
    if print_as_json is not None:
        print_as_json({name: swept.to_json() for name, swept in found.items()})
        return
    rows = [(name, act, count) for name, swept in found.items() for act, count in swept.acts.items()]
    print_table(("sweep", "what", ">count"), rows, "nothing to do")
    for swept in found.values():
        for trans_id, problem in swept.alerts:
            notice(f"{trans_id}: {problem}")
