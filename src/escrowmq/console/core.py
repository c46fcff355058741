"""State shared by all pages: the bus with a page's timeout, databases, plans, samples, the broker's time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from escrowmq.client.admin import Admin
from escrowmq.client.bus import Bus
from escrowmq.console import paging
from escrowmq.console.jobs import Jobs
from escrowmq.console.limits import ConsoleSettings
from escrowmq.console.sampling import Sampler
from escrowmq.errors import Code, error
from escrowmq.plans import Plan, Plans, is_of_database
from escrowmq.wire import Call, ReadRequest

THREADS = 12
"""Pages rendered concurrently: each waits for brokers most of its time."""


class Console:
    """Everything behind the pages. It owns the bus and the engines, and closes them."""

    def __init__(
        self,
        bus: Bus,
        url: str,
        settings: ConsoleSettings,
        engines: Mapping[str, Any] | None = None,
        plans: Path | None = None,
    ) -> None:
        self.bus = bus
        self.url = url
        self.settings = settings
        self.engines = dict(engines or {})
        """Databases by display name: the URL without its password."""
        self.sampler = Sampler(bus.router, settings.sample_seconds, settings.samples, settings.call_timeout)
        self.plans = Plans(plans)
        self.jobs = Jobs()
        self.threads = ThreadPoolExecutor(THREADS, "escrowmq-console")

    def start(self) -> None:
        """Start sampling."""
        self.sampler.start()

    def close(self) -> None:
        """Stop sampling, then close the connections: requests that wait for a broker fail at once."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.jobs.close()
        self.bus.close()
        self.sampler.close()
        self.threads.shutdown(wait=True)
        for engine in self.engines.values():
            engine.dispose()

    @property
    def timeout(self) -> float:
        """Timeout (s) of one request: short while no broker responds, so that the page with the error is fast."""
        last = self.sampler.last()
        away = last is not None and bool(last.problem)
        return self.settings.absent_timeout if away else self.settings.call_timeout

    @property
    def admin(self) -> Admin:
        """The admin interface with a page's timeout."""
        return Admin(self.bus.router, self.timeout)

    @property
    def addresses(self) -> list[str]:
        """The addresses of the brokers, by number."""
        return [link.address for link in self.bus.router.links]

    @property
    def source(self) -> str:
        """The brokers as named in plans."""
        return ", ".join(self.addresses)

    def where(self, act: str, database: str | None = None) -> Any:
        """Return the bus, or the engine of ``database`` (None: the only one). Raises Misuse(BAD_ARGUMENT)."""
        if not is_of_database(act):
            return self.bus
        if database is None and len(self.engines) == 1:
            return next(iter(self.engines.values()))
        if database not in self.engines:
            text = (
                "no database was named" if database is None else f"{database:.200} is none of this console's databases"
            )
            raise error(
                Code.BAD_ARGUMENT, text, f"one of {', '.join(self.engines) or 'none: start it with --database-url'}"
            )
        return self.engines[database]

    def place_of(self, plan: Plan) -> Any:
        """Return the source of a plan's rows, like :meth:`where`."""
        return self.where(plan.act, plan.source if is_of_database(plan.act) else None)

    def is_foreign(self, plan: Plan) -> bool:
        """Decide whether a plan belongs to brokers or a database that this console is not connected to."""
        return plan.source not in self.engines if is_of_database(plan.act) else plan.source != self.source

    def now_us(self) -> int:
        """Return the broker's time, by the last sample of its clock."""
        last = self.sampler.last()
        return time.time_ns() // 1000 + (0 if last is None else last.skew_us)

    def page(self, call: Call[Any], what: str, cursor: str | None) -> paging.Rows:
        """Return a page of a listing over all brokers."""
        return paging.page(self.bus.router, call, what, cursor, self.timeout)

    def ask(self, number: int, call: Call[Any]) -> Any:
        """Return one broker's response."""
        return self.bus.router.ask(number, call, time.monotonic() + self.timeout, longest=self.timeout)

    def number_of(self, address: str | None) -> int:
        """Return a broker's number by address; without one, of the only broker. Raises Misuse(BAD_ARGUMENT)."""
        if address is None and len(self.addresses) == 1:
            return 0
        if address not in self.addresses:
            raise error(Code.BAD_ARGUMENT, f"{address!r:.100} is none of {', '.join(self.addresses)}")
        return self.addresses.index(address)

    def rows(self, number: int, request: ReadRequest) -> list[dict[str, Any]]:
        """Read whole stored messages from one broker: request only a few."""
        found: list[dict[str, Any]] = self.bus.router.links[number].read(request).read_all().to_pylist()
        return found
