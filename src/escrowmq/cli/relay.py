"""``escrowmq outbox relay``: moves what was committed into the local message table to a broker, until it is stopped."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import DEFAULT_URL, pairs, seconds
from escrowmq.cli.outbox import DatabaseUrl
from escrowmq.cli.printing import duration, notice, print_json_line
from escrowmq.platform.signals import stop_signals

if TYPE_CHECKING:
    from escrowmq.outbox.relay import Relay


def relay(
    database_url: DatabaseUrl,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            "-t",
            envvar="ESCROWMQ_URL",
            help="Where to: escrow://HOST:PORT[,HOST:PORT...], kafka://HOST:PORT[,...], amqp://..., redis://...",
        ),
    ] = DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Send what is there, then end.")] = False,
    patience: Annotated[
        str, typer.Option("--patience", metavar="TIME", help="With --once: give up after this long.")
    ] = "1min",
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Threads.")] = 2,
    batch_rows: Annotated[int, typer.Option("--batch-rows", min=1, max=65_536, help="Rows of one batch.")] = 4000,
    redeliveries: Annotated[
        int, typer.Option("--redeliveries", min=0, help="Tries after a refusal, before it waits for a person.")
    ] = 3,
    redelivery_interval: Annotated[
        str, typer.Option("--redelivery-interval", metavar="TIME", help="Between two such tries.")
    ] = "5min",
    on_exhausted: Annotated[
        str,
        typer.Option("--on-exhausted", help="What a waiting message does to later ones of its key: hold_key, pass."),
    ] = "hold_key",
    await_callback: Annotated[
        bool, typer.Option("--await-callback", help="Keep sent rows until the consumer's callback; resend without.")
    ] = False,
    keep: Annotated[str, typer.Option("--keep", metavar="TIME", help="Keep sent rows this long.")] = "0s",
    lease: Annotated[
        str, typer.Option("--lease", metavar="TIME", help="A relay silent for this long loses its lanes.")
    ] = "30s",
    poll_interval: Annotated[
        str, typer.Option("--poll-interval", metavar="TIME", help="Longest pause between two looks at the table.")
    ] = "500ms",
    status_interval: Annotated[
        str, typer.Option("--status-interval", metavar="TIME", help="Between two status lines.")
    ] = "10s",
    target_option: Annotated[
        list[str] | None,
        typer.Option(
            "--target-option", "-o", metavar="NAME=VALUE", help="An option of the target; may be given again."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Status as JSON lines on standard output.")] = False,
) -> None:
    """Send committed messages until SIGTERM or Ctrl-C; both finish the batch in hand and give the lanes back.

    Several relays on one database share the work. With --once the exit code is 4 if something was left when the patience ended.
    """
    from escrowmq import outbox
    from escrowmq.outbox.relay import Relay
    from escrowmq.outbox.targets.opening import open_target, read_options

    _log_to_stderr()
    settings = {
        "workers": workers,
        "batch_rows": batch_rows,
        "redeliveries": redeliveries,
        "redelivery_interval": seconds(redelivery_interval, "--redelivery-interval"),
        "on_exhausted": on_exhausted,
        "await_callback": await_callback,
        "keep": seconds(keep, "--keep"),
        "lease": seconds(lease, "--lease"),
        "poll_interval": seconds(poll_interval, "--poll-interval"),
    }
    wait = seconds(patience, "--patience")
    every = seconds(status_interval, "--status-interval") or 10.0
    given = pairs(target_option, "--target-option")
    named: dict[str, Any] = {name.replace("-", "_"): value for name, value in given.items()}
    with ExitStack() as stack:
        engine = stack.enter_context(outbox.engines.opened(database_url))
        target = open_target(to, **read_options(to, named))
        stack.callback(target.close)
        running = Relay(engine, target, **settings)
        stack.callback(running.stop)
        drained = _drain(running, wait) if once else _run(running, to, every, json)
        _show(running, json)
    if not drained:
        raise typer.Exit(Exit.UNKNOWN)


def _drain(running: Relay, patience: float | None) -> bool:
    with stop_signals(running.ask_to_stop):
        drained = running.drain(patience)
    if not drained:
        notice("something is left: the target or the database is away, or there was not enough time")
    return drained


def _run(running: Relay, to: str, every: float, json: bool) -> bool:
    from escrowmq.outbox.targets.opening import shown

    ended = threading.Event()

    def report() -> None:
        shown, at = None, time.monotonic()
        while not ended.wait(every):
            now = running.statistics
            if json or now != shown:
                rate = (now.sent - (shown.sent if shown else 0)) / (time.monotonic() - at)
                _show(running, json, rate)
            shown, at = now, time.monotonic()

    with stop_signals(running.ask_to_stop):
        running.start()
        if json:
            print_json_line({"event": "started", "to": shown(to), **running.statistics.as_dict()})
        else:
            notice(f"relaying to {shown(to)}; Ctrl-C stops it")
        reporter = threading.Thread(target=report, daemon=True)
        reporter.start()
        try:
            running.wait()
        finally:
            ended.set()
            reporter.join()
            running.stop()
    return True


def _show(running: Relay, json: bool, rate: float | None = None) -> None:
    now = running.statistics
    if json:
        event = "stopped" if rate is None else "status"
        return print_json_line({"event": event, **now.as_dict()})
    troubles = ("refused", "waiting", "repeated", "target_failures", "database_failures")
    parts = [f"{now.sent:,} sent"]
    if rate is not None:
        parts += [f"{rate:,.0f}/s", f"{now.lanes} lanes", f"{duration(now.lag)} behind" if now.lag else "nothing left"]
    parts += [f"{count:,} {name.replace('_', ' ')}" for name in troubles if (count := getattr(now, name))]
    notice(", ".join(parts))


def _log_to_stderr() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
