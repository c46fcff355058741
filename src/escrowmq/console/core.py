"""State shared by the pages of one caller: bus and timeout, rights, databases, plans, samples, the broker's time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
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
from escrowmq.rights import Access, Need, Principal, Rule, denied
from escrowmq.rights.matrix import ACTIONS, ALL, VIEW
from escrowmq.wire import Call, ReadRequest
from escrowmq.wire.actions.rights import WHOAMI

THREADS = 12
"""Pages rendered concurrently: each waits for brokers most of its time."""
CHECK_SECONDS = 2.0
"""Timeout (s) for the brokers to identify the caller."""
_LOOKUPS: Any = None
"""For the matrix: pages name groups and topics, not sessions and transactions."""


class Console:
    """Everything behind the pages of one caller. It owns the bus, and closes it.

    Brokers check the rights of the caller themselves. The console checks them for what no broker sees: databases
    need `view`, operations on their rows `act *`, and plans `view` and the right for their operation."""

    def __init__(
        self,
        bus: Bus,
        url: str,
        settings: ConsoleSettings,
        engines: Mapping[str, Any] | None = None,
        plans: Path | None = None,
        *,
        is_open: bool = True,
    ) -> None:
        self.bus = bus
        self.is_open = is_open
        """Whether it is for callers without a token."""
        self.url = url
        self.settings = settings
        self.principal: Principal | None = None
        """The caller; None: the brokers have no rights file, and everybody may do everything."""
        self._engines = dict(engines or {})
        self.databases = list(self._engines)
        """Their display names: the URLs without passwords."""
        self.sampler = Sampler(bus.router, settings.sample_seconds, settings.samples, settings.call_timeout)
        self._plans = Plans(plans)
        self.jobs = Jobs()
        self.threads = ThreadPoolExecutor(THREADS, "escrowmq-console")
        self.checks = ThreadPoolExecutor(1, "escrowmq-console-check")

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
        self.checks.shutdown(wait=True)

    # Rights

    def identify(self) -> None:
        """Learn from the brokers who the caller is and what it may do. With several brokers, the rules of all count. If
        the caller lost a right, its jobs are stopped.

        Raises Denied(UNAUTHENTICATED), Unknown(CLOSED) if the connection has ended with the token, and other errors if
        no broker responds.
        """
        timeout = min(self.timeout, CHECK_SECONDS)
        deadline = time.monotonic() + timeout
        found = self.bus.router.every(
            lambda number: self.bus.router.ask(number, WHOAMI({}), deadline, longest=timeout), timeout
        )
        known = [(one["principal"], one["rules"]) for one in found.values if one["principal"] is not None]
        if known:
            name, rules = known[0]
            common = [rule for rule in rules if all(rule in others for _, others in known)]
            before, self.principal = self.principal, Principal(name, tuple(_parse_rules(common)))
            if before is not None and not self.principal.includes(before):
                self.jobs.stop()
        elif not self.is_open:
            raise error(Code.UNAUTHENTICATED, "the brokers have no rights file any more")
        self.sampler.is_active = self.missing(VIEW) is None

    @property
    def user(self) -> str:
        """The name of the caller's principal; empty without one."""
        return "" if self.principal is None else self.principal.name

    def missing(self, *needs: Need) -> Need | None:
        """Return the first right that the caller lacks; None if it has all."""
        return None if self.principal is None else self.principal.missing(needs)

    def lacks(self, action: str, **request: Any) -> Need | None:
        """Return the right for an action of a broker that the caller lacks; None if it may do it."""
        return self.missing(*ACTIONS[action](request, _LOOKUPS))

    def lacks_plan(self, act: str, group: str | None) -> Need | None:
        """Return the right for a plan that the caller lacks. ``group`` is the one whose rows are meant; without it the
        broker checks each row."""
        return self.missing(Need(Access.ACT, ALL if is_of_database(act) else group))

    def require(self, lacking: Need | None) -> None:
        """Raise Denied(DENIED), which names the right, if there is one that the caller lacks."""
        if lacking is not None:
            raise denied(self.user, lacking)

    def require_view(self) -> None:
        """Raise Denied(DENIED) without `view`."""
        self.require(self.missing(VIEW))

    @property
    def engines(self) -> Mapping[str, Any]:
        """The databases by display name. Raises Denied without `view`."""
        if self._engines:
            self.require_view()
        return self._engines

    @property
    def plans(self) -> Plans:
        """The plans. Raises Denied without `view`."""
        self.require_view()
        return self._plans

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

    def where(self, act: str, database: str | None = None, group: str | None = None) -> Any:
        """Return the bus, or the engine of ``database`` (None: the only one), for an operation on rows of ``group``.
        Raises Denied, Misuse(BAD_ARGUMENT)."""
        self.require(self.lacks_plan(act, group))
        if not is_of_database(act):
            return self.bus
        if database is None and len(self.engines) == 1:
            return next(iter(self.engines.values()))
        if database is None or database not in self.engines:
            text = (
                "no database was named" if database is None else f"{database:.200} is none of this console's databases"
            )
            raise error(
                Code.BAD_ARGUMENT, text, f"one of {', '.join(self.engines) or 'none: start it with --database-url'}"
            )
        return self.engines[database]

    def place_of(self, plan: Plan) -> Any:
        """Return the source of a plan's rows, like :meth:`where`."""
        return self.where(plan.act, plan.source if is_of_database(plan.act) else None, group_of(plan))

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


def group_of(plan: Plan) -> str | None:
    """Return the group whose rows a plan changes; None if it names none."""
    return plan.settings.get("group") or plan.selection.get("group")


def _parse_rules(texts: Iterable[str]) -> Iterable[Rule]:
    """Parse rules; kinds of access that only a newer version has are left out."""
    for text in texts:
        try:
            yield Rule.parse(text)
        except ValueError:
            continue
