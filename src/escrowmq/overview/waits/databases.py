"""Pending work in the databases: rows of outboxes by their error, rows of producer-driven transactions, cases of
compensations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from escrowmq.compensation.cases import WAITING, CaseState
from escrowmq.outbox.dialects import database_now_us
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.tables import (
    LANES,
    State,
    state_is,
    trans_compensation,
    trans_compensation_case,
    trans_driven,
    trans_message,
    trans_relay,
)
from escrowmq.overview.sources import Sources
from escrowmq.overview.stories.database_events import error_of
from escrowmq.overview.values import Cause, DatabaseStands
from escrowmq.overview.waits.grouping import OTHERS, Alike, Grouped, mask
from escrowmq.overview.words import many, quote, since
from escrowmq.platform.times import to_us

LISTED = 2_000
"""Maximum number of rows of one state that are read one by one."""
COUNTED = 100_000
"""Maximum number of rows of a cause that are counted; larger counts are given as "at least". The limit is high because
causes are sorted by their count."""
COUNTED_ONE_BY_ONE = 10_000
"""The same limit for conditions without an index, such as the age of a row."""
GROUPS = 200
"""Maximum number of producer groups of one database whose rows are counted."""
LATE_SECONDS = 60.0
"""A row that is unsent or unfinished for longer is reported as late, in seconds."""
_M = trans_message.c
_D = trans_driven.c
_C = trans_compensation_case.c


def find_database_causes(sources: Sources, stands: list[DatabaseStands] | None = None) -> list[Cause]:
    """Return the causes of every database. If ``stands`` is given, append the state of each outbox to it."""
    causes: list[Cause] = []

    def read(name: str, connection: sa.Connection, there: set[str]) -> None:
        found = _Database(name, connection, database_now_us(connection))
        if trans_message.name in there:
            causes.extend(found.find_unsent())
            if stands is not None:
                stands.append(found.measure_outbox(trans_relay.name in there))
        if trans_driven.name in there:
            causes.extend(found.find_driven())
        if trans_compensation_case.name in there:
            causes.extend(found.find_cases())
            if trans_compensation.name in there:
                causes.extend(found.find_suspended())

    sources.read_databases({trans_message.name, trans_driven.name, trans_compensation_case.name}, read)
    return causes


class _Database:
    """Reads of one database over one connection."""

    def __init__(self, name: str, connection: sa.Connection, now_us: int) -> None:
        self.name, self.connection, self.now_us = name, connection, now_us
        self._counts: dict[State, int] | None = None

    def find_unsent(self) -> Iterator[Cause]:
        """Yield causes of outbox rows that are unsent, or whose callback did not arrive."""
        for state in (State.WAITING, State.RETRYING):
            yield from self._find_refused(state)
        held, more = self._count_rows(state_is(State.HELD))
        if held:
            alike = Alike(held, self._find_oldest_us(State.HELD), self._read_samples(state_is(State.HELD)))
            text = (
                f"{_format_count(held, more)} of the outbox {'is' if held == 1 else 'are'} held behind an earlier one "
                "of the same key, which could not be sent."
            )
            yield self._make_cause(
                "held", "outbox", "behind an earlier row of the same key", alike, text, at_least=more
            )
        is_late = sa.and_(state_is(State.PENDING), _M.created_us < self.now_us - to_us(LATE_SECONDS))
        late, more = self._count_rows(is_late, COUNTED_ONE_BY_ONE)
        if late:
            oldest_us = self._find_oldest_us(State.PENDING) or self.now_us
            alive = self._count_relays()
            why = f"{many(alive, 'relay')} run, and have not sent them yet" if alive else "no relay is running"
            age = since(oldest_us, self.now_us)
            text = f"{_format_count(late, more)} of the outbox wait to be sent, the oldest {age}: {why}."
            alike, cause = Alike(late, oldest_us, self._read_samples(is_late)), why.partition(",")[0]
            yield self._make_cause("outbox", "outbox", cause, alike, text, needs_person=not alive, at_least=more)

    def _find_refused(self, state: State) -> Iterator[Cause]:
        count, more = self._count_rows(state_is(state))
        if not count:
            return
        columns = (_M.seq, _M.id, _M.topic, _M.key, _M.attempts, _M.created_us, _M.sent_us, _M.error)
        query = sa.select(*columns).where(state_is(state)).order_by(_M.seq).limit(LISTED)
        alike: Grouped[str] = Grouped(lambda _: OTHERS)
        listed = 0
        for row in map(dict, self.connection.execute(query).mappings()):
            listed += 1
            sample = {name: row[name] for name in ("topic", "key", "attempts")}
            sample |= {"id": bytes(row["id"]).hex(), "error": error_of(row)}
            alike.of(mask(error_of(row))).add(row["created_us"], sample)
        if count > listed:
            alike.of(_LEFT).count += count - listed
        person = state is State.WAITING
        for cause, one in alike.items():
            rest = "an operator must decide" if person else "a relay sends them again"
            left = more and cause == _LEFT
            yield self._make_cause(
                "outbox",
                "outbox",
                cause,
                one,
                f"{_format_count(one.count, left)} of the outbox could not be sent ({cause}); {rest}.",
                needs_person=person,
                acts=("outbox.retry", "outbox.discard", "outbox.settle"),
                selection={"database": self.name, "state": state.name.lower(), "error": cause},
                at_least=left,
            )

    def find_driven(self) -> Iterator[Cause]:
        """Yield causes of producer-driven transactions: stuck rows, and rows that are unfinished for too long."""
        is_stuck = _D.state == Stage.STUCK.value
        others = _D.state.in_([stage.value for stage in Stage if stage is not Stage.STUCK])
        is_late = sa.and_(others, _D.created_us < self.now_us - to_us(LATE_SECONDS))
        kinds = (
            (is_stuck, COUNTED, "stuck", "the broker holds another decision than the row"),
            (is_late, COUNTED_ONE_BY_ONE, "unfinished", "no process of the group has completed them yet"),
        )
        for number, group in enumerate(self._producer_groups()):
            if number == GROUPS:
                text = f"There are more than {GROUPS} producer-driven groups; the others were not examined."
                yield self._make_cause("unfinished", "others", _LEFT, Alike(1), text, unit="group", at_least=True)
                break
            for condition, most, kind, why in kinds:
                mine = sa.and_(_D.producer_group == group, condition)
                count, more = self._count_rows(mine, most, _D.id)
                if count:
                    times = sa.select(_D.created_us).where(mine).limit(COUNTED_ONE_BY_ONE).subquery()
                    whole = count <= COUNTED_ONE_BY_ONE and not more  # no index gives the oldest of more rows
                    oldest_us = self.connection.scalar(sa.select(sa.func.min(times.c.created_us))) if whole else None
                    alike = Alike(count, oldest_us, self._read_driven_samples(mine))
                    text = f"{_format_count(count, more)} of producer-driven group {group}: {why}."
                    offer: dict[str, Any] = {}
                    if kind == "stuck":
                        selection = {"database": self.name, "group": group, "state": "stuck"}
                        offer = {"needs_person": True, "acts": ("stuck.settle",), "selection": selection}
                    yield self._make_cause(kind, group, why, alike, text, at_least=more, **offer)

    def _producer_groups(self) -> Iterator[str]:
        """Yield the producer groups in order. Each costs one index look-up."""
        group: str | None = None
        while True:
            after = sa.true() if group is None else _D.producer_group > group
            group = self.connection.scalar(sa.select(sa.func.min(_D.producer_group)).where(after))
            if group is None:
                return
            yield group

    def _read_driven_samples(self, condition: sa.ColumnElement[bool]) -> list[Mapping[str, Any]]:
        columns = (_D.id, _D.topic, _D.key, _D.state, _D.attempts)
        rows = self.connection.execute(sa.select(*columns).where(condition).limit(5)).mappings()
        return [{**row, "id": bytes(row["id"]).hex(), "state": Stage(row["state"]).name.lower()} for row in rows]

    def find_cases(self) -> Iterator[Cause]:
        """Yield causes of compensation cases that need an operator."""
        columns = (_C.name, _C.message_id, _C.state, _C.attempts, _C.first_us, _C.reason)
        waiting = _C.state.in_([state.value for state in WAITING])
        alike: Grouped[tuple[str, str, str]] = Grouped(lambda key: (key[0], key[1], OTHERS))
        rows = self.connection.execute(sa.select(*columns).where(waiting).limit(LISTED + 1)).mappings().all()
        for row in rows[:LISTED]:
            state = CaseState(row["state"]).name.lower()
            sample = {"id": bytes(row["message_id"]).hex(), "state": state}
            sample |= {name: row[name] for name in ("attempts", "reason")}
            alike.of((row["name"], state, mask(row["reason"]))).add(row["first_us"], sample)
        for (name, state, reason), one in alike.items():
            yield self._make_cause(
                "case",
                name,
                reason,
                one,
                f"{many(one.count, 'case')} of compensation {name} ({state}) need an operator: {reason}.",
                unit="case",
                needs_person=True,
                acts=("compensation.retry", "compensation.settle"),
                selection={"database": self.name, "compensation": name, "state": state, "reason": reason},
                at_least=len(rows) > LISTED,
            )

    def find_suspended(self) -> Iterator[Cause]:
        """Yield compensations that are suspended."""
        j = trans_compensation.c
        suspended = sa.select(j.name, j.suspended_us, j.reason).where(j.suspended_us.is_not(None)).limit(LISTED)
        for name, since_us, reason in self.connection.execute(suspended):
            text = (
                f"Compensation {name} has been suspended {since(since_us, self.now_us)}: its sets are not reliable "
                f"({quote(reason)}); a scheduler resumes it as soon as it can."
            )
            facts = {"unit": "compensation", "needs_person": True}
            yield self._make_cause("suspended", name, mask(reason), Alike(1, since_us), text, **facts)

    def measure_outbox(self, relays: bool) -> DatabaseStands:
        """Return the state of the outbox. ``relays``: the table of relays exists."""
        states = (State.PENDING, State.RETRYING, State.HELD, State.WAITING)
        times = [self._find_oldest_us(state) for state in states[:2]]
        since_us = min((time_us for time_us in times if time_us is not None), default=self.now_us)
        lag = max(self.now_us - since_us, 0) / 1e6
        pending, retrying, held, waiting = map(self._count_state, states)
        return DatabaseStands(self.name, pending, retrying, held, waiting, lag, self._count_relays() if relays else 0)

    def _count_relays(self) -> int:
        """Return the number of running relays. A relay has a row for each worker: its name and a random part."""
        alive = sa.select(trans_relay.c.owner).where(trans_relay.c.alive_until_us > self.now_us)
        return len({owner.rpartition("-")[0] for owner in self.connection.scalars(alive)})

    def _count_state(self, state: State) -> int:
        """Return the number of rows in a state that is neither sent nor done. An index covers these states."""
        if self._counts is None:
            count = sa.func.count()
            aside = sa.select(_M.state, count).where(_M.state >= sa.literal_column(str(State.WAITING.value)))
            found = self.connection.execute(aside.group_by(_M.state)).all()
            self._counts = {State(state): number for state, number in found}
            pending = sa.select(count).select_from(trans_message).where(state_is(State.PENDING))
            self._counts[State.PENDING] = int(self.connection.scalar(pending) or 0)
        return self._counts.get(state, 0)

    def _count_rows(
        self, condition: sa.ColumnElement[bool], most: int | None = None, column: sa.Column[Any] = _M.seq
    ) -> tuple[int, bool]:
        """Return the number of rows, at most ``most``, and whether there are more."""
        most = COUNTED if most is None else most
        some = sa.select(column).where(condition).limit(most + 1).subquery()
        count = int(self.connection.scalar(sa.select(sa.func.count()).select_from(some)) or 0)
        return min(count, most), count > most

    def _find_oldest_us(self, state: State) -> int | None:
        """Return the creation time of the first row in a state, found by an index. PostgreSQL and SQLite index rows
        that are set aside in order; otherwise the first row of each lane is compared."""
        rows = sa.select(_M.created_us).where(state_is(state)).order_by(_M.seq).limit(1)
        if state >= State.WAITING and self.connection.dialect.name in ("postgresql", "sqlite"):
            return self.connection.scalar(rows)
        firsts = [rows.where(_M.lane == lane).subquery() for lane in range(LANES)]
        every = sa.union_all(*(sa.select(first.c.created_us) for first in firsts)).subquery()
        found: int | None = self.connection.scalar(sa.select(sa.func.min(every.c.created_us)))
        return found

    def _read_samples(self, condition: sa.ColumnElement[bool]) -> list[Mapping[str, Any]]:
        rows = self.connection.execute(sa.select(_M.id, _M.topic, _M.key).where(condition).limit(5)).mappings()
        return [{**row, "id": bytes(row["id"]).hex()} for row in rows]

    def _make_cause(self, kind: str, of: str, cause: str, alike: Alike, text: str, **more: Any) -> Cause:
        facts: dict[str, Any] = {"unit": "row", "needs_person": False} | more
        return Cause(
            kind, of, cause, alike.count, oldest_us=alike.oldest_us, sentence=text, where=self.name,
            samples=tuple(alike.samples), **facts,
        )  # fmt: skip


_LEFT = "not examined one by one"


def _format_count(count: int, more: bool) -> str:
    return ("At least " if more else "") + many(count, "row")
