"""Operator actions on rows of a database: each action and its record are one transaction of that database.

The records are lines of ``trans_act``, in the format and the chain of hashes of :mod:`escrowmq.acts.chain`. The row of
``trans_act_head`` has the number and the hash of the last record. An action locks that row first, so simultaneous
actions run one after the other. An action is recorded and done, or neither: its record has its result, and nothing
needs to be resolved after a crash. Nothing here removes records.

An action on many rows runs in parts of :data:`PART` rows, each a transaction and a record of its own: locks are short,
and the size of a record is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypedDict, Unpack

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from escrowmq import model
from escrowmq.acts.chain import Break, Record, cut, origin, parse, successor, verify
from escrowmq.acts.journal import PAGE_BYTES, Listed
from escrowmq.acts.telling import acting_user, results, to_act, to_broken
from escrowmq.errors import Code, Denied, EscrowError, Misuse, Overloaded, Unknown
from escrowmq.outbox import dialects
from escrowmq.outbox.dialects import Dialect, database_now_us, in_a_line, insert_if_absent, may_repeat
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import PLACE, trans_act, trans_act_head
from escrowmq.platform.failpoints import reach
from escrowmq.platform.listening import shown_address
from escrowmq.wire.actions.acts import Act, Broken

logger = logging.getLogger(__name__)

PART = 1_000
"""Rows of one transaction and one record."""
PATIENCE = 30
"""Lock timeout (s) on PostgreSQL, which has none by default, unlike MariaDB and SQLite."""
_TRIES = 3
"""Attempts of a transaction that conflicts with others."""
_CHUNK = 100
"""Records read in one statement."""

_ACT = trans_act.c
_HEAD = trans_act_head.c


@dataclass(frozen=True, slots=True)
class Done:
    """The result of an operation on one row: OK, NOT_FOUND, or CONFLICT: its current ``state`` does not allow it."""

    id: bytes
    code: Code
    state: IntEnum | None
    note: str | None = None
    """For the record, beside the code: such as the content of a row that is deleted."""


class Verified(TypedDict):
    """The verification of one database's record."""

    database: str
    """Its URL, without the password."""
    records: int
    last: str
    """The hash of the last record: store it elsewhere, and compare."""
    broken: list[Broken]


class Operator(TypedDict, total=False):
    """The person of an action, for the record."""

    by: str | None
    """None: the system's user and host."""
    why: str | None
    """The reason."""


Facts = Mapping[str, Any]
Ids = Iterable[str | bytes]
Change = Callable[[sa.Connection, list[bytes]], Mapping[bytes, Done]]
"""Changes rows in the caller's transaction; returns the result of each. An id without a result was not found."""


# Acting


def act_on_rows(
    engine: sa.Engine, act: str, ids: Ids, change: Change, about: Facts | None = None, **operator: Unpack[Operator]
) -> list[Done]:
    """Call ``change`` with the ids, in recorded transactions of at most :data:`PART` ids; return one result per id, in
    order.

    ``act``: the action's name for the record, ``about``: details. A conflict with other transactions is retried. Raises
    as :func:`record`. Parts before the one that failed are done and recorded, the others are not.
    """
    wanted = ids_of(ids)
    all_done: list[Done] = []
    for at in range(0, len(wanted), PART):
        part = wanted[at : at + PART]
        what = {**(about or {}), "messages": [identity.hex() for identity in part]}
        for left in reversed(range(_TRIES)):
            try:
                with record(engine, act, what, **operator) as (connection, ended):
                    found = change(connection, list(dict.fromkeys(part)))
                    done = [found.get(identity, Done(identity, Code.NOT_FOUND, None)) for identity in part]
                    ended.update(results([one.code.name for one in done]))
                    if notes := {one.id.hex(): one.note for one in done if one.note}:
                        ended["notes"] = notes
                break
            except EscrowError as problem:
                cause = problem.__cause__
                if not left or not isinstance(cause, DBAPIError) or not may_repeat(cause):
                    raise
                if dialects.has_mark(cause, {1205}):  # MariaDB or MySQL timed out on a lock, whose owner may keep it
                    raise
        all_done += done
    return all_done


@contextmanager
def record(
    engine: sa.Engine, act: str, what: Facts, **operator: Unpack[Operator]
) -> Iterator[tuple[sa.Connection, dict[str, Any]]]:
    """Context manager: a transaction of operator action ``act`` (its name) and its record, with the details ``what``.
    The block changes rows by the connection, and puts the result into the dict.

    Raises Overloaded(DISK_FULL | QUEUE_FULL) or Denied if the database rejects it: it was not done. Unknown
    (DISCONNECTED): the message says whether it may have been. Misuse(NO_TABLES | SCHEMA_VERSION).
    """
    ending = False
    try:
        with Dialect(engine).transaction() as connection, transaction_of(connection, trans_act):
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{PATIENCE}s'")
            number, previous = _lock_head(connection)
            reach("outbox.act-locked")
            ended: dict[str, Any] = {}
            yield connection, ended
            reach("outbox.act-done")
            by, why = cut(operator.get("by") or acting_user()), cut(operator.get("why"))
            made = Record(number + 1, database_now_us(connection), act, by, why, dict(what), ended=ended)
            _append(connection, made, previous)
            reach("outbox.act-recorded")
            ending = True
        reach("outbox.act-committed")
    except DBAPIError as problem:
        raise _failure(problem, ending) from problem
    counts = ", ".join(f"{count} {code}" for code, count in ended.get("results", ended).items())
    logger.info("act %d, %s by %s: %s", made.number, act, made.by, counts or "nothing")


def ids_of(ids: Ids) -> list[bytes]:
    """Convert message ids to 16 bytes each, as :func:`escrowmq.model.message_id`. Raises Misuse(BAD_ARGUMENT) for one
    id in place of several, and for what cannot be an id."""
    if isinstance(ids, str | bytes):
        raise Misuse(Code.BAD_ARGUMENT, "one id where many were expected", f"[{ids!r}]")
    return [model.message_id(identity) for identity in ids]


def _lock_head(connection: sa.Connection) -> tuple[int, str]:
    """Lock the row of ``trans_act_head`` until the transaction ends. Returns number and hash of the last record;
    derives them from the records if that row is missing or was edited."""
    head = sa.select(_HEAD.number, _HEAD.hash).where(_HEAD.one == 1).with_for_update()
    found = connection.execute(head).one_or_none()
    if found is None:  # it was removed
        first = {"one": 1, "number": 0, "hash": origin(PLACE)}
        connection.execute(insert_if_absent(connection.dialect.name, trans_act_head), [first])
        found = connection.execute(head).one()
    last = connection.scalar(sa.select(sa.func.max(_ACT.number))) or 0
    if last <= found.number and len(found.hash) == len(origin(PLACE)):
        return found.number, found.hash
    logger.error("the row of trans_act_head was edited: it names record %d, and the last one is %d", found.number, last)
    line = connection.scalar(sa.select(_ACT.record).where(_ACT.number == last))
    return max(last, found.number), origin(PLACE) if line is None else successor(line.encode())


def _append(connection: sa.Connection, made: Record, previous: str) -> None:
    line, digest = made.sealed(previous)
    connection.execute(sa.insert(trans_act), [{"number": made.number, "record": line[:-1].decode()}])
    change = sa.update(trans_act_head).where(_HEAD.one == 1)
    connection.execute(change.values(number=made.number, hash=digest))


def _failure(problem: DBAPIError, ending: bool) -> EscrowError:
    """Return the error to raise for a database's error. ``ending``: it failed while committing, so the action may be
    done."""
    text = in_a_line(problem)
    if dialects.is_full(problem):
        return Overloaded(Code.DISK_FULL, f"the database is full: {text}", "free space there; the act was not done")
    if may_repeat(problem) or dialects.is_busy(problem):
        hint = "repeat it; the act was not done"
        return Overloaded(Code.QUEUE_FULL, f"the database does not take this now: {text}", hint)
    if dialects.is_denied(problem):
        hint = "may this user insert into trans_act, and change trans_act_head and the rows? The act was not done"
        return Denied(Code.DENIED, text, hint)
    hint = "`escrowmq acts list` shows whether the act was done" if ending else "the act was not done"
    return Unknown(Code.DISCONNECTED, f"the database: {text}", hint)


# Reading the record


def list_acts(engine: sa.Engine, limit: int = 1000, *, after: int = 0, newest: bool = False) -> list[Act]:
    """Return the first recorded acts with numbers above ``after`` (``newest``: the last ones), in their order: at most
    ``limit``, and a few megabytes unless the first one is larger. The same shape as
    :meth:`escrowmq.client.admin.Admin.acts`. Unreadable records are left out: see :func:`verify_acts`."""
    found: list[Act] = []
    size = 0
    for act, length in _read_acts(engine, after, newest=newest):
        size += length
        if len(found) == limit or (found and size > PAGE_BYTES):
            break
        found.append(act)
    return found[::-1] if newest else found


def each_act(engine: sa.Engine, *, after: int = 0) -> Iterator[Act]:
    """Iterate over all acts with numbers above ``after``, in their order, read a few at a time. Skips unreadable
    records."""
    return (act for act, _ in _read_acts(engine, after))


def _read_acts(engine: sa.Engine, after: int, *, newest: bool = False) -> Iterator[tuple[Act, int]]:
    """Yield the acts with numbers above ``after`` (``newest``: from the last one backwards), each with the length of
    its record in bytes. Skips unreadable records."""
    for number, line in _rows(engine, after, None, newest=newest):
        try:
            made, _, digest = parse(line)
        except ValueError:
            logger.warning("row %d of trans_act is no record of an act", number)
            continue
        yield to_act(Listed(made, made, digest)), len(line)


def verify_acts(engine: sa.Engine) -> Verified:
    """Return the number of records, the hash of the last one, and every break of the chain: a record that was changed,
    removed, inserted, moved, or cut off at the end. Acts may continue meanwhile."""
    head = _head(engine)
    last = None if head is None else head[0]
    count, breaks = verify((line for _, line in _rows(engine, 0, last)), PLACE, head)
    if head is None:
        breaks.append(Break(count + 1, None, "the row of trans_act_head, which names the last record, is missing"))
    else:
        with engine.connect() as connection, transaction_of(connection, trans_act):
            highest = connection.scalar(sa.select(sa.func.max(_ACT.number))) or 0
        now = _head(engine)  # read afterwards: an act of this moment is in it
        if now is not None and highest > now[0]:
            breaks.append(Break(count + 1, highest, "somebody put this behind the last record"))
    database = shown_address(engine.url.render_as_string(hide_password=False))
    return Verified(database=database, records=count, last=(head or (0, origin(PLACE)))[1], broken=to_broken(breaks))


def _head(engine: sa.Engine) -> tuple[int, str] | None:
    with engine.connect() as connection, transaction_of(connection, trans_act_head):
        row = connection.execute(sa.select(_HEAD.number, _HEAD.hash).where(_HEAD.one == 1)).one_or_none()
    return None if row is None else (row.number, row.hash)


def _rows(engine: sa.Engine, after: int, last: int | None, *, newest: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield number and line of the rows of ``trans_act`` with numbers above ``after``, up to ``last`` (None: all).
    ``newest``: in descending order.

    Reads a few per transaction, so that none stays open for long.
    """
    low, high = after, last
    while True:
        wanted = sa.select(_ACT.number, _ACT.record).where(_ACT.number > low)
        if high is not None:
            wanted = wanted.where(_ACT.number <= high)
        wanted = wanted.order_by(_ACT.number.desc() if newest else _ACT.number).limit(_CHUNK)
        with engine.connect() as connection, transaction_of(connection, trans_act):
            rows = connection.execute(wanted).all()
        yield from ((row.number, row.record.encode()) for row in rows)
        if len(rows) < _CHUNK:
            return
        if newest:
            high = rows[-1].number - 1
        else:
            low = rows[-1].number
