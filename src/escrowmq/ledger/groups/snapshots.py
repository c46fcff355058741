"""Consumer groups as Arrow tables and back. States are runs: a steadily consumed queue has one or two rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from escrowmq.ledger.columns.arrays import empty_table, int64s, table_of
from escrowmq.ledger.groups import limits, subscriptions
from escrowmq.ledger.groups.cursors import Again, Cursor, Lease
from escrowmq.ledger.groups.dead.letters import Block, Edit
from escrowmq.ledger.groups.group import Group, Leases, Member
from escrowmq.ledger.groups.limits import NO_LIMITS
from escrowmq.ledger.groups.order import UNKNOWN

_NAME, _GROUP = ("name", pa.utf8()), ("group", pa.int32())
_LIST = pa.schema([_NAME, ("subscription", pa.utf8()), ("turn", pa.int64()), _GROUP, ("paused", pa.utf8())])
_LIMITED = pa.schema([_GROUP, ("limits", pa.utf8()), *int64s("since_us", "spent")])  # groups with limits only
_TOTALS = pa.schema(int64s("next_group", "delivered", "acked"))  # older ones: in each row of the list
_DELETED = pa.schema([_GROUP, _NAME, ("position", pa.int64())])
# Absent in older snapshots: group, paused, limited, totals, deleted, again, edited, members, the keys of retries
# (-1: unknown), the doubt of leases. Causes were texts alone.
_CAUSE = ("cause", pa.dictionary(pa.int32(), pa.utf8()))

_PLACE = [_GROUP, ("queue_id", pa.int32())]
_CURSORS = pa.schema([*_PLACE, *int64s("base", "next"), ("counts", pa.list_(pa.int64()))])
_RUNS = pa.schema([*_PLACE, ("start", pa.int64()), ("state", pa.uint8())])
_AGAIN = pa.schema([*_PLACE, *int64s("start", "end")])
_RETRIES = pa.schema([*_PLACE, ("offset", pa.int64()), ("attempt", pa.int32()), *int64s("due_us", "key")])
_DEAD = pa.schema([*_PLACE, ("offset", pa.int64()), ("attempts", pa.int32()), ("dead_us", pa.int64()), _CAUSE])
_EDITED = pa.schema([*_PLACE, *int64s("offset", "position"), ("message_id", pa.binary(16))])
# The ended leases follow the live ones, in order of their end. Mask null: all pending, or (ended) all acked.
_STATE = [("live", pa.bool_()), ("mask", pa.binary()), ("doubt", pa.int64())]
_LEASED = [*int64s("lease", "start", "end"), ("attempt", pa.int32()), *int64s("member", "deadline_us")]
_LEASES = pa.schema([*_PLACE, *_LEASED, *_STATE])
_NAMED = [_GROUP, ("member", pa.int64()), ("instance", pa.utf8())]
_MEMBERS = pa.schema([*_NAMED, *int64s("epoch", "process", "joined_us"), ("fenced", pa.bool_())])


class State(Protocol):
    """The state of all groups: :class:`escrowmq.ledger.groups.groups.Groups`."""

    groups: dict[int, Group]
    leases: Leases
    next_ordinal: int
    deleted: dict[int, tuple[str, int]]
    delivered: int
    acked: int


def freeze(state: State) -> Callable[[], dict[str, pa.Table]]:
    """Return a function that returns the tables of a snapshot of now; they share no memory with the state. Dead letters
    are copied only when it is called: a million causes take long, and their blocks never change."""
    groups, leases = list(state.groups.values()), state.leases
    listed = [
        (g.name, subscriptions.dump(g.subscription), g.served, g.ordinal, json.dumps(g.paused, sort_keys=True))
        for g in groups
    ]
    cursors = [(g.ordinal, c) for g in groups for _, c in sorted(g.cursors.items())]
    members = [
        (g.ordinal, m.id, m.name, m.epoch, m.process, m.joined_us, m.fenced) for g in groups for m in g.members.values()
    ]
    edited = [(g, c.queue_id, *row) for g, c in cursors if len(c.edited) for row in c.edited.rows()]
    blocks = [(g, c.queue_id, block) for g, c in cursors for block in c.dead.blocks]
    tables = {
        "groups_list": table_of(_LIST, listed),
        "groups_limited": table_of(_LIMITED, [_limits_row(g) for g in groups if g.limits != NO_LIMITS]),
        "groups_totals": table_of(_TOTALS, [(state.next_ordinal, state.delivered, state.acked)]),
        "groups_deleted": table_of(_DELETED, [(number, *known) for number, known in state.deleted.items()]),
        "groups_cursors": table_of(_CURSORS, [(g, c.queue_id, c.base, c.next, c.counts) for g, c in cursors]),
        "groups_runs": _stack(_RUNS, [(g, c.queue_id, c.runs()) for g, c in cursors]),
        "groups_again": _stack(_AGAIN, [(g, c.queue_id, [c.again.starts, c.again.ends]) for g, c in cursors]),
        "groups_retries": _stack(_RETRIES, [(g, c.queue_id, c.retries.arrays()) for g, c in cursors]),
        "groups_edited": table_of(_EDITED, edited),
        "groups_leases": table_of(_LEASES, [_lease_row(x) for x in (*leases.live.values(), *leases.ended.values())]),
        "groups_members": table_of(_MEMBERS, members),
    }
    return lambda: tables | {"groups_dead": _stack_dead(blocks)}


def _stack_dead(blocks: list[tuple[int, int, Block]]) -> pa.Table:
    if not blocks:
        return empty_table(_DEAD)
    table = _stack(_DEAD.remove(5), [(g, id, block.columns[:3]) for g, id, block in blocks])
    # Block by block, so that no other thread waits for the texts of all; a text that many rows have is stored once.
    causes = pa.chunked_array([pa.array(block.causes, pa.utf8()) for _, _, block in blocks], pa.utf8())
    return table.append_column(_DEAD.field("cause"), causes.dictionary_encode()).combine_chunks()


def _limits_row(g: Group) -> tuple[Any, ...]:
    spent = (0, 0) if g.bucket is None else (g.bucket.since_us, g.bucket.spent)
    return (g.ordinal, limits.dump(g.limits), *spent)


def _lease_row(x: Lease) -> tuple[Any, ...]:
    mask = None if x.mask is None else bytes(x.mask)
    place = (x.group, x.cursor.queue_id, x.id, x.start, x.end)
    return (*place, x.attempt, x.member, x.deadline_us, x.pending > 0, mask, x.doubt)


def _stack(schema: pa.Schema, parts: Sequence[tuple[int, int, Sequence[Any]]]) -> pa.Table:
    """Return one table of all parts (group, queue id, columns), each of its rows with its group and queue."""
    sizes = [len(columns[0]) for _, _, columns in parts]
    if not any(sizes):
        return empty_table(schema)
    groups, queue_ids, columns = zip(*parts, strict=True)
    places = [np.repeat(np.array(numbers, np.int64), sizes) for numbers in (groups, queue_ids)]
    stacked = [*places, *(np.concatenate(pieces) for pieces in zip(*columns, strict=True))]
    arrays = [pa.array(column).cast(field.type) for column, field in zip(stacked, schema, strict=True)]
    return pa.table(arrays, schema=schema)


def load(state: State, tables: dict[str, pa.Table]) -> None:
    """Restore the result of :func:`freeze` into a new state."""
    groups, totals = state.groups, _rows(tables, "totals")
    for row in _rows(tables, "list"):
        group = Group(row.get("group", len(groups)), row["name"], subscriptions.load(row["subscription"]))
        group.served, group.paused = row["turn"], json.loads(row.get("paused", "{}"))
        groups[group.ordinal] = group
        total = {"next_group": len(groups), "delivered": row.get("delivered", 0), "acked": row.get("acked", 0)}
        totals = [total, *totals]  # of older snapshots
    if totals:
        state.next_ordinal, state.delivered, state.acked = (totals[-1][name] for name in _TOTALS.names)
    for row in _rows(tables, "limited"):
        groups[row["group"]].limit(limits.load(row["limits"]), row["since_us"])
        if (bucket := groups[row["group"]].bucket) is not None:
            bucket.spent = row["spent"]
    state.deleted = {row["group"]: (row["name"], row["position"]) for row in _rows(tables, "deleted")}
    keyed = tables["groups_retries"]
    if "key" not in keyed.column_names:
        keyed = keyed.append_column("key", pa.array(np.full(len(keyed), UNKNOWN, np.int64)))
    runs, dead = (_slices(tables[f"groups_{name}"]) for name in ("runs", "dead"))
    retries, again = _slices(keyed), _slices(tables.get("groups_again", _AGAIN.empty_table()))
    for row in _rows(tables, "cursors"):
        at = (row["group"], row["queue_id"])
        cursor = groups[row["group"]].cursors[row["queue_id"]] = Cursor(row["queue_id"], 0)
        starts, states = runs(*at)
        cursor.restore(row["base"], row["next"], starts, states, row["counts"])
        cursor.again = Again(*again(*at))
        cursor.retries.load(*retries(*at))
        cursor.dead.load(*dead(*at))
    for row in _rows(tables, "edited"):
        cursor = groups[row["group"]].cursors[row["queue_id"]]
        cursor.edited.put(row["offset"], Edit(row["position"], row["message_id"]))
    for row in _rows(tables, "members"):
        values = (row[name] for name in ("member", "instance", "epoch", "process", "joined_us", "fenced"))
        groups[row["group"]].members[row["member"]] = Member(*values)
    for row in _rows(tables, "leases"):
        group = groups[row["group"]]
        mask = None if row["mask"] is None else bytearray(row["mask"])
        place = (row["lease"], row["group"], group.cursors[row["queue_id"]], row["start"], row["end"])
        lease = Lease(*place, row["attempt"], row["member"], row["deadline_us"], mask)
        lease.doubt = row.get("doubt", lease.end)
        if row["live"]:
            state.leases.add(lease)
            group.leases += 1
            group.note(lease)
        else:
            lease.pending = 0
            state.leases.remember(lease)


def _rows(tables: dict[str, pa.Table], name: str) -> list[dict[str, Any]]:
    table = tables.get(f"groups_{name}")
    return table.to_pylist() if table is not None else []


def _slices(table: pa.Table) -> Callable[[int, int], list[Any]]:
    """Return a function of (group, queue id) that returns the columns of their rows, from a table sorted by these."""
    groups, queue_ids = (table.column(name).to_numpy().astype(np.int64) for name in ("group", "queue_id"))
    keys = (groups << 32) | queue_ids
    columns = [
        column.to_numpy() if pa.types.is_integer(column.type) else column.combine_chunks()
        for column in table.columns[2:]
    ]

    def rows_of(group: int, queue_id: int) -> list[Any]:
        key = (group << 32) | queue_id
        first, last = np.searchsorted(keys, (key, key + 1))
        return [
            values[first:last].copy() if isinstance(values, np.ndarray) else values.slice(first, last - first)
            for values in columns
        ]

    return rows_of
