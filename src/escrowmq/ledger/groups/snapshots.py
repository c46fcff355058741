"""Consumer groups as Arrow tables and back. States are stored as runs, so a steadily consumed queue is one row or two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.ledger.columns.arrays import int64s, table_of
from escrowmq.ledger.groups import subscriptions
from escrowmq.ledger.groups.cursors import Cursor, Lease
from escrowmq.ledger.groups.group import Group, Leases, Member
from escrowmq.ledger.groups.order import UNKNOWN

_LIST = pa.schema([("name", pa.utf8()), ("subscription", pa.utf8()), *int64s("turn", "delivered", "acked")])
_PLACE = [("group", pa.int32()), ("queue_id", pa.int32())]
_CURSORS = pa.schema([*_PLACE, *int64s("base", "next"), ("counts", pa.list_(pa.int64()))])
_RUNS = pa.schema([*_PLACE, ("start", pa.int64()), ("state", pa.uint8())])
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


def dump(groups: Sequence[Group], leases: Leases, delivered: int, acked: int) -> dict[str, pa.Table]:
    """The tables of a snapshot; they share no memory with the state."""
    listed = [(g.name, subscriptions.dump(g.subscription), g.served, delivered, acked) for g in groups]
    cursors = [(g, c) for g in groups for _, c in sorted(g.cursors.items())]
    members = [
        (g.ordinal, m.id, m.name, m.epoch, m.process, m.joined_us, m.fenced) for g in groups for m in g.members.values()
    ]
    return {
        "groups_list": table_of(_LIST, listed),
        "groups_cursors": table_of(_CURSORS, [(g.ordinal, c.queue_id, c.base, c.next, c.counts) for g, c in cursors]),
        "groups_runs": _stack(_RUNS, [(g, c, list(c.runs())) for g, c in cursors]),
        "groups_retries": _stack(_RETRIES, [(g, c, c.retries.arrays()) for g, c in cursors]),
        "groups_dead": _stack(_DEAD, [(g, c, c.dead.arrays()) for g, c in cursors if len(c.dead)]),
        "groups_leases": table_of(_LEASES, [_lease_row(x) for x in (*leases.live.values(), *leases.ended.values())]),
        "groups_members": table_of(_MEMBERS, members),
    }


def _lease_row(x: Lease) -> tuple[Any, ...]:
    mask = None if x.mask is None else bytes(x.mask)
    place = (x.group, x.cursor.queue_id, x.id, x.start, x.end)
    return (*place, x.attempt, x.member, x.deadline_us, x.pending > 0, mask, x.doubt)


def _stack(schema: pa.Schema, parts: list[tuple[Group, Cursor, list[Any]]]) -> pa.Table:
    """One table of all cursors' columns, each row with its group and queue."""
    sizes = [len(columns[0]) for _, _, columns in parts]
    stacked = [np.repeat(np.array([g.ordinal for g, _, _ in parts], np.int64), sizes)]
    stacked.append(np.repeat(np.array([c.queue_id for _, c, _ in parts], np.int64), sizes))
    for index in range(len(schema) - 2):
        pieces = [columns[index] for _, _, columns in parts]
        stacked.append(np.concatenate(pieces) if pieces else np.empty(0, np.int64))
    return pa.table([_column(column, f.type) for column, f in zip(stacked, schema, strict=True)], schema=schema)


def _column(values: npt.NDArray[Any], type_: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(type_):  # a text that many rows have is stored once
        return pa.array(values.tolist(), pa.utf8()).dictionary_encode()
    return pa.array(values).cast(type_)


def load(tables: dict[str, pa.Table]) -> tuple[list[Group], Leases, int, int]:
    """The state that :func:`dump` wrote: groups, leases, deliveries and acknowledgements so far."""
    groups: list[Group] = []
    delivered = acked = 0
    for row in tables["groups_list"].to_pylist():
        group = Group(len(groups), row["name"], subscriptions.load(row["subscription"]))
        group.served, delivered, acked = row["turn"], row["delivered"], row["acked"]
        groups.append(group)
    tables = {**tables, "groups_retries": _with_keys(tables["groups_retries"])}
    runs, retries, dead = (_Slices(tables[f"groups_{name}"]) for name in ("runs", "retries", "dead"))
    for row in tables["groups_cursors"].to_pylist():
        place = (row["group"], row["queue_id"])
        cursor = Cursor(row["queue_id"], 0)
        starts, states = runs.of(*place)
        cursor.restore(row["base"], row["next"], starts, states, row["counts"])
        cursor.retries.load(*retries.of(*place))
        cursor.dead.load(*dead.of(*place))
        groups[row["group"]].cursors[row["queue_id"]] = cursor
    for row in tables["groups_members"].to_pylist() if "groups_members" in tables else ():
        groups[row["group"]].members[row["member"]] = Member(
            row["member"], row["instance"], row["epoch"], row["process"], row["joined_us"], fenced=row["fenced"]
        )
    return groups, _load_leases(groups, tables["groups_leases"].to_pylist()), delivered, acked


def _with_keys(retries: pa.Table) -> pa.Table:
    """The table of an older snapshot with a column of unknown keys."""
    if "key" in retries.column_names:
        return retries
    return retries.append_column("key", pa.array(np.full(retries.num_rows, UNKNOWN, np.int64)))


def _load_leases(groups: Sequence[Group], rows: Sequence[dict[str, Any]]) -> Leases:
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
