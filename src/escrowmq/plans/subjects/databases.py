"""Rows of a database that wait for an operator: of the outbox, of producer-driven transactions (STUCK), and cases of a
compensation.

Each act and its record are one database transaction, so after a kill the record shows exactly what was done. Rows are
guarded by their state: before an act the rows of the batch are read again, and a changed one is skipped. Between that
read and the act another process may still act on the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from escrowmq.client.links.presence import Missing
from escrowmq.errors import Code, Misuse
from escrowmq.overview.waits.grouping import mask
from escrowmq.plans.frozen import PLACE
from escrowmq.plans.outcomes import Outcome, Outcomes, all_of
from escrowmq.plans.subjects.brokers import recorded_outcomes
from escrowmq.plans.subjects.seam import check_ids, check_selection
from escrowmq.platform.listening import shown_address
from escrowmq.platform.times import to_us

ACTS = (
    "outbox.retry", "outbox.discard", "outbox.settle", "stuck.retry", "stuck.commit", "stuck.rollback", "stuck.resend",
    "stuck.settle", "compensation.retry", "compensation.settle",
)  # fmt: skip
SCHEMA = pa.schema(
    [
        (PLACE, pa.int64()), ("id", pa.string()), ("guard", pa.string()), ("seq", pa.int64()), ("group", pa.string()),
        ("topic", pa.string()), ("key", pa.string()), ("state", pa.string()), ("attempts", pa.int64()),
        ("born_us", pa.int64()), ("reason", pa.string()),
    ]
)  # fmt: skip
IDENTITY = (PLACE, "id", "guard")
MOST = 1000
"""Maximum rows of an act: those that fit into one transaction of the record."""
_TEXT = 2000
_SELECTION: dict[str, type | tuple[type, ...]] = {
    "database": str, "state": str, "group": str, "compensation": str, "topic": str, "key": str, "error": str,
    "reason": str, "containing": str, "older_than": (int, float), "ids": (list, tuple),
}  # fmt: skip
_OUTCOMES = {"OK": Outcome.DONE, "NOT_FOUND": Outcome.ALREADY, "CONFLICT": Outcome.CONFLICT}

Row = dict[str, Any]
Engine: TypeAlias = Any
"""A SQLAlchemy engine. SQLAlchemy is an extra: only code that imports the outbox uses its types."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One table. ``page(engine, state, group, after)`` returns rows in table order after row ``after``."""

    states: tuple[str, ...]
    """Selectable states; the first is the default."""
    waiting: frozenset[str]
    """States in which a row waits for an operator."""
    page: Callable[[Engine, str | None, str | None, Row | None], list[Row]]
    may: Callable[[str], frozenset[str]]
    """Returns the states in which an act is allowed."""
    functions: Callable[[str], Callable[..., Sequence[Any]]]
    """Returns the function of an act: of an engine, if rows are of one group the group, and ids."""
    order: str = "id"
    """The column that the table is ordered by."""


class DatabaseRows:
    """The rows of ``selection``: ``state``, ``topic``, ``key``, ``error`` or ``reason`` (grouped as in the overview:
    numbers and ids do not count), ``containing`` (part of that text), ``older_than`` (seconds), ``ids``; ``group`` (of
    producers) for stuck rows, ``compensation`` for its cases."""

    schema: pa.Schema = SCHEMA
    identity: Sequence[str] = IDENTITY
    counted: Sequence[str] = ("topic", "state", "reason")
    most: int = MOST

    def __init__(self, engine: Engine, act: str, selection: Mapping[str, Any], *, patient: bool = True) -> None:
        chosen = check_selection(selection, _SELECTION)
        self.act, self._engine = act, engine
        table, _, self._name = act.partition(".")
        self._kind = _kinds()[table]
        named = chosen.pop("database", self.source)
        if named != self.source:
            raise Misuse(Code.BAD_ARGUMENT, f"the selection is of {named}, but this is {self.source}")
        self._state = chosen.pop("state", self._kind.states[0]).lower()
        if self._state not in self._kind.states:
            names = ", ".join(self._kind.states)
            raise Misuse(Code.BAD_ARGUMENT, f"{self._state!r} is not a state for plans", f"one of {names}")
        is_case = table == "compensation"
        self._group: str | None = chosen.pop("compensation" if is_case else "group", None)
        if is_case and self._group is None:
            raise Misuse(Code.BAD_ARGUMENT, "the selection has no compensation")
        self.settings = {"compensation": self._group} if is_case else {}
        self._ids = check_ids(chosen.pop("ids", None))
        self._reason: str | None = chosen.pop("error", None) or chosen.pop("reason", None)
        self._containing: str | None = chosen.pop("containing", None)
        self._older_us = to_us(chosen.pop("older_than", 0))
        self._wanted = chosen
        self._unmatched_ids: set[str] = set()

    @property
    def source(self) -> str:
        """The database's URL without its password."""
        return shown_address(self._engine.url.render_as_string(hide_password=False))

    def missing(self) -> list[Missing]:
        return []  # an unavailable database is an error

    # Selection

    def pages(self) -> Iterator[pa.RecordBatch]:
        """Yield the matching rows, in the order of the table."""
        self._unmatched_ids = set(self._ids or ())
        now_us, after = self._now_us(), None
        while page := self._kind.page(self._engine, self._state, self._group, after):
            after = page[-1]
            if chosen := [row for row in page if self._is_chosen(row, now_us)]:
                yield pa.RecordBatch.from_pylist([{**row, PLACE: 0} for row in chosen], SCHEMA)

    def _is_chosen(self, row: Row, now_us: int) -> bool:
        reason = row["reason"] or ""
        if (
            (self._older_us and row["born_us"] > now_us - self._older_us)
            or any(row[name] != value for name, value in self._wanted.items())
            or (self._containing is not None and self._containing not in reason)
            or (self._reason is not None and mask(reason) != mask(self._reason))
        ):
            return False
        self._unmatched_ids.discard(row["id"])
        return self._ids is None or row["id"] in self._ids

    def not_found(self) -> list[str]:
        return sorted(self._unmatched_ids)

    def _now_us(self) -> int:
        from escrowmq.outbox.dialects import database_now_us

        with self._engine.connect() as connection:
            return database_now_us(connection)

    # Preview

    def preview(self, rows: pa.RecordBatch) -> Outcomes:
        """Predict the outcomes. ALREADY: no longer there. CHANGED: other state. CONFLICT: act not allowed."""
        now = self._read_current(rows)
        outcomes = all_of(Outcome.ALREADY, rows.num_rows)
        ids, guards = rows.column("id").to_pylist(), rows.column("guard").to_pylist()
        for at, (identity, guard) in enumerate(zip(ids, guards, strict=True)):
            if (row := now.get(identity)) is None:
                continue
            if row["guard"] != guard:
                outcomes[at] = Outcome.CHANGED
            else:
                outcomes[at] = Outcome.DONE if row["state"] in self._kind.may(self._name) else Outcome.CONFLICT
        return outcomes

    def _read_current(self, rows: pa.RecordBatch) -> dict[str, Row]:
        """Return the current rows of a batch by id."""
        order = self._kind.order
        ids, last = set(rows.column("id").to_pylist()), max(rows.column(order).to_pylist())
        found: dict[str, Row] = {}
        after = _before(order, min(rows.column(order).to_pylist()))
        while page := self._kind.page(self._engine, None, self._group, after):
            found |= {row["id"]: row for row in page if row["id"] in ids}
            after = page[-1]
            if after[order] >= last:
                break
        return found

    def count_failed_again(self, rows: pa.RecordBatch) -> int:
        """Count the retried rows that wait for an operator again."""
        if self._name != "retry":
            return 0
        return sum(row["state"] in self._kind.waiting for row in self._read_current(rows).values())

    # Acts

    def mark(self) -> dict[str, int]:
        from escrowmq.outbox.acts import list_acts

        newest = list_acts(self._engine, 1, newest=True)
        return {"0": newest[-1]["number"] if newest else 0}

    def do(self, rows: pa.RecordBatch, why: str) -> Outcomes:
        """Apply one act, which is one transaction."""
        outcomes = self.preview(rows)
        at = np.flatnonzero(outcomes == Outcome.DONE)
        ids = rows.column("id").take(pa.array(at)).to_pylist()
        if ids:
            of = self.settings.values()
            done = self._kind.functions(self._name)(self._engine, *of, ids, why=why)
            outcomes[at] = [_to_outcome(one.code.name) for one in done]
        return outcomes

    def find_outcomes(self, rows: pa.RecordBatch, token: str, marks: Mapping[str, int]) -> Outcomes:
        from escrowmq.outbox.acts import each_act

        acts = each_act(self._engine, after=marks.get("0", 0))
        found = (act for act in acts if (act["why"] or "").startswith(token))
        ids = rows.column("id").to_pylist()
        return recorded_outcomes(ids, found, lambda what: what["messages"], _to_outcome)


def _to_outcome(code: str) -> Outcome:
    return _OUTCOMES.get(code, Outcome.REFUSED)


def _before(order: str, value: Any) -> Row | None:
    """Return a place just before the row with this value of the ordering column; None: the beginning."""
    if order == "seq":
        return {"seq": value - 1}
    number = int(value, 16)
    return {"id": f"{number - 1:032x}"} if number else None


# Tables


def _make_row(one: Any, identity: bytes, guard: str, born_us: int, **more: Any) -> Row:
    shared = {name: getattr(one, name, None) for name in ("group", "topic", "key", "attempts", "reason")}
    named = {"id": identity.hex(), "guard": guard, "state": one.state.name.lower(), "born_us": born_us}
    return {**shared, **named, **more}


def _kinds() -> dict[str, _Kind]:
    """Create the kinds on use: SQLAlchemy is an extra."""
    return {"outbox": _outbox(), "stuck": _stuck(), "compensation": _compensation()}


def _outbox() -> _Kind:
    from escrowmq.outbox import attention
    from escrowmq.outbox.tables import State
    from escrowmq.overview.stories.database_events import error_of

    still = {State.WAITING, State.DISCARDED, State.SENT, State.DONE}  # the relay changes the others while it works

    def page(engine: Engine, state: str | None, _group: str | None, after: Row | None) -> list[Row]:
        wanted = None if state is None else State[state.upper()]
        rows = []
        for one in attention.list_messages(
            engine, state=wanted, limit=MOST, after=0 if after is None else after["seq"]
        ):
            guard = f"{one.state.name} {one.attempts} {one.due_us}" if one.state in still else ""
            reason = (error_of({"error": one.error}) or "")[:_TEXT] or None
            rows.append(_make_row(one, one.id, guard, one.created_us, seq=one.seq, reason=reason))
        return rows

    return _Kind(
        states=("waiting", "retrying", "held", "pending", "discarded", "sent"),
        waiting=frozenset({"waiting"}),
        page=page,
        may=lambda name: frozenset(state.name.lower() for state in attention.MAY[name]),
        functions=lambda name: getattr(attention, name),
        order="seq",
    )


def _stuck() -> _Kind:
    from escrowmq.outbox.modes import stuck
    from escrowmq.outbox.modes.journal import Stage

    def page(engine: Engine, state: str | None, group: str | None, after: Row | None) -> list[Row]:
        behind = None if after is None else after["id"]
        rows = []
        for wanted in (Stage.STUCK, Stage.TO_SEND) if state is None else (Stage[state.upper()],):
            for one in stuck.list_stuck(engine, group, state=wanted, limit=MOST, after=behind):
                guard = f"{one.state.name} {'-' if one.was is None else one.was.name} {one.reason or '-'}"
                rows.append(_make_row(one, one.id, guard, one.created_us))
        return sorted(rows, key=lambda row: str(row["id"]))[:MOST]

    return _Kind(
        states=("stuck", "to_send"),
        waiting=frozenset({"stuck"}),
        page=page,
        may=lambda name: frozenset({"stuck", "to_send"} if name == "settle" else {"stuck"}),
        functions=lambda name: getattr(stuck, f"{name}_stuck"),
    )


def _compensation() -> _Kind:
    from escrowmq.compensation import cases
    from escrowmq.compensation.cases import Case, CaseState

    def page(engine: Engine, state: str | None, group: str | None, after: Row | None) -> list[Row]:
        named = (
            None if state is None else frozenset({CaseState[state.upper()]}) if state != "waiting" else cases.WAITING
        )
        behind = None
        if after is not None:
            behind = Case(group or "", bytes.fromhex(after["id"]), CaseState.STUCK, 0, 0, 0, "", None)
        rows = []
        for one in cases.list_cases(engine, group, states=named, limit=MOST, after=behind):
            guard = f"{one.state.name} {one.attempts} {one.changed_us}"
            rows.append(_make_row(one, one.message_id, guard, one.first_us, group=one.name))
        return rows

    to = {"retry": CaseState.RETRY, "settle": CaseState.SETTLED}
    return _Kind(
        states=("waiting", "stuck", "conflict", "trying", "retry", "settled"),
        waiting=frozenset(state.name.lower() for state in cases.WAITING),
        page=page,
        may=lambda name: frozenset(state.name.lower() for state in cases.ALLOWED[to[name]]),
        functions=lambda name: getattr(cases, f"{name}_cases"),
    )
