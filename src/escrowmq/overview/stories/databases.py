"""Facts that the databases store about a message: rows of the outbox, marks of the inbox, rows of the delivery modes,
the sets and cases of compensations.

Every look-up uses a primary key, except that of a business key in the outbox, which has no index on keys. Unsent rows
are searched by their lane; of the sent rows that are kept, only the newest :data:`KEPT_ROWS` are searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from escrowmq.acts.chain import parse
from escrowmq.acts.journal import Listed
from escrowmq.acts.telling import to_act
from escrowmq.compensation.sets.tables import commit_set, half_set, set_store, taken
from escrowmq.outbox.sending import lane_of
from escrowmq.outbox.tables import (
    State,
    state_is,
    trans_act,
    trans_barrier,
    trans_compensation_case,
    trans_driven,
    trans_message,
    trans_prepared,
    trans_recv_log,
)
from escrowmq.overview.sources import Sources
from escrowmq.overview.stories.known import Databases, InDatabase

KEPT_ROWS = 200_000
"""Number of the newest outbox rows that are searched for a key."""
RECORDS = 500
"""Number of the newest operator actions that are searched."""
MOST_NAMES = 200
"""Maximum number of consumer groups whose marks are looked up."""
_UNSENT = (State.PENDING, State.RETRYING, State.HELD, State.WAITING, State.DISCARDED)
_TABLES = (
    trans_message, trans_recv_log, trans_driven, trans_prepared, trans_barrier, trans_compensation_case, set_store
)  # fmt: skip


@dataclass(slots=True)
class Reader:
    """Reads of one database over one connection. Missing tables are skipped."""

    name: str
    connection: sa.Connection
    tables: set[str]
    notes: list[str] = field(default_factory=list)

    def find_ids(self, key: str, limit: int) -> list[bytes]:
        """Return the ids of at most ``limit`` rows with a business key, newest first."""
        found: list[tuple[int, bytes]] = []
        if trans_message.name in self.tables:
            m = trans_message.c
            wanted = [sa.and_(state_is(state), m.lane == lane_of(key), m.key == key) for state in _UNSENT]
            newest = int(self.connection.scalar(sa.select(sa.func.max(m.seq))) or 0)
            oldest = int(self.connection.scalar(sa.select(sa.func.min(m.seq))) or 0)
            wanted.append(sa.and_(m.seq > newest - KEPT_ROWS, m.key == key))
            if oldest <= newest - KEPT_ROWS:
                self.notes.append(
                    f"{self.name}: of the sent rows only the newest {KEPT_ROWS:,} were searched for the key."
                )
            for one in wanted:
                rows = self.connection.execute(sa.select(m.seq, m.id).where(one).order_by(m.seq.desc()).limit(limit))
                found += [(seq, bytes(identity)) for seq, identity in rows]
        if trans_driven.name in self.tables:
            d = trans_driven.c
            rows = self.connection.execute(sa.select(d.created_us, d.id).where(d.key == key).limit(limit))
            found += [(created, bytes(identity)) for created, identity in rows]
        return list(dict.fromkeys(identity for _, identity in sorted(found, reverse=True)))[:limit]

    def read_ids(self, ids: Sequence[bytes]) -> list[InDatabase]:
        """Return the rows of these message ids, for each id that the database has."""
        found = {identity: InDatabase(self.name, identity) for identity in ids}
        for row in self._read_rows(trans_message, trans_message.c.id, ids):
            found[bytes(row["id"])].outbox = row
        for row in self._read_rows(trans_driven, trans_driven.c.id, ids):
            found[bytes(row["id"])].driven = row
        for table, names in ((trans_recv_log, "marks"), (trans_prepared, "prepared")):
            for row in self._read_by_group(table, table.c.consumer_group, ids):
                getattr(found[bytes(row["message_id"])], names).append(row)
        for row in self._read_by_group(trans_compensation_case, trans_compensation_case.c.name, ids):
            found[bytes(row["message_id"])].cases.append(row)
        self._add_sets(found)
        self._add_acts(found)
        return [one for one in found.values() if one.is_known]

    def read_barrier(self, transaction: bytes) -> list[dict[str, Any]]:
        """Return the barrier rows of a transaction."""
        return self._read_rows(trans_barrier, trans_barrier.c.transaction_id, [transaction])

    def _read_rows(self, table: sa.Table, column: sa.Column[Any], ids: Sequence[bytes]) -> list[dict[str, Any]]:
        """Return the rows with these ids. Bodies are replaced by their length."""
        if table.name not in self.tables or not ids:
            return []
        wanted = [c for c in table.c if c.name != "body"]
        body = [sa.func.length(table.c.body).label("body_bytes")] if "body" in table.c else []
        found = self.connection.execute(sa.select(*wanted, *body).where(column.in_(list(ids)))).mappings()
        return [dict(row) for row in found]

    def _read_by_group(self, table: sa.Table, group: sa.Column[Any], ids: Sequence[bytes]) -> list[dict[str, Any]]:
        """Return the rows with these ids from a table whose primary key begins with a group name."""
        if table.name not in self.tables:
            return []
        names = self._list_distinct(group)
        if len(names) == MOST_NAMES:
            self.notes.append(
                f"{self.name}: {table.name} has more than {MOST_NAMES} groups; the others were not searched."
            )
        by_group = group.in_(names)
        columns = [c for c in table.c if c.name != "body"]
        query = sa.select(*columns).where(by_group, table.c.message_id.in_(list(ids)))
        return [dict(row) for row in self.connection.execute(query).mappings()] if names else []

    def _list_distinct(self, column: sa.Column[Any]) -> list[Any]:
        """Return the values of the first column of a primary key. Each costs one index look-up."""
        names: list[Any] = []
        while len(names) < MOST_NAMES:
            after = column > names[-1] if names else sa.true()
            name = self.connection.scalar(sa.select(sa.func.min(column)).where(after))
            if name is None:
                break
            names.append(name)
        return names

    def _add_acts(self, found: dict[bytes, InDatabase]) -> None:
        """Add operator actions, from the newest entries of the record. Each entry lists its message ids."""
        if trans_act.name not in self.tables:
            return
        a = trans_act.c
        newest = int(self.connection.scalar(sa.select(sa.func.max(a.number))) or 0)
        names = {identity.hex(): one for identity, one in found.items()}
        named = sa.or_(*(a.record.like(f"%{name}%") for name in names)) if names else sa.false()
        query = sa.select(a.record).where(a.number > newest - RECORDS, named).order_by(a.number)
        for line in self.connection.scalars(query):
            try:
                made, _, digest = parse(line.encode() + b"\n")
            except ValueError:
                self.notes.append(f"{self.name}: a record of an act cannot be read (escrowmq acts verify).")
                continue
            for name in made.what.get("messages", ()):
                if name in names:
                    names[name].acts.append(to_act(Listed(made, made, digest)))
        if newest > RECORDS:
            self.notes.append(f"{self.name}: of the record of acts only the newest {RECORDS:,} were searched.")

    def _add_sets(self, found: dict[bytes, InDatabase]) -> None:
        """Add the sets of compensations. Until the first run of a scheduler a pair has no name in the store, only a
        number."""
        if set_store.name not in self.tables:
            return
        query = sa.select(set_store.c.store, set_store.c.name).limit(MOST_NAMES)
        names: dict[int, str] = {row.store: row.name for row in self.connection.execute(query)}
        for table, what, time in _SETS:
            if table.name not in self.tables:
                continue
            stores = self._list_distinct(table.c.store)
            entries: sa.Select[Any] = sa.select(table.c.store, table.c.id, table.c[time])
            entries = entries.where(table.c.store.in_(stores), table.c.id.in_(list(found)))
            for store, identity, time_us in self.connection.execute(entries):
                entry = {"name": names.get(store, f"number {store}"), "what": what, "time_us": time_us}
                found[bytes(identity)].sets.append(entry)


_SETS = ((half_set, "half", "announced_us"), (taken, "taken", "announced_us"), (commit_set, "commit", "entered_us"))


def read_databases(
    sources: Sources, key: str, ids: Iterable[bytes], transactions: Iterable[bytes], limit: int
) -> Databases:
    """Read the rows of message ids, of a business key, and of the barriers of transactions, from all databases."""
    found, wanted = Databases(), list(ids)

    def read(name: str, connection: sa.Connection, there: set[str]) -> None:
        reader = Reader(name, connection, there)
        found.rows += reader.read_ids(list(dict.fromkeys([*wanted, *reader.find_ids(key, limit)])))
        for transaction in transactions:
            found.barriers += [{**row, "database": name} for row in reader.read_barrier(transaction)]
        found.notes += reader.notes

    sources.read_databases({table.name for table in _TABLES}, read)
    return found
