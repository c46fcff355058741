"""``escrowmq compensate``: repair half messages whose one-way confirm was lost, show the state, and resolve cases."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.text import Text

from escrowmq.cli.exporting import Insecure, Metrics, serve_metrics
from escrowmq.cli.failures import Exit, finish
from escrowmq.cli.options import DEFAULT_URL, Json, Limit, LogJson, LogLevel, Url, Why, bus_at, seconds, start_log
from escrowmq.cli.outbox import DatabaseUrl, Ids
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

app = typer.Typer(no_args_is_help=True, help="Compensation: repair announced messages that had no effect.")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The compensation: as a rule the name of the messages' consumer group.")
]
Sets = Annotated[
    str | None,
    typer.Option(
        "--sets",
        envvar="ESCROWMQ_SETS",
        help="Where the two sets are: redis://HOST:PORT/0, sqlite:///sets.db, postgresql://user@host/sets. Else in the "
        "database itself. A password can stand in the environment variable instead, where ps does not show it.",
    ),
]

RESEND = "resend"
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


@app.command("run")
def run(
    name: Name,
    topic: Annotated[list[str], typer.Option("--topic", "-t", help="Of the messages; may be given again.")],
    database_url: DatabaseUrl,
    keys: Annotated[str, typer.Option("--keys", "-k", help="The key topic.")] = "order-keys",
    sets: Sets = None,
    url: Url = DEFAULT_URL,
    remedy: Annotated[
        str,
        typer.Option(
            "--remedy",
            help="For a lost confirm: handle (--handler, then commit), commit (the consumer does the rest), resend "
            "(--handler sends it again).",
        ),
    ] = "handle",
    handler: Annotated[
        str | None,
        typer.Option(
            "--handler",
            metavar="MODULE:FUNCTION",
            help="handle: function(connection, message), the consumer's effect. resend: function(message_id, message).",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option("--group", "-g", help="The consumer group whose marks the effects have; else NAME."),
    ] = None,
    keys_group: Annotated[
        str | None, typer.Option("--keys-group", help="The consumer group that reads the keys; else NAME.keys.")
    ] = None,
    every: Annotated[str, typer.Option("--every", metavar="TIME", help="Between the begins of two runs.")] = "30s",
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="An announcement is left alone for so long.")
    ] = "1min",
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Ids taken at a time.")] = 1000,
    lease: Annotated[
        str, typer.Option("--lease", metavar="TIME", help="A scheduler silent for this long loses what it took.")
    ] = "1min",
    max_attempts: Annotated[
        int, typer.Option("--max-attempts", min=1, help="Tries of one id, before it waits for a person.")
    ] = 5,
    retry_after: Annotated[str, typer.Option("--retry-after", metavar="TIME", help="Between two such tries.")] = "30s",
    without_keys: Annotated[
        bool, typer.Option("--without-keys", help="Only the scheduler: another process reads the keys.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Read the keys that are there, make one run, and end.")] = False,
    metrics: Metrics = None,
    insecure: Insecure = False,
    json: Annotated[bool, typer.Option("--json", help="What each run did, as JSON lines on standard output.")] = False,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> None:
    """Read the announcements, and repair on a schedule what has had no effect, until SIGTERM or Ctrl-C.

    Any number of processes may run for one NAME; each waits for an unreachable broker, database or set store. With
    --once the exit code is 4 if the set store failed, and 1 if cases need an operator.
    """
    from escrowmq.compensation import HalfSetConsumer, Scheduler
    from escrowmq.compensation.statistics import collector
    from escrowmq.platform.descriptors import raise_descriptor_limit

    raise_descriptor_limit()
    start_log(log_level, log_json)
    if remedy not in ("handle", "commit", RESEND):
        raise error(Code.BAD_ARGUMENT, f"--remedy {remedy}", "handle, commit or resend")
    if (handler is None) != (remedy == "commit"):
        text = (
            f"--remedy {remedy} needs a --handler" if handler is None else "--remedy commit has no use for a --handler"
        )
        raise error(Code.BAD_ARGUMENT, text, "--handler MODULE:FUNCTION")
    function = None if handler is None else load_function(handler, "--handler")
    times: dict[str, Any] = {
        "grace": _parse_time(grace, "--grace"),
        "lease": _parse_time(lease, "--lease"),
        "retry_after": _parse_time(retry_after, "--retry-after"),
    }
    pause = _parse_time(every, "--every")
    stop = threading.Event()
    with ExitStack() as stack:
        engine, store = stack.enter_context(_open(database_url, sets, name))
        bus = stack.enter_context(bus_at(url))
        scheduler = stack.enter_context(
            Scheduler(
                bus,
                engine,
                store,
                topics=topic,
                keys=keys,
                group=group,
                keys_group=keys_group,
                remedy=cast(Literal["handle", "commit", "resend"], remedy),
                handler=function if remedy == "handle" else None,
                resend=function if remedy == RESEND else None,
                limit=limit,
                max_attempts=max_attempts,
                **times,
            )
        )
        reading = None if without_keys else HalfSetConsumer(bus, keys, engine, store, group=keys_group, marks=group)
        stack.enter_context(stop_signals(stop.set))
        if once:
            _run_once(scheduler, reading, stop, json)
            return
        made = lambda: collector(name, lambda: scheduler.statistics)  # noqa: E731
        health = lambda: {"status": "suspended" if scheduler.statistics.suspended else "ok"}  # noqa: E731
        at = stack.enter_context(serve_metrics(metrics, insecure, made, health))
        if json:
            print_json_line({"event": "started", "name": name, "metrics": at})
        else:
            notice(f"compensating {name}{f', metrics at {at}' if at else ''}; Ctrl-C stops it")
        _run(scheduler, reading, pause, stop, json)
        _show("stopped", scheduler.statistics, json)


@app.command("status")
def status(name: Name, database_url: DatabaseUrl, sets: Sets = None, json: Json = False) -> None:
    """Show the state of a compensation: its sets, suspension, last run, and open cases.

    Exit code 1 if it is suspended, its set store does not respond, or cases wait.
    """
    from escrowmq.compensation import CaseState, Journal, count_cases

    with _open(database_url, sets, name) as (engine, store):
        journal = Journal(engine, name)
        standing = journal.read()
        if standing is None:
            raise error(Code.NOT_FOUND, f"no compensation {name} ever ran on this database", "escrowmq compensate run")
        now_us = journal.now_us()
        cases = {one.name.lower(): count for one, count in count_cases(engine, name).items()}
        problem, sizes = None, None
        try:
            sizes = store.sizes()
        except EscrowError as failure:
            problem = str(failure)
    waiting = cases[CaseState.STUCK.name.lower()] + cases[CaseState.CONFLICT.name.lower()]
    held = None if sizes is None else {part: getattr(sizes, part) for part in sizes.__slots__}
    if json:
        facts = {"name": name, "suspended_us": standing.suspended_us, "reason": standing.reason}
        facts |= {"settled_us": standing.settled_us, "changed_us": standing.changed_us, "now_us": now_us}
        print_json({**facts, "sets": held, "sets_problem": problem, "cases": cases})
    else:
        since = ago(standing.suspended_us, now_us)
        print_facts(
            {
                "compensation": name,
                "suspended": Text("no", "green") if since is None else Text(since, "bold red"),
                **({} if since is None or standing.reason is None else {"because": standing.reason}),
                "last change": ago(standing.changed_us, now_us),
                "keys settled up to": moment(standing.settled_us),
                **(
                    {"set store": Text(problem or "", "red")}
                    if held is None
                    else {
                        "announced (half set)": held["half"],
                        "handled (commit set)": held["commits"],
                        "taken by schedulers": held["taken"],
                        "the oldest announced": ago(held["oldest_us"], now_us),
                    }
                ),
                "cases that wait for a person": waiting,
                "cases tried again": cases["trying"] + cases["retry"],
            }
        )
    if waiting or problem is not None or standing.suspended:
        raise typer.Exit(Exit.FINDING)


@app.command("list")
def list_(
    database_url: DatabaseUrl,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Of this compensation; else of all.")] = None,
    state: Annotated[
        str,
        typer.Option(
            "--state",
            "-s",
            help="stuck, conflict, trying, retry, settled, done, all; else waiting (stuck or conflict).",
        ),
    ] = "waiting",
    limit: Limit = 100,
    after: Annotated[
        str | None, typer.Option("--after", metavar="NAME/ID", help="Only cases after this one: the next page.")
    ] = None,
    json: Json = False,
) -> None:
    """List cases: ids that a scheduler could not resolve; by default those that need an operator."""
    from escrowmq import outbox
    from escrowmq.compensation import list_cases
    from escrowmq.compensation.cases import WAITING, CaseState

    if state not in (*_STYLES, "waiting", "all"):
        raise error(Code.BAD_ARGUMENT, f"--state {state}", f"one of {', '.join(_STYLES)}, waiting, all")
    wanted = {"waiting": WAITING, "all": None}.get(state) if state in ("waiting", "all") else {CaseState[state.upper()]}
    with outbox.engines.opened(database_url) as engine:
        found = list_cases(engine, name, states=wanted, limit=limit, after=_parse_case(after))
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
        "noted": lambda row: (row["notes"] or "").partition("\n")[0] or None,
    }
    print_rows(rows, json, columns, "no such cases")


@app.command("retry")
def retry(name: Name, ids: Ids, database_url: DatabaseUrl, why: Why = None, json: Json = False) -> None:
    """Retry ids in the next run, with new attempts. The action is recorded (`escrowmq acts list`)."""
    from escrowmq.compensation import retry_cases

    _apply_to_each(retry_cases, name, ids, database_url, why, json)


@app.command("settle")
def settle(name: Name, ids: Ids, database_url: DatabaseUrl, why: Why = None, json: Json = False) -> None:
    """Close cases that an operator has resolved. The action is recorded; `retry` reopens them."""
    from escrowmq.compensation import settle_cases

    _apply_to_each(settle_cases, name, ids, database_url, why, json)


def _apply_to_each(act: Callable[..., Any], name: str, ids: list[str], url: str, why: str | None, json: bool) -> None:
    """Apply one operation to every id and print each result; the exit code is that of the first failure."""
    from escrowmq import outbox

    with outbox.engines.opened(url) as engine:
        results = act(engine, name, ids, why=why)
    states = [{"state": None if one.state is None else one.state.name.lower()} for one in results]
    finish("message id", [(r.message_id.hex(), r.code, s) for r, s in zip(results, states, strict=True)], json)


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
        raise error(
            Code.BAD_ARGUMENT, f"{option} {text!r}: {problem}", "is it installed, or in this directory?"
        ) from None
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
        notice(f"{scheduler.statistics.cases:,} wait for a person (escrowmq compensate list)")
        raise typer.Exit(Exit.FINDING)


def _run(
    scheduler: Scheduler, reading: HalfSetConsumer | None, every: float, stop: threading.Event, json: bool
) -> None:
    """Run scheduler and key reader until ``stop`` is set; an error of either one ends both and is raised."""
    failures: list[BaseException] = []

    def part(act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as problem:
            failures.append(problem)
        finally:
            stop.set()

    acts: list[Callable[[], object]] = [lambda: scheduler.run(every, stop)]
    if reading is not None:
        acts.append(lambda: reading.run(stop))
    threads = [threading.Thread(target=part, args=(act,), daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    shown = scheduler.statistics
    while not stop.wait(1.0):  # with a timeout: a signal handler runs only when this thread wakes
        now = scheduler.statistics
        if now.runs != shown.runs or now.broken_off != shown.broken_off:
            if json or _changing_numbers(now) != _changing_numbers(shown):
                _show("run", now, json)
            shown = now
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _changing_numbers(numbers: Statistics) -> dict[str, Any]:
    """Return the numbers whose change is worth a new line."""
    return {
        n: v for n, v in numbers.as_dict().items() if n not in ("runs", "idle", "settled_age", "half_set", "commit_set")
    }


def _show(event: str, numbers: Report | Statistics, json: bool) -> None:
    values = numbers.as_dict()
    if json:
        return print_json_line({"event": event, **values})
    parts = [
        f"{count:,} {name.replace('_', ' ')}" for name, count in values.items() if isinstance(count, int) and count
    ]
    if values.get("settled_age"):
        parts.append(f"keys settled up to {duration(values['settled_age'])} ago")
    notice(", ".join(parts) or "nothing to do")


@contextmanager
def _open(database_url: str, sets: str | None, name: str) -> Iterator[tuple[Any, SetStore]]:
    """Open the business database, and the set store in it or elsewhere."""
    from escrowmq import outbox
    from escrowmq.compensation import open_sets

    with outbox.engines.opened(database_url) as engine:
        store = open_sets(engine if sets is None else sets, name)
        try:
            yield engine, store
        finally:
            store.close()


def _parse_case(after: str | None) -> Any:
    """Parse ``NAME/ID`` as the case that ``list_cases`` starts after."""
    if after is None:
        return None
    from escrowmq.compensation import Case, CaseState
    from escrowmq.model import message_id

    name, slash, identity = after.rpartition("/")
    if not slash or not name or not identity:
        raise error(Code.BAD_ARGUMENT, f"--after {after!r} is not NAME/ID")
    return Case(name, message_id(identity), CaseState.TRYING, 0, 0, 0, "", None)


def _parse_time(text: str, option: str) -> float:
    return seconds(text, option) or 0.0
