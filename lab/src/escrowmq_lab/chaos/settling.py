"""Settling after the faults: each business row has its effect, and nothing is pending at brokers or relays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import sqlalchemy as sa

from escrowmq.connecting import connect
from escrowmq.errors import EscrowError
from escrowmq.outbox.dialects import Dialect
from escrowmq.outbox.relay.metrics import read_backlog
from escrowmq_lab.chaos.check import Waiting
from escrowmq_lab.chaos.modes import Mode
from escrowmq_lab.databases import snapshot


class Settling:
    """Polls the state. ``engines``: of producers and consumers. A context manager, because it connects to brokers."""

    def __init__(self, engines: Mapping[str, sa.Engine], url: str, modes: Sequence[type[Mode]]) -> None:
        self._producers = {name: engine for name, engine in engines.items() if name.startswith("producer")}
        consumers = {name: engine for name, engine in engines.items() if name.startswith("consumer")}
        self._waiting = Waiting(self._producers, consumers, modes)
        self._bus = connect(url)
        self._before: dict[tuple[str, str], int] | None = None
        self._state: dict[tuple[str, str], int] | None = None

    def __enter__(self) -> Settling:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bus.close()

    def moved(self) -> bool:
        """Poll. Returns whether anything has changed since the last poll."""
        try:
            self._state = dict(self._read_state())
        except (EscrowError, sa.exc.DBAPIError):
            self._state = None
        before, self._before = self._before, self._state
        return before != self._state

    @property
    def settled(self) -> bool:
        """Return whether nothing was pending at the last poll."""
        return self._state is not None and not any(self._state.values())

    def waiting(self) -> list[tuple[str, str, str]]:
        """Return mode (or nothing), place, and pending work, for the report."""
        if self._state is None:
            return [("", "brokers", "a broker, or a database, could not be asked")]
        found = []
        for (mode, what), count in self._state.items():
            some = f", such as {', '.join(self._waiting.named(mode, 3))}" if mode else ""
            if count:
                found.append((mode, what, f"{count}{some}"))
        return found

    def _read_state(self) -> Iterator[tuple[tuple[str, str], int]]:
        for mode, count in self._waiting.look().items():
            yield (mode, "business rows without an effect"), count
        for name, engine in self._producers.items():
            with snapshot(engine) as connection:
                backlog = read_backlog(Dialect(engine), connection)
            yield ("", f"outbox of {name}"), backlog.pending + backlog.retrying + backlog.held + backlog.waiting
        producers = self._bus.admin.producers()
        groups = self._bus.admin.groups()
        yield ("", "brokers that are away"), len(producers.missing) + len(groups.missing)
        for one in producers:
            yield ("", f"undecided transactions of {one['group']} at {one['broker']}"), one["open"] + one["parked"]
        for group in groups:
            where = f"{group['name']} at {group['broker']}"
            queues = group["queues"]
            yield (
                ("", f"messages of {where}"),
                sum(queue["waiting"] + queue["leased"] + queue["retrying"] for queue in queues),
            )
            yield ("", f"dead letters of {where}"), group["dead_letters"]
