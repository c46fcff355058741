"""``manage.py escrowmq_relay``: send committed messages of the outbox."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS

from escrowmq.django.database import broker_url, open_relay
from escrowmq.errors import EscrowError
from escrowmq.outbox.targets.opening import open_target
from escrowmq.platform.listening import shown_address
from escrowmq.platform.signals import stop_signals


class Command(BaseCommand):
    """Relay until SIGTERM or Ctrl-C; the current batch is finished first."""

    help = "Send committed messages of the outbox to a broker, until SIGTERM or Ctrl-C."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the database and the broker."""
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="Alias of the database with the outbox.")
        parser.add_argument("--to", help="Target, such as escrow://HOST:PORT; default: settings.ESCROWMQ['URL'].")
        parser.add_argument("--once", action="store_true", help="End when nothing is left to send.")
        parser.add_argument("--patience", type=float, default=60.0, help="With --once: give up after these seconds.")

    def handle(self, *, database: str, to: str | None, once: bool, patience: float, **_: Any) -> None:
        """Run a relay. With ``once`` unsent messages are an error at the end."""
        url = broker_url(to)
        try:
            with (
                closing(open_target(url)) as target,
                open_relay(database, target) as relay,
                stop_signals(relay.ask_to_stop),
            ):
                if not once:
                    self.stderr.write(f"relaying to {shown_address(url)}; Ctrl-C stops it")
                    return relay.run()
                if not relay.drain(patience) or relay.backlog().unsent:
                    raise CommandError(f"not sent: {relay.backlog().unsent:,} messages", returncode=4)
        except EscrowError as problem:
            raise CommandError(str(problem)) from problem
