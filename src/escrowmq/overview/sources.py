"""Requests to brokers and databases of which some may be unavailable. Missing answers are noted; the other answers are
returned."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from escrowmq.client.admin import Admin
from escrowmq.client.bus import Bus
from escrowmq.client.links.answers import Listing
from escrowmq.client.links.presence import Missing
from escrowmq.errors import AWAY, Code, Denied, EscrowError, Rejected
from escrowmq.platform.listening import shown_address
from escrowmq.wire import Call
from escrowmq.wire.actions.action import Answer

if TYPE_CHECKING:
    import sqlalchemy as sa

PATIENCE = 5.0
"""Timeout of one request to a broker, in seconds."""

PAGE = 1_000

Row = TypeVar("Row")


class Sources:
    """The brokers of a bus and some databases, with a note of those that did not answer."""

    def __init__(self, bus: Bus, engines: Sequence[sa.Engine] = ()) -> None:
        self.router = bus.router
        self.admin = Admin(bus.router, PATIENCE)
        self.addresses = [link.address for link in bus.router.links]
        self.engines = list(engines)
        self._missing: dict[str, str] = {}
        self._unreachable: set[str] = set()

    @property
    def missing(self) -> tuple[Missing, ...]:
        """The brokers and databases that did not answer, each with the reason."""
        return tuple({"broker": where, "reason": reason} for where, reason in self._missing.items())

    def note(self, where: str, reason: str) -> None:
        """Note that a broker or database did not answer."""
        self._missing.setdefault(where, reason)

    def request_all(self, request: Callable[[Admin], Listing[Row]], *, anew: bool = False) -> list[Row]:
        """Return the answers of all reachable brokers.

        Returns an empty list if all of them reject the request, as a folder without a broker does. If no broker was
        reachable before, the request is sent only if ``anew``.
        """
        if not anew and self._unreachable.issuperset(self.addresses):
            return []
        try:
            listing = request(self.admin)
        except (Rejected, Denied):
            return []
        except EscrowError as problem:
            for address in self.addresses:
                self._mark_silent(address, str(problem), problem.code)
            return []
        for one in listing.missing:
            self._mark_silent(one["broker"], one["reason"])
        return listing

    def request_one(self, address: str, call: Call[Answer]) -> Answer | None:
        """Return the answer of one broker; None if it does not answer or rejects the request."""
        if address in self._unreachable:
            return None
        try:
            return self.request(address, call)
        except (Rejected, Denied) as problem:
            if problem.code is Code.BAD_REQUEST:  # an unsupported request must not look like an empty answer
                self.note(address, f"it may be of an older version: {problem}")
            return None
        except EscrowError as problem:
            self._mark_silent(address, str(problem), problem.code)
            return None

    def _mark_silent(self, broker: str, reason: str, code: Code = Code.BROKER_AWAY) -> None:
        """Note that a broker did not answer. If it is unavailable, later requests skip it."""
        if code in AWAY:
            self._unreachable.add(broker)
        self.note(broker, reason)

    def list_entries(self, address: str, call: Call[Any], what: str, most: int) -> list[Any]:
        """Return at most ``most`` entries of one broker's listing, page after page."""
        found: list[Any] = []
        after: dict[str, Any] = {}
        while len(found) < most:
            request = {**call.request, **after, "limit": min(PAGE, most - len(found))}
            answer = self.request_one(address, replace(call, request=request))
            if answer is None:
                break
            found += answer[what]
            if "next" not in answer:
                break
            after = {"after": answer["next"]}
        return found

    def request(self, address: str, call: Call[Answer]) -> Answer:
        """Return the answer of one broker. Raises the error of a rejected request."""
        number = self.addresses.index(address)
        return self.router.ask(number, call, time.monotonic() + PATIENCE, longest=PATIENCE)

    def read_engines(self, read: Callable[[str, sa.Engine], None]) -> None:
        """Call ``read`` for each database with its name (its URL without the password). Errors are noted instead of
        raised."""
        from sqlalchemy.exc import SQLAlchemyError  # installed wherever a database is used

        from escrowmq.outbox.dialects import in_a_line

        for engine in self.engines:
            name = shown_address(engine.url.render_as_string(hide_password=False))
            try:
                read(name, engine)
            except EscrowError as problem:
                self.note(name, str(problem))
            except SQLAlchemyError as problem:
                self.note(name, in_a_line(problem))

    def read_databases(self, tables: set[str], read: Callable[[str, sa.Connection, set[str]], None]) -> None:
        """Call ``read`` for each database that has any of ``tables``: its name, a connection, and its tables.

        Transactions begin without the locks of engines that are made for writes. Errors are noted instead of raised.
        """
        import sqlalchemy as sa

        def connect(name: str, engine: sa.Engine) -> None:
            with engine.execution_options(begin="BEGIN").connect() as connection:
                there = set(sa.inspect(connection).get_table_names())
                if there & tables:
                    read(name, connection, there)
                else:
                    self.note(name, "it has no tables of EscrowMQ (escrowmq outbox migrate)")

        self.read_engines(connect)

    def now_us(self) -> int:
        """Return the earliest of the brokers' times in µs; this machine's time if no broker answers."""
        hellos = self.request_all(lambda admin: admin.hello())
        return min((hello["time_us"] for hello in hellos if "time_us" in hello), default=time.time_ns() // 1000)
