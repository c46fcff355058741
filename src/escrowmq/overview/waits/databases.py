"""What waits in the databases: rows of outboxes by their error, rows of producer-driven transactions, cases of compensations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from escrowmq.compensation.cases import WAITING, CaseState
from escrowmq.outbox.dialects import database_now_us
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.tables import (
    State,
    state_is,
    trans_compensation,
    trans_compensation_case,
    trans_driven,
    trans_message,
    trans_relay,
)
from escrowmq.overview.asking import Asking
from escrowmq.overview.stories.database_events import error_of
from escrowmq.overview.values import Cause, DatabaseStands
from escrowmq.overview.waits.grouping import OTHERS, Alike, Grouped, masked
from escrowmq.overview.words import many, quoted, since

LISTED = 2_000
"""Rows of one state that are looked at one by one."""
LATE_SECONDS = 60.0
"""A row that nobody has sent or ended for so long waits for somebody."""
_M = trans_message.c
_D = trans_driven.c
_C = trans_compensation_case.c


def in_databases(asking: Asking, stands: list[DatabaseStands] | None = None) -> Iterator[Cause]:
    """Every cause of every database; how each outbox stands is added to ``stands``."""
    for name, engine in asking.databases():
        with asking.reading(engine), asking.connect(engine) as connection:
            there = set(sa.inspect(connection).get_table_names())
            if not there & {trans_message.name, trans_driven.name, trans_compensation_case.name}:
                asking.note(name, "it has no tables of EscrowMQ (escrowmq outbox migrate)")
                continue
            now_us = database_now_us(connection)
            found = _Database(name, connection, now_us)
            if trans_message.name in there:
                yield from found.outbox()
                if stands is not None:
                    stands.append(found.stands(trans_relay.name in there))
            if trans_driven.name in there:
                yield from found.driven()
            if trans_compensation_case.name in there:
                yield from found.compensations(trans_compensation.name in there)


class _Database:
    """Looks at one database within one connection."""

    def __init__(self, name: str, connection: sa.Connection, now_us: int) -> None:
        self.name, self.connection, self.now_us = name, connection, now_us

    def outbox(self) -> Iterator[Cause]:
        """Rows that are not sent, or whose callback never came."""
        for state, person in ((State.WAITING, True), (State.RETRYING, False)):
            yield from self._refused(state, person)
        held = self._alike(State.HELD, sa.true())
        if held.count:
            text = f"{many(held.count, 'row')} of the outbox {'is' if held.count == 1 else 'are'} held behind an earlier one of the same key, which could not be sent."
            yield self._cause("held", "outbox", "behind an earlier row of the same key", held, False, text, "row")
        late = self._alike(State.PENDING, _M.created_us < self.now_us - round(LATE_SECONDS * 1e6))
        if late.count:
            alive = self._relays()
            why = "no relay is running" if not alive else f"{many(alive, 'relay')} run, and have not come to them"
            text = f"{many(late.count, 'row')} of the outbox wait to be sent, the oldest {since(late.oldest_us or self.now_us, self.now_us)}: {why}."
            yield self._cause("outbox", "outbox", why.partition(",")[0], late, not alive, text, "row")

    def _refused(self, state: State, person: bool) -> Iterator[Cause]:
        count = self._count(state_is(state))
        if not count:
            return
        columns = (_M.seq, _M.id, _M.topic, _M.key, _M.attempts, _M.created_us, _M.sent_us, _M.error)
        rows = self.connection.execute(
            sa.select(*columns).where(state_is(state)).order_by(_M.seq).limit(LISTED)
        ).mappings()
        alike: Grouped[str] = Grouped(lambda _: OTHERS)
        listed = 0
        for row in map(dict, rows):
            listed += 1
            sample = {
                "id": bytes(row["id"]).hex(),
                "topic": row["topic"],
                "key": row["key"],
                "attempts": row["attempts"],
                "error": error_of(row),
            }
            alike.of(masked(error_of(row))).add(row["created_us"], sample)
        if count > listed:
            alike.of("not looked at one by one").count += count - listed
        for cause, one in alike.items():
            rest = "a person decides" if person else "a relay tries them again"
            text = f"{many(one.count, 'row')} of the outbox could not be sent ({cause}); {rest}."
            yield self._cause(
                "outbox", "outbox", cause, one, person, text, "row", ("outbox.retry", "outbox.discard", "outbox.settle"),
                {"database": self.name, "state": state.name.lower(), "error": cause},
            )  # fmt: skip

    def driven(self) -> Iterator[Cause]:
        """Rows of transactions that their producer drives: stuck ones, and those that nobody has ended for long."""
        late = _D.created_us < self.now_us - round(LATE_SECONDS * 1e6)
        wanted = (
            (_D.state == Stage.STUCK.value, True, "stuck", "the broker holds another decision than the row"),
            (
                sa.and_(_D.state != Stage.STUCK.value, late),
                False,
                "unfinished",
                "no process of the group has ended them yet",
            ),
        )
        for condition, person, kind, why in wanted:
            counted = sa.select(_D.producer_group, sa.func.count(), sa.func.min(_D.created_us)).where(condition)
            for group, count, oldest_us in self.connection.execute(
                counted.group_by(_D.producer_group).limit(LISTED)
            ).all():
                query = sa.select(_D.id, _D.topic, _D.key, _D.state, _D.attempts).where(
                    condition, _D.producer_group == group
                )
                rows = self.connection.execute(query.limit(5)).mappings()
                samples = [
                    {**row, "id": bytes(row["id"]).hex(), "state": Stage(row["state"]).name.lower()} for row in rows
                ]
                alike = Alike(count, oldest_us, [*samples])
                text = f"{many(count, 'row')} of producer group {group}, which drives its transactions itself: {why}."
                acts = ("stuck.settle",) if person else ()
                selection = {"database": self.name, "group": group, "state": "stuck"} if person else {}
                yield self._cause(kind, group, why, alike, person, text, "row", acts, selection)

    def compensations(self, journals: bool) -> Iterator[Cause]:
        """Cases that wait for a person, and compensations that cannot rely on their sets."""
        columns = (_C.name, _C.message_id, _C.state, _C.attempts, _C.first_us, _C.reason)
        waiting = _C.state.in_([state.value for state in WAITING])
        total = int(
            self.connection.scalar(sa.select(sa.func.count()).select_from(trans_compensation_case).where(waiting)) or 0
        )
        alike: Grouped[tuple[str, str, str]] = Grouped(lambda key: (key[0], key[1], OTHERS))
        listed = 0
        rows = self.connection.execute(sa.select(*columns).where(waiting).limit(LISTED)).mappings()
        for row in rows:
            listed += 1
            state = CaseState(row["state"]).name.lower()
            sample = {
                "id": bytes(row["message_id"]).hex(),
                "state": state,
                "attempts": row["attempts"],
                "reason": row["reason"],
            }
            alike.of((row["name"], state, masked(row["reason"]))).add(row["first_us"], sample)
        for (name, state, reason), one in alike.items():
            text = f"{many(one.count, 'case')} of compensation {name} wait for a person ({state}): {reason}."
            selection = {"database": self.name, "compensation": name, "state": state, "reason": reason}
            acts = ("compensation.retry", "compensation.settle")
            yield self._cause("case", name, reason, one, True, text, "case", acts, selection, at_least=total > listed)
        if not journals:
            return
        j = trans_compensation.c
        suspended = sa.select(j.name, j.suspended_us, j.reason).where(j.suspended_us.is_not(None)).limit(LISTED)
        for name, since_us, reason in self.connection.execute(suspended):
            text = f"Compensation {name} has been suspended {since(since_us, self.now_us)}: it cannot rely on its sets ({quoted(reason)}); a scheduler ends that as soon as it can."
            yield self._cause("suspended", name, masked(reason), Alike(1, since_us), True, text, "compensation")

    def stands(self, relays: bool) -> DatabaseStands:
        """How the outbox stands."""
        counts = {
            state: self._count(state_is(state)) for state in (State.PENDING, State.RETRYING, State.HELD, State.WAITING)
        }
        oldest = [self._alike(state, sa.true()).oldest_us for state in (State.PENDING, State.RETRYING)]
        known = [one for one in oldest if one is not None]
        lag = max(self.now_us - min(known), 0) / 1e6 if known else 0.0
        alive = self._relays() if relays else 0
        return DatabaseStands(
            self.name,
            counts[State.PENDING],
            counts[State.RETRYING],
            counts[State.HELD],
            counts[State.WAITING],
            lag,
            alive,
        )

    def _relays(self) -> int:
        alive = trans_relay.c.alive_until_us > self.now_us
        return int(self.connection.scalar(sa.select(sa.func.count()).select_from(trans_relay).where(alive)) or 0)

    def _count(self, condition: sa.ColumnElement[bool]) -> int:
        return int(self.connection.scalar(sa.select(sa.func.count()).select_from(trans_message).where(condition)) or 0)

    def _alike(self, state: State, more: sa.ColumnElement[bool]) -> Alike:
        """All rows of one state: how many, since when, some of them."""
        condition = sa.and_(state_is(state), more)
        counted = sa.select(sa.func.count(), sa.func.min(_M.created_us)).where(condition)
        count, oldest_us = self.connection.execute(counted).one()
        rows = (
            self.connection.execute(sa.select(_M.id, _M.topic, _M.key).where(condition).limit(5)).mappings()
            if count
            else ()
        )
        return Alike(count, oldest_us, [{**row, "id": bytes(row["id"]).hex()} for row in rows])

    def _cause(
        self,
        kind: str,
        of: str,
        cause: str,
        alike: Alike,
        person: bool,
        text: str,
        unit: str,
        acts: tuple[str, ...] = (),
        selection: dict[str, Any] | None = None,
        *,
        at_least: bool = False,
    ) -> Cause:
        return Cause(
            kind, of, cause, alike.count, unit, alike.oldest_us, person, text, self.name, tuple(alike.samples), acts,
            selection or {}, at_least,
        )  # fmt: skip
