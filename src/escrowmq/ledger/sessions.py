"""Producer groups, sessions and fencing.

Rules:

1. Epochs count up from 1 over the whole shard; an epoch is never given twice.
2. Opening a session of a (group, instance) fences the session of the same pair before it: from then on every act under
   the older epoch is refused (I7).
3. A group becomes transactional with its first transactional session and stays so; from then on it serves no other
   kind of message (systems.md 1.10), unless the rules say ``mixed_groups``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger import codes as code
from escrowmq.ledger.columns import Columns, all_equal
from escrowmq.ledger.commands import Decision, Event, OpenSession, Rules
from escrowmq.ledger.topics import is_name, is_text
from escrowmq.schemas import STORED, Kind

Int64s = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]

OPERATOR = 0  # the "epoch" of what no producer session does


class Sessions:
    """All producer sessions of a shard."""

    def __init__(self) -> None:
        self.groups: list[str] = []
        self._ordinals: dict[str, int] = {}
        self._transactional: list[bool] = []
        self._instances: dict[tuple[int, str], int] = {}
        self._rows = Columns({"group": np.int32, "fenced": np.bool_, "transactional": np.bool_}, first=1)
        self._names: list[str] = []  # instance of each row

    @property
    def next_epoch(self) -> int:
        """The epoch that the next session gets."""
        return self._rows.end

    def ordinal(self, group: str) -> int | None:
        """The group's number; None if it never opened a session."""
        return self._ordinals.get(group)

    def is_transactional(self, ordinal: int) -> bool:
        """Whether the group has had a transactional session."""
        return self._transactional[ordinal]

    def instance(self, epoch: int) -> str:
        """The instance name of a session."""
        return self._names[epoch - self._rows.first]

    def known(self, epochs: Int64s) -> npt.NDArray[np.bool_]:
        """Which epochs were ever given."""
        return (epochs >= self._rows.first) & (epochs < self._rows.end)

    def groups_of(self, epochs: Int64s) -> Int64s:
        """The group number of each (known) epoch."""
        return self._rows["group"][epochs - self._rows.first].astype(np.int64)

    def check(self, epochs: Int64s, *, transactional: bool | None, rules: Rules) -> Codes:
        """What each row's session may do: OK, UNKNOWN_SESSION, FENCED or GROUP_KIND. Epoch 0 stands for no session.

        ``transactional``: the kind of message that is sent, None when none is.
        """
        if len(epochs) and all_equal(epochs):
            return np.full(len(epochs), self._check_one(int(epochs[0]), transactional, rules), np.uint8)
        unique, inverse = np.unique(epochs, return_inverse=True)
        codes = [self._check_one(int(epoch), transactional, rules) for epoch in unique]
        return np.array(codes, np.uint8)[inverse]

    def _check_one(self, epoch: int, transactional: bool | None, rules: Rules) -> int:
        if epoch == OPERATOR:
            return code.UNKNOWN_SESSION if transactional else code.OK
        if not self._rows.first <= epoch < self._rows.end:
            return code.UNKNOWN_SESSION
        row = epoch - self._rows.first
        if self._rows["fenced"][row]:
            return code.FENCED
        if transactional and not self._rows["transactional"][row]:
            return code.GROUP_KIND
        of_group = self._transactional[self._rows["group"][row]]
        if transactional is False and of_group and not rules.mixed_groups:
            return code.GROUP_KIND
        return code.OK

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
        row = {
            "epoch": self.next_epoch,
            "group": command.group,
            "instance": command.instance,
            "transactional": command.transactional,
        }
        batch = pa.RecordBatch.from_pylist([row], schema=STORED[Kind.SESSION])
        return Decision((Event(Kind.SESSION, batch),), self.next_epoch)

    def apply_session(self, batch: pa.RecordBatch) -> None:
        """Kind.SESSION."""
        for row in batch.to_pylist():
            group = self._ordinals.setdefault(row["group"], len(self.groups))
            if group == len(self.groups):
                self.groups.append(row["group"])
                self._transactional.append(False)
            self._transactional[group] |= row["transactional"]
            before = self._instances.get((group, row["instance"]))
            if before is not None:
                self._rows["fenced"][before - self._rows.first] = True
            self._instances[(group, row["instance"])] = self._rows.extend(
                1, group=group, fenced=False, transactional=row["transactional"]
            )
            self._names.append(row["instance"])

    def snapshot(self) -> dict[str, pa.Table]:
        """The state as tables."""
        groups: dict[str, Any] = {
            "name": pa.array(self.groups, pa.utf8()),
            "transactional": pa.array(self._transactional, pa.bool_()),
        }
        rows = self._rows.to_table()
        metadata = rows.schema.metadata
        rows = rows.append_column("instance", pa.array(self._names, pa.utf8())).replace_schema_metadata(metadata)
        return {"producer_groups": pa.table(groups), "sessions": rows}

    def restore(self, tables: dict[str, pa.Table]) -> None:
        """Become what :meth:`snapshot` gave."""
        self.groups = tables["producer_groups"]["name"].to_pylist()
        self._transactional = tables["producer_groups"]["transactional"].to_pylist()
        self._ordinals = {name: number for number, name in enumerate(self.groups)}
        self._rows.load(tables["sessions"])
        self._names = tables["sessions"]["instance"].to_pylist()
        groups = self._rows["group"].tolist()
        self._instances = {  # later rows win: they are the newer sessions
            (group, name): epoch
            for epoch, (group, name) in enumerate(zip(groups, self._names, strict=True), self._rows.first)
        }
