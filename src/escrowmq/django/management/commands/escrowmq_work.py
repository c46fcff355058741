"""``manage.py escrowmq_work``: run tasks and handlers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, DatabaseError

from escrowmq import hooks
from escrowmq.client.bus import Bus
from escrowmq.connecting import connect
from escrowmq.django.database import broker_url, open_relay
from escrowmq.django.handlers import find_apps, renew_connections
from escrowmq.django.task_api import task_backends
from escrowmq.django.tasks import EscrowBackend
from escrowmq.django.working import Worker
from escrowmq.errors import EscrowError
from escrowmq.handlers import App, Running
from escrowmq.outbox.targets.escrow import EscrowTarget
from escrowmq.platform.signals import stop_signals

POLL_SECONDS = 0.2
"""Time between two checks whether to stop: signals are handled meanwhile."""


class Command(BaseCommand):
    """Run tasks and handlers until SIGTERM or Ctrl-C; those that run are finished first."""

    help = (
        "Run the tasks of a backend, and the handlers in the modules APP.handlers, until SIGTERM or Ctrl-C. "
        "Running tasks and handlers are finished first."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add backend, queues, threads and broker."""
        parser.add_argument("--backend", default="default", help="Alias of the backend in settings.TASKS.")
        chosen = parser.add_mutually_exclusive_group()
        chosen.add_argument("--queue", action="append", help="Only tasks, of this queue; repeatable.")
        chosen.add_argument("--handlers", action="store_true", help="Only handlers, no tasks.")
        parser.add_argument("--threads", type=int, default=1, help="Tasks of each queue that run at once.")
        parser.add_argument("--url", help="The broker; default: settings.ESCROWMQ['URL'].")
        parser.add_argument("--relay", action="store_true", help="Relay, too: one process for a small site.")

    def handle(
        self,
        *,
        backend: str,
        queue: list[str] | None,
        handlers: bool,
        threads: int,
        url: str | None,
        relay: bool,
        **_: Any,
    ) -> None:
        """Run a worker, handlers, and a relay if asked to."""
        if threads < 1:
            raise CommandError("--threads: at least 1")
        try:
            apps = [] if queue else find_apps()
            chosen = None if handlers else _choose(backend, is_needed=not apps)
            queues = [] if chosen is None else _choose_queues(backend, chosen, queue)
            if not queues and not apps:
                raise CommandError("no handlers: no installed app has a module handlers with an escrowmq App in it")
            with ExitStack() as stack:
                bus = stack.enter_context(connect(broker_url(url)))
                worker = None if chosen is None else Worker(bus, chosen, queues, threads=threads)
                if relay:
                    alias = DEFAULT_DB_ALIAS if chosen is None else chosen.given.database
                    stack.enter_context(stack.enter_context(open_relay(alias, EscrowTarget.over([bus]))))
                names = [*queues, *(handler.name for app in apps for handler in app.handlers)]
                self._run(bus, worker, apps, f"working on {', '.join(names)}; Ctrl-C stops it")
        except (EscrowError, DatabaseError) as problem:
            raise CommandError(str(problem)) from problem

    def _run(self, bus: Bus, worker: Worker | None, apps: Sequence[App], notice: str) -> None:
        """Run until a signal, or the end of a thread, whose error is raised."""
        stop, future = threading.Event(), None
        # on another thread, because a signal may interrupt the event's own lock
        later = lambda: threading.Thread(target=stop.set, daemon=True).start()  # noqa: E731
        with stop_signals(later), ExitStack() as stack:
            stack.callback(hooks.add(renew_connections))
            running = [stack.enter_context(app.running(bus)) for app in apps]
            if worker is not None:
                future = stack.enter_context(ThreadPoolExecutor(1)).submit(worker.run)
                stack.callback(worker.ask_to_stop)
            for each in running:
                stack.callback(each.stop)  # all at once, then each is waited for
            self.stderr.write(notice)
            while not (stop.wait(POLL_SECONDS) or _has_ended(running, future)):
                pass
        if future is not None:
            future.result()


def _has_ended(running: Sequence[Running], future: Future[None] | None) -> bool:
    """Return whether the tasks' worker has ended. Raises the error of a handler's thread."""
    for each in running:
        each.wait(0)
    return future is not None and future.done()


def _choose(backend: str, *, is_needed: bool) -> EscrowBackend | None:
    """Return the backend; None if it is another one and not needed."""
    chosen = task_backends[backend]
    if isinstance(chosen, EscrowBackend):
        return chosen
    if is_needed:
        raise CommandError(f"TASKS[{backend!r}] is not an EscrowBackend, and there are no handlers to run")
    return None


def _choose_queues(backend: str, chosen: EscrowBackend, queue: list[str] | None) -> list[str]:
    """Return the queues to work on."""
    queues = sorted(set(queue or chosen.queues))
    if unknown := set(queues) - set(chosen.queues):
        raise CommandError(f"TASKS[{backend!r}]['QUEUES'] has no {min(unknown)!r}")
    return queues
