"""``manage.py escrowmq_work``: run tasks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError

from escrowmq.connecting import connect
from escrowmq.django.database import broker_url, open_relay
from escrowmq.django.task_api import task_backends
from escrowmq.django.tasks import EscrowBackend
from escrowmq.django.working import Worker
from escrowmq.errors import EscrowError
from escrowmq.outbox.targets.escrow import EscrowTarget
from escrowmq.platform.signals import stop_signals


class Command(BaseCommand):
    """Run tasks until SIGTERM or Ctrl-C; running tasks are finished first."""

    help = "Run the tasks of a backend, until SIGTERM or Ctrl-C. Running tasks are finished first."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add backend, queues, threads and broker."""
        parser.add_argument("--backend", default="default", help="Alias of the backend in settings.TASKS.")
        parser.add_argument("--queue", action="append", help="A queue, repeatable; default: all of the backend.")
        parser.add_argument("--threads", type=int, default=1, help="Tasks of each queue that run at once.")
        parser.add_argument("--url", help="The broker; default: settings.ESCROWMQ['URL'].")
        parser.add_argument("--relay", action="store_true", help="Relay, too: one process for a small site.")

    def handle(
        self, *, backend: str, queue: list[str] | None, threads: int, url: str | None, relay: bool, **_: Any
    ) -> None:
        """Run a worker, and a relay if asked to."""
        chosen = task_backends[backend]
        if not isinstance(chosen, EscrowBackend):
            raise CommandError(f"TASKS[{backend!r}] is not an EscrowBackend")
        queues = sorted(set(queue or chosen.queues))
        if unknown := set(queues) - set(chosen.queues):
            raise CommandError(f"TASKS[{backend!r}]['QUEUES'] has no {min(unknown)!r}")
        if threads < 1:
            raise CommandError("--threads: at least 1")
        try:
            with ExitStack() as stack:
                bus = stack.enter_context(connect(broker_url(url)))
                worker = Worker(bus, chosen, queues, threads=threads)
                stack.enter_context(stop_signals(worker.ask_to_stop))
                if relay:
                    relaying = stack.enter_context(open_relay(chosen.given.database, EscrowTarget.over([bus])))
                    stack.enter_context(relaying)
                self.stderr.write(f"working on {', '.join(queues)}; Ctrl-C stops it")
                worker.run()
        except (EscrowError, DatabaseError) as problem:
            raise CommandError(str(problem)) from problem
