"""``escrowmq work``: runs the handlers of an app."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer import Argument, Option

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import LogOptions, MetricsOptions, bus_at, time_option
from escrowmq.cli.printing import notice
from escrowmq.cli.processes import WORKER, Processes, stop_with_parent
from escrowmq.errors import EscrowError
from escrowmq.handlers import App, Handled, Running
from escrowmq.handlers.loading import load_app
from escrowmq.platform.descriptors import raise_descriptor_limit
from escrowmq.platform.listening import shown_address
from escrowmq.platform.signals import Signals, stop_signals

BEAT_SECONDS = 1.0
"""Time (s) between two writes of a health file."""
MULTIPLE = "PROMETHEUS_MULTIPROC_DIR"  # where processes share their metrics, of prometheus_client

Health = Callable[[], Mapping[str, str]]


@dataclass
class _Working:
    """Options of the processes that run the handlers."""

    processes: int = Option(1, min=1, max=256, help="Processes; one that ends starts again.")
    reload: bool = Option(False, "--reload", help="Start again when a Python file below the current folder changes.")
    grace: float = time_option("30s", "--grace", "After SIGTERM: how long the handlers that run may take.")
    health: str | None = Option(
        None,
        metavar="FILE|HOST:PORT",
        help="A file that is touched each second while messages can be received and removed otherwise; or serve "
        "/healthz here.",
    )
    asyncapi: bool = Option(False, "--asyncapi", help="Print the AsyncAPI document of the handlers, and end.")


def work(
    working: _Working,
    metrics: MetricsOptions,
    log: LogOptions,
    app: str = Argument(..., metavar="MODULE:APP", help="The App: shop:app is the one named app in shop.py."),
    url: str | None = Option(
        None, "--url", "-u", envvar="ESCROWMQ_URL", help="The broker, as for other commands; else that of the app."
    ),
) -> None:
    """Run the handlers of an app until SIGTERM or Ctrl-C, and log a line for each message.

    At the end nothing more is received, messages that were not started go back at once, and running handlers may end
    within --grace. A second signal ends the process at once; its messages come again after their lease.
    """
    if working.asyncapi:
        typer.echo(json.dumps(load_app(app).asyncapi(app), indent=2))
        return
    log.start()
    raise_descriptor_limit()
    if working.processes == 1 and not working.reload:
        return _work(load_app(app), url, working, metrics)
    command = [sys.executable, "-m", "escrowmq", "work", app, "--grace", f"{working.grace}s"]
    command += ["--log-level", log.log_level, *(["--log-json"] if log.log_json else [])]
    with tempfile.TemporaryDirectory(prefix="escrowmq-work-") as folder, ExitStack() as stack:
        environment = {} if url is None else {"ESCROWMQ_URL": url}
        if metrics.metrics is not None:
            environment[MULTIPLE] = folder
        watched = Path.cwd() if working.reload else None
        processes = Processes(command, working.processes, Path(folder), watched, environment)
        stack.enter_context(_answering(working.health, metrics.insecure, processes.health))
        stack.enter_context(metrics.serve(lambda: _together(folder), processes.health))
        notice(f"{working.processes} processes of {app}; Ctrl-C stops them")
        if status := processes.run():
            raise typer.Exit(status)


def _work(app: App, url: str | None, working: _Working, metrics: MetricsOptions) -> None:
    """Run the handlers in this process."""
    from escrowmq.handlers.working import log_line

    at = url or app.url
    on_handled: list[Callable[[Handled], None]] = [log_line]
    stop = threading.Event()
    # set on another thread, because a signal may interrupt the event's own wait
    later = lambda: threading.Thread(target=stop.set, daemon=True).start()  # noqa: E731
    signals = Signals(later, lambda: os._exit(Exit.INTERRUPTED))
    with stop_signals(signals), bus_at(at, make=True) as bus, ExitStack() as stack:
        registry: Any = None
        if metrics.metrics is not None or MULTIPLE in os.environ:
            registry = _measure(on_handled)

        def report(handled: Handled) -> None:
            for each in on_handled:
                each(handled)

        running = stack.enter_context(app.running(bus, grace=working.grace, on_handled=report))
        stack.enter_context(_answering(working.health, metrics.insecure, running.health))
        shown = stack.enter_context(metrics.serve(lambda: registry, running.health))
        groups = ", ".join(f"{handler.name} ({handler.group})" for handler in app.handlers)
        notice(f"receiving from {shown_address(at)}: {groups}" + (f"; metrics at {shown}" if shown else ""))
        stop_with_parent(stop)
        _wait(running, stop)


def _wait(running: Running, stop: threading.Event) -> None:
    """Wait for a signal, or the error of a worker, which is raised. Polls, so that a signal is handled at once."""
    while not stop.wait(0.2):
        try:
            running.wait(0)
        except EscrowError:
            raise
        except BaseException as problem:
            notice(f"a worker ended: {problem!r}")
            raise typer.Exit(Exit.FINDING) from problem


def _measure(on_handled: list[Callable[[Handled], None]]) -> Any:
    """Measure handlers and operations of this process into a registry, and return it."""
    from prometheus_client import CollectorRegistry

    from escrowmq import client_metrics
    from escrowmq.handlers.metrics import measure

    registry = CollectorRegistry(auto_describe=False)
    client_metrics.instrument(registry)
    on_handled.append(measure(registry))
    return registry


def _together(folder: str) -> Any:
    """Return the collector of what the processes have written into ``folder``."""
    from prometheus_client.multiprocess import MultiProcessCollector

    return MultiProcessCollector(None, path=folder)  # type: ignore[no-untyped-call]


@contextmanager
def _answering(place: str | None, insecure: bool, health: Health) -> Iterator[None]:
    """Report ``health`` within the block: by a file, or at HOST:PORT."""
    if place is None:
        yield
    elif (parts := place.rpartition(":"))[1] and parts[2].isdigit() and "/" not in place:
        from prometheus_client import CollectorRegistry

        with MetricsOptions(place, insecure).serve(lambda: CollectorRegistry(auto_describe=False), health) as at:
            notice(f"health at {at}/healthz")
            yield
    else:
        ended = threading.Event()
        beat = threading.Thread(target=_beat, args=(Path(place), health, ended), name="escrowmq-health", daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
            Path(place).unlink(missing_ok=True)


def _beat(file: Path, health: Health, ended: threading.Event) -> None:
    was_ok = True
    while True:
        now = health()
        if now["status"] == "ok":
            file.touch()
        else:
            file.unlink(missing_ok=True)
            if was_ok and WORKER not in os.environ:
                notice(f"not healthy: {now.get('reason', now['status'])}")
        was_ok = now["status"] == "ok"
        if ended.wait(BEAT_SECONDS):
            return
