"""Producer groups, sessions and fencing.

Rules:

1. Epochs count up from 1 over the whole shard; an epoch is never given twice, nor is the number of a group.
2. Opening a session of a (group, instance) fences the session of the same pair before it: from then on every act under
   the older epoch is refused (I7).
3. A group becomes transactional with its first transactional session and stays so; from then on it serves no other
   kind of message (systems.md 1.10), unless the rules say ``mixed_groups``.
4. Every act of a session says when it was used last, by the time of its frame. What is not used is forgotten after a while
   (``forgetting.py``), and a group with its last session. A process that comes back *resumes*: it gets a new session, unless a
   newer process has its name.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.arrays import Columns, Int64s, UInt8s, all_equal, locate
from escrowmq.ledger.commands import OpenSession, Rules
from escrowmq.ledger.events import Decision, event_of_rows
from escrowmq.message.names import is_name, is_text
from escrowmq.schemas import Kind

OPERATOR = 0  # the "epoch" of what no producer session does
NO_GROUP = -1  # of an epoch that is not known (any more)


_COLUMNS = {"epoch": np.int64, "group": np.int32, "fenced": np.bool_, "transactional": np.bool_, "used_us": np.int64}


class Sessions:
    """All producer sessions of a shard that are not forgotten."""

    def __init__(self) -> None:
        self.groups: dict[int, str] = {}
        self.next_epoch = 1
        self._next_group = 0
        self._ordinals: dict[str, int] = {}
        self._transactional: set[int] = set()
        self._sizes: dict[int, int] = {}  # sessions of each group
        self._instances: dict[tuple[int, str], int] = {}  # the newest of each name, so none that is fenced
        self._rows = Columns(_COLUMNS)  # by epoch, rising
        self._names: dict[int, str] = {}  # instance of each epoch

    def __len__(self) -> int:
        return len(self._rows)

    # Finding

    def ordinal(self, group: str) -> int | None:
        """The group's number; None if it has no session."""
        return self._ordinals.get(group)

    def is_transactional(self, ordinal: int) -> bool:
        """Whether the group has had a transactional session."""
        return ordinal in self._transactional

    def instance(self, epoch: int) -> str | None:
        """The instance name of a session; None if it is forgotten."""
        return self._names.get(epoch)

    def groups_of(self, epochs: Int64s) -> Int64s:
        """The group number of each epoch; ``NO_GROUP`` where it is not known."""
        if len(epochs) and all_equal(epochs):
            row = self._row(int(epochs[0]))
            return np.full(len(epochs), NO_GROUP if row < 0 else self._rows["group"][row], np.int64)
        rows = self._rows_of(epochs)
        known = rows >= 0
        groups = np.full(len(epochs), NO_GROUP, np.int64)
        groups[known] = self._rows["group"][rows[known]]
        return groups

    def of_group(self, ordinal: int) -> Int64s:
        """The epochs of a group, rising."""
        epochs: Int64s = self._rows["epoch"][self._rows["group"] == ordinal]
        return epochs

    def idle(self, before_us: int) -> Int64s:
        """The epochs that were used last before that time, rising."""
        epochs: Int64s = self._rows["epoch"][self._rows["used_us"] < before_us]
        return epochs

    def used_us(self) -> dict[int, int]:
        """When the sessions of each group did something last."""
        groups, row = np.unique(self._rows["group"], return_inverse=True)
        times = np.zeros(len(groups), np.int64)
        np.maximum.at(times, row, self._rows["used_us"])
        return dict(zip(groups.tolist(), times.tolist(), strict=True))

    def _row(self, epoch: int) -> int:
        """The row of an epoch; -1 if there is none."""
        epochs = self._rows["epoch"]
        if not len(epochs):
            return -1
        row = epoch - int(epochs[0])  # right while none between was forgotten
        if not (0 <= row < len(epochs) and epochs[row] == epoch):
            row = int(epochs.searchsorted(epoch))
        return row if row < len(epochs) and epochs[row] == epoch else -1

    def _rows_of(self, epochs: Int64s) -> Int64s:
        return locate(self._rows["epoch"], epochs)

    # What they may do

    def check(self, epochs: Int64s, *, transactional: bool | None, rules: Rules) -> UInt8s:
        """What each row's session may do: OK, UNKNOWN_SESSION, FENCED or GROUP_KIND. Epoch 0 stands for no session.

        ``transactional``: the kind of message that is sent, None when none is.
        """
        if len(epochs) and all_equal(epochs):
            return np.full(len(epochs), self._check_one(int(epochs[0]), transactional, rules), np.uint8)
        unique, inverse = np.unique(epochs, return_inverse=True)
        codes = [self._check_one(int(epoch), transactional, rules) for epoch in unique]
        return np.array(codes, np.uint8)[inverse]

    def group_of(self, epoch: int, rules: Rules, *, transactional: bool | None = None) -> int:
        """The group number of one session that may act. Raises UNKNOWN_SESSION, FENCED, GROUP_KIND."""
        status = code.UNKNOWN_SESSION if epoch == OPERATOR else self._check_one(epoch, transactional, rules)
        if status != code.OK:
            raise error(Code(status))
        return int(self._rows["group"][self._row(epoch)])

    def _check_one(self, epoch: int, transactional: bool | None, rules: Rules) -> int:
        if epoch == OPERATOR:
            return code.UNKNOWN_SESSION if transactional else code.OK
        row = self._row(epoch)
        if row < 0:
            return code.UNKNOWN_SESSION
        if self._rows["fenced"][row]:
            return code.FENCED
        if transactional and not self._rows["transactional"][row]:
            return code.GROUP_KIND
        of_group = int(self._rows["group"][row]) in self._transactional
        if transactional is False and of_group and not rules.mixed_groups:
            return code.GROUP_KIND
        return code.OK

    # Opening

    def decide_open(self, command: OpenSession, rules: Rules) -> Decision:
        """A new session. Refuses a plain one in a transactional group only when it sends, not here."""
        if not is_name(command.group):
            raise error(Code.BAD_GROUP_NAME, f"{command.group!r} is not a group name")
        if len(command.instance.encode(errors="replace")) > 255 or not is_text(command.instance):
            raise error(Code.BAD_GROUP_NAME, "an instance name is text of at most 255 bytes")
        if command.group not in self._ordinals and len(self.groups) >= rules.max_groups:
            raise error(Code.TOO_MANY, f"there are {len(self.groups)} producer groups", "max_groups")
        if command.transactional and rules.reject_transactional:
            raise error(Code.NO_PERMISSION)
        newest = self._instances.get((self._ordinals.get(command.group, NO_GROUP), command.instance), OPERATOR)
        if command.resume is not None and newest > command.resume:
            raise error(Code.FENCED)
        row = (self.next_epoch, command.group, command.instance, command.transactional)
        return Decision((event_of_rows(Kind.SESSION, [row]),), self.next_epoch)

    def apply_session(self, batch: pa.RecordBatch, time_us: int) -> None:
        for row in batch.to_pylist():
            group = self._ordinals.setdefault(row["group"], self._next_group)
            if group == self._next_group:
                self._next_group += 1
                self.groups[group] = row["group"]
            if row["transactional"]:
                self._transactional.add(group)
            before = self._instances.get((group, row["instance"]))
            if before is not None:
                self._rows["fenced"][self._row(before)] = True
            self._rows.extend(
                1, epoch=row["epoch"], group=group, fenced=False, transactional=row["transactional"], used_us=time_us
            )
            self._remember(row["epoch"], group, row["instance"])
            self.next_epoch = row["epoch"] + 1

    def _remember(self, epoch: int, group: int, instance: str) -> None:
        self._instances[(group, instance)] = epoch
        self._names[epoch] = instance
        self._sizes[group] = self._sizes.get(group, 0) + 1

    # Using and forgetting

    def note(self, epochs: npt.NDArray[np.uint32], time_us: int) -> None:
        """These sessions (``OPERATOR`` among them) did something."""
        if all_equal(epochs):
            if len(epochs) and epochs[0] != OPERATOR:
                self._rows["used_us"][self._row(int(epochs[0]))] = time_us
            return
        self._rows["used_us"][self._rows_of(epochs[epochs != OPERATOR].astype(np.int64))] = time_us

    def forget(self, epochs: Int64s) -> list[int]:
        """Let go of sessions; the groups that went with their last one."""
        rows = self._rows_of(epochs)
        gone = []
        for epoch, group in zip(epochs.tolist(), self._rows["group"][rows].tolist(), strict=True):
            instance = self._names.pop(epoch)
            if self._instances.get((group, instance)) == epoch:
                del self._instances[(group, instance)]
            self._sizes[group] -= 1
            if not self._sizes[group]:
                gone.append(group)
        self._drop(rows)
        for group in gone:
            del self._sizes[group], self._ordinals[self.groups.pop(group)]
            self._transactional.discard(group)
        return gone

    def _drop(self, rows: Int64s) -> None:
        keep = np.ones(len(self._rows), np.bool_)
        keep[rows] = False
        old, self._rows = self._rows, Columns(_COLUMNS)
        self._rows.extend(int(keep.sum()), **{name: old[name][keep] for name in _COLUMNS})

    # Snapshots

    def snapshot(self) -> dict[str, pa.Table]:
        groups = {
            "name": pa.array(self.groups.values(), pa.utf8()),
            "transactional": pa.array([group in self._transactional for group in self.groups], pa.bool_()),
            "ordinal": pa.array(self.groups, pa.int64()),
        }
        rows = self._rows.to_table().append_column("instance", pa.array(self._names.values(), pa.utf8()))
        next_ones = {"next_epoch": str(self.next_epoch), "next_group": str(self._next_group)}
        return {"producer_groups": pa.table(groups), "sessions": rows.replace_schema_metadata(next_ones)}

    def restore(self, tables: dict[str, pa.Table], time_us: int) -> None:
        """Become what :meth:`snapshot` gave. Those of format 1 held every session, and not when it was used: let that be
        ``time_us``, the time of the snapshot."""
        groups, sessions = tables["producer_groups"], tables["sessions"]
        names = groups["name"].to_pylist()
        if "epoch" not in sessions.column_names:
            first, size = int(sessions.schema.metadata[b"first"]), sessions.num_rows
            groups = groups.append_column("ordinal", pa.array(np.arange(len(names))))
            sessions = sessions.append_column("epoch", pa.array(np.arange(first, first + size)))
            sessions = sessions.append_column("used_us", pa.array(np.full(size, time_us)))
            sessions = sessions.replace_schema_metadata(
                {"next_epoch": str(first + size), "next_group": str(len(names))}
            )
        ordinals = groups["ordinal"].to_pylist()
        self.next_epoch = int(sessions.schema.metadata[b"next_epoch"])
        self._next_group = int(sessions.schema.metadata[b"next_group"])
        self.groups = dict(zip(ordinals, names, strict=True))
        self._ordinals = dict(zip(names, ordinals, strict=True))
        self._transactional = {
            n for n, is_one in zip(ordinals, groups["transactional"].to_pylist(), strict=True) if is_one
        }
        self._rows.load(sessions)
        columns = (sessions[name].to_pylist() for name in ("epoch", "group", "instance", "fenced"))
        for epoch, group, instance, fenced in zip(*columns, strict=True):
            self._remember(epoch, group, instance)
            if fenced:
                del self._instances[(group, instance)]
