"""The choice of one of several brokers for a producer's call, also while that one is away.

| the call | its broker is away, and nothing was sent | something may have been sent |
| --- | --- | --- |
| no key, no id of the caller's, no transaction | at once to another one, under the same id | waits for its broker; with ``failover="repeat"``, a plain message goes elsewhere after three more tries |
| a key, an id of the caller's, a transaction | fails with BROKER_AWAY; with ``absent="wait"`` it waits | waits for its broker |

A wait ends after the producer's ``timeout``.
"""  # noqa: E501  # rows of a table

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq import schemas
from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.waiting import Waiting
from escrowmq.client.links.router import Router, broker_of
from escrowmq.client.producing.ending import first_time
from escrowmq.client.producing.oneway import Confirm, is_oneway
from escrowmq.client.producing.outgoing import OutgoingCodec, as_batch, cut
from escrowmq.client.producing.results import Receipts, receipts
from escrowmq.client.producing.session import Session
from escrowmq.errors import Code, EscrowError, Misuse, Unknown
from escrowmq.message.ids import shards
from escrowmq.message.limits import byte_lengths
from escrowmq.wire import Exchange

T = TypeVar("T")
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
CodeColumn = npt.NDArray[np.uint8]
PAUSE_SECONDS = 0.1
"""Interval of checks whether a broker is reachable again."""

Absent = Literal["fail", "wait"]
Failover = Literal["unsent", "repeat"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A producer's choices: for calls whose broker is away, and whether ends wait for the answer."""

    absent: Absent = "fail"
    failover: Failover = "unsent"
    confirm: Confirm = "answered"

    def __post_init__(self) -> None:
        if self.absent not in ("fail", "wait"):
            raise Misuse(Code.BAD_ARGUMENT, f"absent = {self.absent!r}", '"fail" or "wait"')
        if self.failover not in ("unsent", "repeat"):
            raise Misuse(Code.BAD_ARGUMENT, f"failover = {self.failover!r}", '"unsent" or "repeat"')
        is_oneway(self.confirm)

    def lane(self, kind: Exchange) -> dict[str, Any]:
        """Return the rules for rows of a lane that may leave it for another broker, as functions of a row: ``moves``,
        unsent rows while the broker is away; ``repeats``, rows that may have been sent; ``wanders``, unsent rows while
        it is only quiet."""
        moves = _always if self.absent == "fail" else _never if kind is Exchange.END else _is_free
        repeats = _is_free if kind is Exchange.SEND and self.failover == "repeat" else _never
        return {"moves": moves, "repeats": repeats, "wanders": _never if kind is Exchange.END else _is_free}


class Producing(Protocol):
    """The methods of a :class:`~escrowmq.client.producing.production.Production` that placing needs."""

    router: Router
    waiting: Waiting
    choice: Choice
    timeout: float
    sessions: list[Session]

    def rotate(self, kind: Exchange) -> int: ...
    def is_there(self, shard: int) -> bool: ...
    def codec(self, kind: Exchange, number: int) -> OutgoingCodec: ...
    def lane(self, kind: Exchange, number: int) -> Lane: ...
    async def open(self, kind: Exchange, number: int, free: bool = False) -> Lane: ...
    async def broker(self, shard: int) -> int: ...


def _always(_: Any) -> bool:
    return True


def _never(_: Any) -> bool:
    return False


def _is_free(row: Any) -> bool:
    """Return whether any broker may take an outgoing row: it has no key, message id or transaction. None stands for a
    whole batch, which is free."""
    return row is None or (row[2] is None and row[5] is None and row[10] is None)  # key, message id, transaction


class Placement:
    """The broker of one call, for each try. ``fixed``: the number of the only possible broker; None: any."""

    def __init__(self, production: Producing, kind: Exchange, fixed: int | None) -> None:
        self._production, self._kind, self.fixed = production, kind, fixed
        self._deadline = time.monotonic() + production.timeout

    async def number(self) -> int:
        """Return the number of the broker to try next, waiting for one if the producer chose that. Raises
        Overloaded(BROKER_AWAY)."""
        production = self._production
        presence = production.router.presence
        while True:
            if self.fixed is not None:
                number, there = self.fixed, not presence.away(self.fixed)
            else:
                number = production.rotate(self._kind)
                there = presence.there(number)
            if there:
                return number
            await self._wait(presence.refusal(number))

    async def failed(self, problem: EscrowError) -> bytes | None:
        """Handle a failed try. Returns the message id for the next one, None if any id will do; raises ``problem`` if
        there must be no next try."""
        repeats = self._kind is Exchange.SEND and self._production.choice.failover == "repeat" and self.fixed is None
        if repeats and problem.code is Code.DISCONNECTED and isinstance(problem, Unknown) and problem.message_id:
            return problem.message_id
        if problem.code is not Code.BROKER_AWAY:
            raise problem
        if self.fixed is not None:
            await self._wait(problem)
        elif time.monotonic() >= self._deadline:
            raise problem
        return None

    async def _wait(self, problem: EscrowError) -> None:
        left = self._deadline - time.monotonic()
        if self._production.choice.absent == "fail" or left <= 0:
            raise problem
        await self._production.waiting.pause(min(PAUSE_SECONDS, left))


class _Part(NamedTuple):
    """Rows of a batch for one broker."""

    number: int
    rows: Ints
    piece: pa.RecordBatch


class BatchPlacement:
    """Sends or prepares a batch at several brokers, row by row where each belongs."""

    def __init__(self, production: Producing, kind: Exchange, only: int | None) -> None:
        self._production, self._kind, self._only = production, kind, only
        self._deadline = time.monotonic() + production.timeout

    async def receipts(self, messages: Any) -> Receipts:
        """Send the messages to their brokers, again for rows that another broker may take. Returns one typed result per
        row. If no broker answered any part, raises an error after which a part may have been applied, if there is one,
        else the first."""
        production = self._production
        data = messages
        if isinstance(data, Iterable) and not isinstance(data, pa.Table | pa.RecordBatch | str | bytes):
            data = list(data)
        first = await self._first()
        await production.open(self._kind, first, self._only is None)
        batch, where, free = await production.waiting.away(self._place, data, first)
        limits = production.sessions[first].checker.limits
        left = np.flatnonzero(byte_lengths(batch.column("body")) <= limits.max_body_bytes)
        rows: list[Ints] = []
        answers: list[pa.RecordBatch] = []
        problems: list[EscrowError] = []
        answered = False
        while len(left):
            parts = [
                _Part(number, some, piece)
                for number in np.unique(where[left]).tolist()
                for some, piece in cut(batch, left[where[left] == number], production.sessions[number].checker.limits)
            ]
            outcomes = await self._send_parts(parts)
            away: list[Ints] = []
            for part, outcome in zip(parts, outcomes, strict=True):
                if isinstance(outcome, EscrowError) and outcome.code is Code.BROKER_AWAY:
                    away.append(part.rows)
                    continue
                rows.append(part.rows)
                if isinstance(outcome, EscrowError):
                    problems.append(outcome)
                    answers.append(_all(outcome.code, len(part.rows)))
                else:
                    answered = True
                    answers.append(outcome[0])
            left = np.concatenate([np.empty(0, np.int64), *away])
            if len(left):
                refused = await self._again(left, where, free)
                if len(refused):
                    problems += [one for one in outcomes if isinstance(one, EscrowError)]
                rows.append(refused)
                answers.append(_all(Code.BROKER_AWAY, len(refused)))
                left = np.setdiff1d(left, refused)
        if problems and not answered:
            raise next((one for one in problems if isinstance(one, Unknown)), problems[0])
        return receipts(batch, rows, answers)

    async def _first(self) -> int:
        return self._only if self._only is not None else await Placement(self._production, self._kind, None).number()

    def _place(self, data: Any, first: int) -> tuple[pa.RecordBatch, Ints, Bools]:
        """Return the messages as an OUTGOING batch, the number of the broker of each row, and a mask of rows that any
        broker may take. Those go to broker ``first``."""
        production, count = self._production, len(self._production.sessions)
        given = _with_ids(data)
        batch = as_batch(data, production.sessions[first].checker, production.codec(self._kind, first))
        if self._only is not None:
            return batch, np.full(batch.num_rows, self._only, np.int64), np.zeros(batch.num_rows, np.bool_)
        where = production.router.spread(batch.column("key"), lambda: first)
        keyless = np.asarray(batch.column("key").is_null())
        joined = np.asarray(batch.column("transaction").is_valid())
        for row in np.flatnonzero(keyless & given & ~joined).tolist():
            where[row] = broker_of(batch.column("message_id")[row].as_py().hex(), count)
        return batch, where, keyless & ~given & ~joined

    async def _send_parts(self, parts: Sequence[_Part]) -> list[tuple[pa.RecordBatch, bool] | EscrowError]:
        """Send all parts, those of reachable brokers first, and wait. Returns for each its answer and whether it was
        sent again, or its error."""
        production = self._production
        presence = production.router.presence
        waits: list[Awaitable[tuple[pa.RecordBatch, bool]] | EscrowError] = [Unknown(Code.CLOSED) for _ in parts]
        for at in sorted(range(len(parts)), key=lambda at: presence.away(parts[at].number)):
            part = parts[at]
            try:
                if presence.away(part.number):
                    raise presence.refusal(part.number)
                await production.open(self._kind, part.number, True)
                waits[at] = production.lane(self._kind, part.number).call_batch(part.piece)
            except EscrowError as problem:
                waits[at] = problem
        return await production.waiting.gather([_result(wait) for wait in waits])

    async def _again(self, left: Ints, where: Ints, free: Bools) -> Ints:
        """Choose another broker (in ``where``) for those of the rows ``left`` that any may take, because theirs is
        away. Returns the rows that are refused."""
        production = self._production
        presence = production.router.presence
        over = time.monotonic() >= self._deadline
        fails = production.choice.absent == "fail"
        number = production.rotate(self._kind)
        movable = free[left] & (not over)
        if presence.there(number):
            where[left[movable]] = number
        elif fails:
            movable[:] = False
        refused = left[~movable] if fails or over else left[:0]
        if not over and len(refused) < len(left):
            await production.waiting.pause(0.0 if fails else PAUSE_SECONDS)
        return refused


async def end_parts(production: Producing, ids: pa.Array, outcomes: CodeColumn, codes: CodeColumn) -> None:
    """Decide transactions, each at its broker, and write the results into ``codes``, except for rows with a null id.

    Rows of a broker that is away, or does not answer, get the code of that error. It is raised only if it is that of
    every part: if one part was surely not applied and another may have been, no one error is true of both.
    """
    keep = np.flatnonzero(np.asarray(ids.is_valid())) if ids.null_count else np.arange(len(ids))
    valid = ids if len(keep) == len(ids) else ids.take(pa.array(keep))
    where = shards(valid)
    started: list[tuple[Ints, Awaitable[Any] | EscrowError]] = []
    alike = len(where) and np.count_nonzero(where == where[0]) == len(where)
    shards_there = where[:1].tolist() if alike else np.unique(where).tolist()
    chosen = [(shard, np.flatnonzero(where == shard)) for shard in shards_there]
    chosen.sort(key=lambda one: not production.is_there(one[0]))
    for shard, some in chosen:
        try:
            mine = valid if len(some) == len(valid) else valid.take(pa.array(some))
            started += await _start_parts(production, shard, mine, outcomes, keep[some])
        except EscrowError as problem:
            started.append((keep[some], problem))
    found = await production.waiting.gather([_result(wait) for _, wait in started])
    for (rows, _), outcome in zip(started, found, strict=True):
        if isinstance(outcome, EscrowError):
            codes[rows] = int(outcome.code)
        else:
            given = outcome[0].column(0).to_numpy()
            codes[rows] = first_time(given) if outcome[1] else given
    problems = [outcome for outcome in found if isinstance(outcome, EscrowError)]
    if len(problems) == len(found) and len({problem.code for problem in problems}) == 1:
        raise problems[0]


async def _start_parts(
    production: Producing, shard: int, ids: pa.Array, outcomes: CodeColumn, rows: Ints
) -> list[tuple[Ints, Awaitable[Any] | EscrowError]]:
    placement = Placement(production, Exchange.END, await production.broker(shard))
    number = await placement.number()
    while True:
        try:
            await production.open(Exchange.END, number, False)
            break
        except EscrowError as problem:
            await placement.failed(problem)
            number = await placement.number()
    step = production.sessions[number].checker.limits.max_batch_rows
    lane = production.lane(Exchange.END, number)
    started: list[tuple[Ints, Awaitable[Any] | EscrowError]] = []
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        arrays = [ids.slice(start, step), pa.array(outcomes[some])]
        started.append((some, lane.call_batch(pa.RecordBatch.from_arrays(arrays, schema=schemas.ENDING))))
    return started


async def _result(wait: Awaitable[T] | EscrowError) -> T | EscrowError:
    """Wait for a result. Returns it, or its EscrowError; an error in place of the awaitable is returned at once."""
    if isinstance(wait, EscrowError):
        return wait
    try:
        return await wait
    except EscrowError as problem:
        return problem


def _all(code: Code, count: int) -> pa.RecordBatch:
    """Return a PRODUCED answer that refuses ``count`` rows with the same code."""
    values = zip(schemas.PRODUCED, (int(code), -1, -1, -1, None), strict=True)
    arrays = [pa.repeat(pa.scalar(value, field.type), count) for field, value in values]
    return pa.RecordBatch.from_arrays(arrays, schema=schemas.PRODUCED)


def _with_ids(data: Any) -> Bools:
    """Return a mask of the messages that have an id of the caller's: their repeats must go to the same broker."""
    if isinstance(data, pa.Table | pa.RecordBatch):
        if "message_id" not in data.schema.names:
            return np.zeros(data.num_rows, np.bool_)
        column = data.column("message_id")
        chunks = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        return np.asarray(chunks.is_valid())
    if not isinstance(data, list):
        return np.zeros(0, np.bool_)
    return np.array([getattr(message, "message_id", None) is not None for message in data], np.bool_)
