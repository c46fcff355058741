"""Consumer groups as Arrow tables and back. States are runs: a steadily consumed queue is one row or two."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.ledger.columns.arrays import empty_table, int64s, table_of
from escrowmq.ledger.groups import subscriptions
from escrowmq.ledger.groups.cursors import Again, Cursor, Lease
from escrowmq.ledger.groups.dead.edited import Edit
from escrowmq.ledger.groups.dead.letters import Block
from escrowmq.ledger.groups.group import Group, Leases, Member
from escrowmq.ledger.groups.order import UNKNOWN

_LIST = pa.schema(
    [
        ("name", pa.utf8()),
        ("subscription", pa.utf8()),
        ("turn", pa.int64()),
        ("group", pa.int32()),  # its number; absent, as is paused, in older snapshots, where groups were counted
        ("paused", pa.utf8()),  # JSON
    ]
)
_TOTALS = pa.schema(int64s("next_group", "delivered", "acked"))  # older ones: in each row of the list
_DELETED = pa.schema([("group", pa.int32()), ("name", pa.utf8()), ("position", pa.int64())])
_PLACE = [("group", pa.int32()), ("queue_id", pa.int32())]
_CURSORS = pa.schema([*_PLACE, *int64s("base", "next"), ("counts", pa.list_(pa.int64()))])
_RUNS = pa.schema([*_PLACE, ("start", pa.int64()), ("state", pa.uint8())])
_AGAIN = pa.schema([*_PLACE, *int64s("start", "end")])
_RETRIES = pa.schema(
    [
        *_PLACE,
        ("offset", pa.int64()),
        ("attempt", pa.int32()),
        ("due_us", pa.int64()),
        ("key", pa.int64()),  # -1: not known; absent in older snapshots
    ]
)
_DEAD = pa.schema(
    [
        *_PLACE,
        ("offset", pa.int64()),
        ("attempts", pa.int32()),
        ("dead_us", pa.int64()),
        ("cause", pa.dictionary(pa.int32(), pa.utf8())),  # texts alone in older snapshots
    ]
)
_EDITED = pa.schema(
    [*_PLACE, *int64s("offset", "position"), ("message_id", pa.binary(16))]
)  # absent in older snapshots
_LEASES = pa.schema(
    [
        *_PLACE,
        *int64s("lease", "start", "end"),
        ("attempt", pa.int32()),
        *int64s("member", "deadline_us"),
        ("live", pa.bool_()),  # the ended ones follow, in the order in which they ended
        ("mask", pa.binary()),  # null: all pending, or (ended) all acked
        ("doubt", pa.int64()),  # the first offset in doubt; absent in older snapshots
    ]
)
_NAMED = [("group", pa.int32()), ("member", pa.int64()), ("instance", pa.utf8())]
_MEMBERS = pa.schema([*_NAMED, *int64s("epoch", "process", "joined_us"), ("fenced", pa.bool_())])


class State(Protocol):
    """The state of all groups, as :class:`escrowmq.ledger.groups.groups.Groups` has it."""

    groups: dict[int, Group]
    leases: Leases
    next_ordinal: int
    deleted: dict[int, tuple[str, int]]
    delivered: int
    acked: int


def freeze(state: State) -> Callable[[], dict[str, pa.Table]]:
    """Return the tables of a snapshot; they share no memory with the state. Of the dead letters only the blocks are
    taken now, which never change: to turn the
    causes of a million into a column takes long."""
    groups, leases = list(state.groups.values()), state.leases
    listed = [
        (g.name, subscriptions.dump(g.subscription), g.served, g.ordinal, json.dumps(g.paused, sort_keys=True))
        for g in groups
    ]
    cursors = [(g, c) for g in groups for _, c in sorted(g.cursors.items())]
    members = [
        (g.ordinal, m.id, m.name, m.epoch, m.process, m.joined_us, m.fenced) for g in groups for m in g.members.values()
    ]
    dead = [(g, c, list(c.dead.blocks)) for g, c in cursors if len(c.dead)]
    tables = {
        "groups_list": table_of(_LIST, listed),
        "groups_totals": table_of(_TOTALS, [(state.next_ordinal, state.delivered, state.acked)]),
        "groups_deleted": table_of(_DELETED, [(number, *known) for number, known in state.deleted.items()]),
        "groups_cursors": table_of(_CURSORS, [(g.ordinal, c.queue_id, c.base, c.next, c.counts) for g, c in cursors]),
        "groups_runs": _stack(_RUNS, [(g, c, list(c.runs())) for g, c in cursors]),
        "groups_again": _stack(_AGAIN, [(g, c, [c.again.starts, c.again.ends]) for g, c in cursors]),
        "groups_retries": _stack(_RETRIES, [(g, c, c.retries.arrays()) for g, c in cursors]),
        "groups_edited": table_of(
            _EDITED, [(g.ordinal, c.queue_id, *row) for g, c in cursors if len(c.edited) for row in c.edited.rows()]
        ),
        "groups_leases": table_of(_LEASES, [_lease_row(x) for x in (*leases.live.values(), *leases.ended.values())]),
        "groups_members": table_of(_MEMBERS, members),
    }
    return lambda: tables | {"groups_dead": _dead(dead)}


def _dead(parts: list[tuple[Group, Cursor, list[Block]]]) -> pa.Table:
    blocks = [block for _, _, some in parts for block in some]
    if not blocks:
        return empty_table(_DEAD)
    sizes = [sum(map(len, some)) for _, _, some in parts]
    columns: list[Any] = [np.repeat(np.array(numbers, np.int32), sizes) for numbers in (
        [g.ordinal for g, _, _ in parts], [c.queue_id for _, c, _ in parts])]  # fmt: skip
    for name in ("offsets", "attempts", "dead_us"):
        columns.append(np.concatenate([getattr(block, name) for block in blocks] or [np.empty(0, np.int64)]))
    # Block by block, so that no other thread waits for the texts of all; a text that many rows have is stored once.
    causes = pa.chunked_array([pa.array(block.causes, pa.utf8()) for block in blocks], pa.utf8())
    columns.append(causes.dictionary_encode())
    made = [c if isinstance(c, pa.ChunkedArray) else _column(c, f.type) for c, f in zip(columns, _DEAD, strict=True)]
    return pa.table(made, schema=_DEAD).combine_chunks()


def _lease_row(x: Lease) -> tuple[Any, ...]:
    mask = None if x.mask is None else bytes(x.mask)
    place = (x.group, x.cursor.queue_id, x.id, x.start, x.end)
    return (*place, x.attempt, x.member, x.deadline_us, x.pending > 0, mask, x.doubt)


def _stack(schema: pa.Schema, parts: list[tuple[Group, Cursor, list[Any]]]) -> pa.Table:
    """One table of all cursors' columns, each row with its group and queue."""
    sizes = [len(columns[0]) for _, _, columns in parts]
    if not any(sizes):
        return empty_table(schema)
    stacked = [np.repeat(np.array([g.ordinal for g, _, _ in parts], np.int64), sizes)]
    stacked.append(np.repeat(np.array([c.queue_id for _, c, _ in parts], np.int64), sizes))
    for index in range(len(schema) - 2):
        pieces = [columns[index] for _, _, columns in parts]
        stacked.append(np.concatenate(pieces) if pieces else np.empty(0, np.int64))
    return pa.table([_column(column, f.type) for column, f in zip(stacked, schema, strict=True)], schema=schema)


def _column(values: npt.NDArray[Any], type_: pa.DataType) -> pa.Array:
    column = pa.array(values)
    return column if column.type == type_ else column.cast(type_)


def load(tables: dict[str, pa.Table]) -> tuple[list[Group], Leases, int, int, int]:
    """Return the state that :func:`dump` wrote: groups, leases, the next group's number, deliveries and
    acknowledgements so far."""
    groups: dict[int, Group] = {}
    totals = 0, 0, 0
    for row in tables["groups_list"].to_pylist():
        group = Group(row.get("group", len(groups)), row["name"], subscriptions.load(row["subscription"]))
        group.served, group.paused = row["turn"], json.loads(row.get("paused", "{}"))
        groups[group.ordinal] = group
        totals = len(groups), row.get("delivered", 0), row.get("acked", 0)
    if "groups_totals" in tables:
        (row,) = tables["groups_totals"].to_pylist()
        totals = row["next_group"], row["delivered"], row["acked"]
    tables = {"groups_again": _AGAIN.empty_table(), **tables, "groups_retries": _with_keys(tables["groups_retries"])}
    runs, again, retries, dead = (_Slices(tables[f"groups_{name}"]) for name in ("runs", "again", "retries", "dead"))
    for row in tables["groups_cursors"].to_pylist():
        place = (row["group"], row["queue_id"])
        cursor = Cursor(row["queue_id"], 0)
        starts, states = runs.of(*place)
        cursor.restore(row["base"], row["next"], starts, states, row["counts"])
        cursor.again = Again(*again.of(*place))
        cursor.retries.load(*retries.of(*place))
        cursor.dead.load(*dead.of(*place))
        groups[row["group"]].cursors[row["queue_id"]] = cursor
    for row in tables["groups_edited"].to_pylist() if "groups_edited" in tables else ():
        cursor = groups[row["group"]].cursors[row["queue_id"]]
        cursor.edited.put(row["offset"], Edit(row["position"], row["message_id"]))
    for row in tables["groups_members"].to_pylist() if "groups_members" in tables else ():
        groups[row["group"]].members[row["member"]] = Member(
            row["member"], row["instance"], row["epoch"], row["process"], row["joined_us"], fenced=row["fenced"]
        )
    return list(groups.values()), _load_leases(groups, tables["groups_leases"].to_pylist()), *totals


def load_deleted(tables: dict[str, pa.Table]) -> dict[int, tuple[str, int]]:
    """Of deleted groups, by their numbers: the name, and the position of the deletion."""
    rows = tables["groups_deleted"].to_pylist() if "groups_deleted" in tables else ()
    return {row["group"]: (row["name"], row["position"]) for row in rows}


def _with_keys(retries: pa.Table) -> pa.Table:
    """Return the table of an older snapshot with a column of unknown keys."""
    if "key" in retries.column_names:
        return retries
    return retries.append_column("key", pa.array(np.full(retries.num_rows, UNKNOWN, np.int64)))


def _load_leases(groups: dict[int, Group], rows: Sequence[dict[str, Any]]) -> Leases:
    leases = Leases()
    for row in rows:
        group = groups[row["group"]]
        mask = None if row["mask"] is None else bytearray(row["mask"])
        start, end, attempt = row["start"], row["end"], row["attempt"]
        place = (row["lease"], row["group"], group.cursors[row["queue_id"]])
        lease = Lease(*place, start, end, attempt, row["member"], row["deadline_us"], mask)
        lease.doubt = row.get("doubt", lease.end)
        if row["live"]:
            leases.add(lease)
            group.leases += 1
            if (member := group.members.get(lease.member)) is not None:
                member.note(lease)
        else:
            lease.pending = 0
            leases.remember(lease)
    return leases


class _Slices:
    """The rows of one cursor in a table that is sorted by group and queue."""

    def __init__(self, table: pa.Table) -> None:
        groups, queue_ids = (table.column(name).to_numpy().astype(np.int64) for name in ("group", "queue_id"))
        self._keys = (groups << 32) | queue_ids
        self._values = [
            column.to_numpy() if pa.types.is_integer(column.type) else column.combine_chunks()
            for column in table.columns[2:]
        ]

    def of(self, group: int, queue_id: int) -> list[Any]:
        key = (group << 32) | queue_id
        first, last = np.searchsorted(self._keys, (key, key + 1))
        return [
            values[first:last].copy() if isinstance(values, np.ndarray) else values.slice(first, last - first)
            for values in self._values
        ]
