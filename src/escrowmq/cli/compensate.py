"""``escrowmq compensate``: repair half messages whose one-way confirm was lost, show the state, and resolve cases."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.text import Text
from typer import Argument, Option

from escrowmq import compensation
from escrowmq.cli.failures import Exit
from escrowmq.cli.options import (
    DEFAULT_URL,
    PASSWORD,
    App,
    Database,
    DatabaseUrl,
    Json,
    Limit,
    LogOptions,
    MetricsOptions,
    Url,
    bus_at,
    choice_option,
    time_option,
)
from escrowmq.cli.printing import (
    Columns,
    ago,
    duration,
    moment,
    notice,
    print_facts,
    print_json,
    print_json_line,
    print_rows,
)
from escrowmq.errors import Code, EscrowError, error
from escrowmq.platform.signals import stop_signals

if TYPE_CHECKING:
    from escrowmq.compensation import HalfSetConsumer, Report, Scheduler, Statistics
    from escrowmq.compensation.sets.seam import SetStore

app = App("Compensation: repair announced messages that had no effect.")

Name = Annotated[
    str, Argument(metavar="NAME", help="The compensation: as a rule the name of the messages' consumer group.")
]


@dataclass
class _Stores(DatabaseUrl):
    """The business database, and the store of the two sets."""

    sets: str | None = Option(
        None,
        envvar="ESCROWMQ_SETS",
        help="Where the two sets are: redis://HOST:PORT/0, sqlite:///sets.db, postgresql://user@host/sets. Else in the "
        "database itself." + PASSWORD,
    )

    @contextmanager
    def both(self, name: str) -> Iterator[tuple[Any, SetStore]]:
        """Open the business database, and the set store in it or elsewhere."""
        with self.open() as engine, closing(compensation.open_sets(self.sets or engine, name)) as store:
            yield engine, store


_STYLES = {
    "trying": "yellow",
    "stuck": "bold magenta",
    "conflict": "bold magenta",
    "retry": "yellow",
    "settled": "cyan",
    "done": "green",
}
HALF_SECONDS = 1.0
"""With --once: idle time (s) after which reading the keys ends."""


@dataclass
class _Repair:
    """What a scheduler repairs, and how: the settings of ``Scheduler``."""

    topics: list[str] = Option(..., "--topic", "-t", help="Of the messages; may be given again.")
    keys: str = Option("order-keys", "--keys", "-k", help="The key topic.")
    remedy: str = choice_option("handle", ["handle", "commit", "resend"], "--remedy", help="For a lost confirm")
    handler: str | None = Option(
        None,
        metavar="MODULE:FUNCTION",
        help="handle: function(connection, message), the consumer's effect. resend: function(message_id, message).",
    )
    group: str | None = Option(None, "--group", "-g", help="The consumer group of the effects' marks; else NAME.")
    keys_group: str | None = Option(None, help="The consumer group that reads the keys; else NAME.keys.")
    grace: float = time_option("1min", "--grace", "An announcement is left alone for so long.")
    limit: int = Option(1000, min=1, max=10_000, help="Ids taken at a time.")
    lease: float = time_option("1min", "--lease", "A scheduler silent for this long loses what it took.")
    max_attempts: int = Option(5, min=1, help="Attempts for one id, before an operator must decide.")
    retry_after: float = time_option("30s", "--retry-after", "Between two such attempts.")

    def settings(self) -> dict[str, Any]:
        """Return the arguments of ``Scheduler``. Raises Misuse(BAD_ARGUMENT)."""
        if (self.handler is None) != (self.remedy == "commit"):
            is_lacking = self.handler is None
            needs = f"{self.remedy} needs a --handler" if is_lacking else "commit has no use for a --handler"
            raise error(Code.BAD_ARGUMENT, f"--remedy {needs}", "--handler MODULE:FUNCTION")
        function = None if self.handler is None else load_function(self.handler, "--handler")
        functions = {"handler": None, "resend": None, "resend" if self.remedy == "resend" else "handler": function}
        return vars(self) | functions


@dataclass
class _Schedule:
    """The broker of a scheduler, when it runs, and what it prints."""

    url: Url = DEFAULT_URL
    every: float = time_option("30s", "--every", "Between the begins of two runs.")
    without_keys: bool = Option(False, "--without-keys", help="Only the scheduler: another process reads the keys.")
    once: bool = Option(False, "--once", help="Read the keys that are there, make one run, and end.")
    json: bool = Option(False, "--json", help="The result of each run, as JSON lines on standard output.")


@app.command("run")
def run(
    name: Name,
    stores: _Stores,
    repair: _Repair,
    schedule: _Schedule,
    metrics: MetricsOptions,
    log: LogOptions,
) -> None:
    """Read the announcements, and repair on a schedule what has had no effect, until SIGTERM or Ctrl-C.

    --remedy handle calls --handler and commits; commit leaves the effect to the consumer; with resend --handler sends
    the message again. Any number of processes may run for one NAME; each retries while a broker, database or set store
    is unreachable. With --once the exit code is 4 if the set store failed, and 1 if cases need an operator.
    """
    from escrowmq.compensation.statistics import collector
    from escrowmq.platform.descriptors import raise_descriptor_limit

    raise_descriptor_limit()
    log.start()
    settings = repair.settings()
    stop = threading.Event()
    with ExitStack() as stack:
        engine, store = stack.enter_context(stores.both(name))
        bus = stack.enter_context(bus_at(schedule.url))
        scheduler = stack.enter_context(compensation.Scheduler(bus, engine, store, **settings))
        reading = None
        if not schedule.without_keys:
            groups: Any = {"group": repair.keys_group, "marks": repair.group}
            reading = compensation.HalfSetConsumer(bus, repair.keys, engine, store, **groups)
        stack.enter_context(stop_signals(stop.set))
        if schedule.once:
            return _run_once(scheduler, reading, stop, schedule.json)
        health = lambda: {"status": "suspended" if scheduler.statistics.suspended else "ok"}  # noqa: E731
        at = stack.enter_context(metrics.serve(lambda: collector(name, lambda: scheduler.statistics), health))
        if schedule.json:
            print_json_line({"event": "started", "name": name, "metrics": at})
        else:
            notice(f"compensating {name}{f', metrics at {at}' if at else ''}; Ctrl-C stops it")
        _run(scheduler, reading, schedule.every, stop, schedule.json)
        _show("stopped", scheduler.statistics, schedule.json)


@app.command("status")
def status(name: Name, stores: _Stores, json: Json = False) -> None:
    """Show the state of a compensation: its sets, suspension, last run, and open cases.

    Exit code 1 if it is suspended, its set store does not respond, or cases need an operator.
    """
    with stores.both(name) as (engine, store):
        journal = compensation.Journal(engine, name)
        standing = journal.read()
        if standing is None:
            raise error(Code.NOT_FOUND, f"no compensation {name} ever ran on this database", "escrowmq compensate run")
        now_us = journal.now_us()
        cases = {one.name.lower(): count for one, count in compensation.count_cases(engine, name).items()}
        held, problem = None, None
        try:
            sizes = store.sizes()
            held = {part: getattr(sizes, part) for part in sizes.__slots__}
        except EscrowError as failure:
            problem = str(failure)
    facts = {name: getattr(standing, name) for name in ("suspended_us", "reason", "settled_us", "changed_us")}
    facts |= {"name": name, "now_us": now_us, "sets": held, "sets_problem": problem, "cases": cases}
    if json:
        print_json(facts)
    else:
        _print_status(facts)
    if cases["stuck"] + cases["conflict"] or problem is not None or standing.suspended:
        raise typer.Exit(Exit.FINDING)


def _print_status(facts: Mapping[str, Any]) -> None:
    now_us, held, cases = facts["now_us"], facts["sets"], facts["cases"]
    since = ago(facts["suspended_us"], now_us)
    shown: dict[str, Any] = {
        "compensation": facts["name"],
        "suspended": Text("no", "green") if since is None else Text(since, "bold red"),
    }
    if since is not None and facts["reason"] is not None:
        shown["because"] = facts["reason"]
    shown |= {"last change": ago(facts["changed_us"], now_us), "keys settled up to": moment(facts["settled_us"])}
    if held is None:
        shown["set store"] = Text(facts["sets_problem"], "red")
    else:
        shown |= {
            "announced (half set)": held["half"],
            "handled (commit set)": held["commits"],
            "taken by schedulers": held["taken"],
            "the oldest announced": ago(held["oldest_us"], now_us),
        }
    shown["cases that need an operator"] = cases["stuck"] + cases["conflict"]
    print_facts(shown | {"cases tried again": cases["trying"] + cases["retry"]})


@app.command("list")
def list_(
    database: Database,
    name: str | None = Argument(None, metavar="[NAME]", help="Of this compensation; else of all."),
    state: str = choice_option("waiting", [*_STYLES, "waiting", "all"], "--state", "-s", help="Of this state"),
    limit: Limit = 100,
    after: str | None = Option(None, metavar="NAME/ID", help="Only cases after this one: the next page."),
) -> None:
    """List cases: ids that a scheduler could not resolve; by default those that need an operator."""
    from escrowmq.compensation.cases import WAITING, CaseState

    wanted = {"waiting": WAITING, "all": None}.get(state) if state in ("waiting", "all") else {CaseState[state.upper()]}
    with database.open() as engine:
        found = compensation.list_cases(engine, name, states=wanted, limit=limit, after=_parse_case(after))
    rows = [
        {slot: getattr(case, slot) for slot in case.__slots__}
        | {"message_id": case.message_id.hex(), "state": case.state.name.lower()}
        for case in found
    ]
    columns: Columns = {
        "compensation": "name",
        "message id": "message_id",
        "state": lambda row: Text(row["state"], _STYLES[row["state"]]),
        ">attempts": "attempts",
        "since": lambda row: moment(row["first_us"]),
        "tried": lambda row: moment(row["changed_us"]),
        "reason": "reason",
        "note": lambda row: (row["notes"] or "").partition("\n")[0] or None,
    }
    print_rows(rows, database.json, columns, "no such cases")


def load_function(text: str, option: str) -> Callable[..., Any]:
    """Return the function named by ``MODULE:FUNCTION``, also in the working directory. Raises Misuse(BAD_ARGUMENT)."""
    module, colon, path = text.partition(":")
    if not (module and colon and path):
        raise error(Code.BAD_ARGUMENT, f"{option} {text!r} is not MODULE:FUNCTION", "such as cart.handlers:put")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")
    found: Any
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as problem:
        hint = "is it installed, or in this directory?"
        raise error(Code.BAD_ARGUMENT, f"{option} {text!r}: {problem}", hint) from None
    except AttributeError as problem:
        raise error(Code.BAD_ARGUMENT, f"{option} {text!r}: {problem}") from None
    if not callable(found):
        raise error(Code.BAD_ARGUMENT, f"{option} {text!r} is no function")
    return cast(Callable[..., Any], found)


def _run_once(scheduler: Scheduler, reading: HalfSetConsumer | None, stop: threading.Event, json: bool) -> None:
    if reading is not None:
        reading.run(stop, idle_timeout=HALF_SECONDS)
    report = scheduler.run_once(stop)
    _show("run", report, json)
    if report.suspended is not None:
        notice(f"suspended: {report.suspended}")
        raise typer.Exit(Exit.UNKNOWN)
    if scheduler.statistics.cases:
        notice(f"{scheduler.statistics.cases:,} need an operator (escrowmq compensate list)")
        raise typer.Exit(Exit.FINDING)


def _run(
    scheduler: Scheduler, reading: HalfSetConsumer | None, every: float, stop: threading.Event, json: bool
) -> None:
    """Run scheduler and key reader until ``stop`` is set; an error of either one ends both and is raised."""
    parts: list[Callable[[], object]] = [lambda: scheduler.run(every, stop)]
    if reading is not None:
        parts.append(lambda: reading.run(stop))
    with ThreadPoolExecutor(len(parts)) as pool:
        running = [pool.submit(part) for part in parts]
        for one in running:
            one.add_done_callback(lambda _: stop.set())
        try:
            _report_runs(scheduler, stop, json)
        finally:
            stop.set()
    for one in running:
        one.result()


def _report_runs(scheduler: Scheduler, stop: threading.Event, json: bool) -> None:
    """Show each run that changed something until ``stop`` is set."""
    shown = scheduler.statistics
    while not stop.wait(1.0):  # with a timeout: a signal handler runs only when this thread wakes
        now = scheduler.statistics
        if now.runs != shown.runs or now.broken_off != shown.broken_off:
            if json or _changing_numbers(now) != _changing_numbers(shown):
                _show("run", now, json)
            shown = now


def _changing_numbers(numbers: Statistics) -> dict[str, Any]:
    """Return the numbers whose change is worth a new line."""
    always = ("runs", "idle", "settled_age", "half_set", "commit_set")
    return {name: value for name, value in numbers.as_dict().items() if name not in always}


def _show(event: str, numbers: Report | Statistics, json: bool) -> None:
    values = numbers.as_dict()
    if json:
        return print_json_line({"event": event, **values})
    counts = {name: count for name, count in values.items() if isinstance(count, int) and count}
    parts = [f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items()]
    if values.get("settled_age"):
        parts.append(f"keys settled up to {duration(values['settled_age'])} ago")
    notice(", ".join(parts) or "nothing to do")


def _parse_case(after: str | None) -> Any:
    """Parse ``NAME/ID`` as the case that ``list_cases`` starts after."""
    if after is None:
        return None
    from escrowmq.model import message_id

    name, slash, identity = after.rpartition("/")
    if not slash or not name or not identity:
        raise error(Code.BAD_ARGUMENT, f"--after {after!r} is not NAME/ID")
    return compensation.Case(name, message_id(identity), compensation.CaseState.TRYING, 0, 0, 0, "", None)
