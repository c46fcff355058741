"""Asking brokers and databases of which some may be away: missing answers are noted, and those of the others are
returned all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
"""Seconds that one question waits for a broker."""

PAGE = 1_000

Row = TypeVar("Row")


class Asking:
    """The brokers of a bus and some databases, and who of them did not answer."""

    def __init__(self, bus: Bus, engines: Sequence[sa.Engine] = ()) -> None:
        self.router = bus.router
        self.admin = Admin(bus.router, PATIENCE)
        self.addresses = [link.address for link in bus.router.links]
        self.engines = list(engines)
        self._missing: dict[str, str] = {}
        self._silent: set[str] = set()

    @property
    def missing(self) -> tuple[Missing, ...]:
        """Who did not answer, and why."""
        return tuple({"broker": where, "reason": reason} for where, reason in self._missing.items())

    def note(self, where: str, reason: str) -> None:
        """Note that a broker or database did not answer."""
        self._missing.setdefault(where, reason)

    def all(self, ask: Callable[[Admin], Listing[Row]], *, anew: bool = False) -> list[Row]:
        """Return the answers of all reachable brokers; nothing where all of them refuse, as a folder without a broker
        does. Those that did not
        answer before are asked once more only if ``anew``."""
        if not anew and self._silent.issuperset(self.addresses):
            return []
        try:
            listing = ask(self.admin)
        except (Rejected, Denied):
            return []
        except EscrowError as problem:
            for address in self.addresses:
                self._is_silent(address, str(problem), problem.code)
            return []
        for one in listing.missing:
            self._is_silent(one["broker"], one["reason"])
        return listing

    def one(self, address: str, call: Call[Answer]) -> Answer | None:
        """Return the answer of one broker; None if it does not answer, or refuses."""
        if address in self._silent:
            return None
        try:
            return self.ask(address, call)
        except (Rejected, Denied) as problem:
            if problem.code is Code.BAD_REQUEST:  # what it cannot tell must not look like nothing
                self.note(address, f"it may be of an older version: {problem}")
            return None
        except EscrowError as problem:
            self._is_silent(address, str(problem), problem.code)
            return None

    def _is_silent(self, broker: str, reason: str, code: Code = Code.BROKER_AWAY) -> None:
        """Note that a broker did not answer; if it is away, it is not waited for again."""
        if code in AWAY:
            self._silent.add(broker)
        self.note(broker, reason)

    def listed(self, address: str, call: Call[Any], what: str, most: int) -> list[Any]:
        """Return at most ``most`` entries of one broker's listing, page after page."""
        found: list[Any] = []
        after: dict[str, Any] = {}
        while len(found) < most:
            request = {**call.request, **after, "limit": min(PAGE, most - len(found))}
            answer = self.one(address, replace(call, request=request))
            if answer is None:
                break
            found += answer[what]
            if "next" not in answer:
                break
            after = {"after": answer["next"]}
        return found

    def ask(self, address: str, call: Call[Answer]) -> Answer:
        """Return the answer of one broker. Raises what it refuses with."""
        number = self.addresses.index(address)
        return self.router.ask(number, call, time.monotonic() + PATIENCE, longest=PATIENCE)

    def databases(self) -> Iterator[tuple[str, sa.Engine]]:
        """Each database with its name."""
        for engine in self.engines:
            yield name_of(engine), engine

    @contextmanager
    def reading(self, engine: sa.Engine) -> Iterator[None]:
        """Around reads of one database: what goes wrong there is noted."""
        from sqlalchemy.exc import SQLAlchemyError  # where there is a database, it is installed

        from escrowmq.outbox.dialects import in_a_line

        try:
            yield
        except EscrowError as problem:
            self.note(name_of(engine), str(problem))
        except SQLAlchemyError as problem:
            self.note(name_of(engine), in_a_line(problem))

    def connect(self, engine: sa.Engine) -> sa.Connection:
        """Return a connection that only reads: one made for work under locks takes none here."""
        return engine.execution_options(begin="BEGIN").connect()

    def now_us(self) -> int:
        """Return the brokers' time, the earliest of several; this machine's where none tells it."""
        hellos = self.all(lambda admin: admin.hello())
        return min((hello["time_us"] for hello in hellos if "time_us" in hello), default=time.time_ns() // 1000)


def name_of(engine: sa.Engine) -> str:
    """Return the name of a database: its URL without the password."""
    return shown_address(engine.url.render_as_string(hide_password=False))
