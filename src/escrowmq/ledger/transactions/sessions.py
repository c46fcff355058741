"""Producer groups, sessions and fencing.

Rules:

1. Epochs count up from 1 over the whole shard; an epoch is never reused, nor is the number of a group.
2. Opening a session of a (group, instance) fences the previous one of the same pair: every later request under the
   older epoch fails (I7). A request may be repeated, late, or out of order, so it names its *process* by a random
   number. The process of the newest session gets that session again (which becomes transactional if requested now); a
   fenced process is rejected. Older clients send no number: each of their requests fences.
3. The first use of a group sets its kind: a transactional session makes it transactional, a plain message plain. From
   then on it serves no other kind of message (systems.md 1.10): plain messages of a transactional group and
   transactional sessions of a plain one are rejected. The group's own rules (``policies.py``) come before that, and
   ``mixed_groups`` lets every group without a kind of its own do both.
4. The time of the frame of each request of a session is its last use. Unused sessions are forgotten after a while
   (``writers.py``), and a group with its last session. A process that returns *resumes*: it gets a new session,
   unless a newer process has its name. A group with rules of its own stays until an operator removes the rules.
"""

from __future__ import annotations

from itertools import compress

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.arrays import Bools, Columns, Int64s, UInt8s, all_equal, locate
from escrowmq.ledger.commands import AlterProducers, OpenSession, ProducerRules, Rules
from escrowmq.ledger.events import Decision, Event, event_of_rows, rows_of
from escrowmq.ledger.transactions import policies
from escrowmq.ledger.transactions.policies import MIXED, PLAIN, TRANSACTIONAL, check_rules
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
        self.own: dict[int, ProducerRules] = {}  # the rules that groups have of their own
        self.transactional: set[int] = set()  # groups that had a transactional session
        self._plain: set[int] = set()  # groups that sent a plain message
        self._sizes: dict[int, int] = {}  # sessions of each group
        self._instances: dict[tuple[int, str], int] = {}  # the newest of each name, so none that is fenced
        self._rows = Columns(_COLUMNS)  # by epoch, rising
        self._names: dict[int, str] = {}  # instance of each epoch
        self._group_of: dict[int, int] = {}  # group of each epoch; unlike the columns, any thread may read it
        self._processes: dict[int, int] = {}  # of each epoch whose process said its number
        self._of_process: dict[tuple[int, str, int], int] = {}  # the epoch of a process, by group, instance and number

    def __len__(self) -> int:
        return len(self._rows)

    def ordinal(self, group: str) -> int | None:
        """Return the group's number; None if it does not exist."""
        return self._ordinals.get(group)

    def kind(self, ordinal: int, rules: Rules) -> str | None:
        """Return what a group (by number) serves: ``"plain"``, ``"transactional"``, ``"mixed"``; None: not known."""
        own = self.own.get(ordinal)
        if own is not None and own.kind is not None:
            return own.kind
        if rules.mixed_groups:
            return MIXED
        return TRANSACTIONAL if ordinal in self.transactional else PLAIN if ordinal in self._plain else None

    def instance(self, epoch: int) -> str | None:
        """Return the instance name of a session; None if it is forgotten."""
        return self._names.get(epoch)

    def group_number(self, epoch: int) -> int:
        """As :meth:`group`, from any thread."""
        return self._group_of.get(epoch, NO_GROUP)

    def group_name(self, epoch: int) -> str | None:
        """Return the name of a session's group; None if the session is forgotten. From any thread."""
        return self.groups.get(self.group_number(epoch))

    def groups_of(self, epochs: Int64s) -> Int64s:
        """Return the group number of the session of each epoch; ``NO_GROUP`` if the session is unknown."""
        if len(epochs) and all_equal(epochs):
            return np.full(len(epochs), self.group(int(epochs[0])), np.int64)
        rows, groups = self._rows_of(epochs), np.full(len(epochs), NO_GROUP, np.int64)
        groups[rows >= 0] = self._rows["group"][rows[rows >= 0]]
        return groups

    def of_group(self, ordinal: int) -> Int64s:
        """Return the epochs of a group's sessions, rising."""
        epochs: Int64s = self._rows["epoch"][self._rows["group"] == ordinal]
        return epochs

    def idle(self, before_us: int) -> Int64s:
        """Return the epochs of sessions last used before ``before_us``, rising."""
        epochs: Int64s = self._rows["epoch"][self._rows["used_us"] < before_us]
        return epochs

    def used_us(self) -> dict[int, int]:
        """Return the time (µs) of the last use of any session, by group number."""
        groups, row = np.unique(self._rows["group"], return_inverse=True)
        times = np.zeros(len(groups), np.int64)
        np.maximum.at(times, row, self._rows["used_us"])
        return dict(zip(groups.tolist(), times.tolist(), strict=True))

    def _row(self, epoch: int) -> int:
        """Return the row of the session with this epoch; -1 if there is none."""
        rows, size = self._rows, len(self._rows)
        if not size:
            return -1
        row: int = epoch - rows.item("epoch", 0)  # right unless one between was forgotten
        if 0 <= row < size and rows.item("epoch", row) == epoch:
            return row
        row = int(rows["epoch"].searchsorted(epoch))
        return row if row < size and rows.item("epoch", row) == epoch else -1

    def _rows_of(self, epochs: Int64s) -> Int64s:
        return locate(self._rows["epoch"], epochs)

    def check(self, epochs: Int64s, *, transactional: bool | None, rules: Rules) -> UInt8s:
        """Return a code for each row's session: OK, UNKNOWN_SESSION, FENCED or GROUP_KIND. Epoch 0 is no session: OK,
        or UNKNOWN_SESSION for half messages. ``transactional``: whether half messages are sent; None: no message is."""
        if len(epochs) and all_equal(epochs):
            status = self.status(int(epochs[0]), transactional=transactional, rules=rules)
            return np.full(len(epochs), status, np.uint8)
        unique, inverse = np.unique(epochs, return_inverse=True)
        codes = [self.status(epoch, transactional=transactional, rules=rules) for epoch in unique.tolist()]
        return np.array(codes, np.uint8)[inverse]

    def group_that_may(self, epoch: int, rules: Rules) -> int | None:
        """Return the group number of a producer session that may decide, else None."""
        if epoch == OPERATOR or self.status(epoch, transactional=None, rules=rules) != code.OK:
            return None
        return self.group(epoch)

    def group_of(self, epoch: int, rules: Rules, *, transactional: bool | None = None) -> int:
        """Return the group number of a session that may act; ``transactional`` as of :meth:`check`. Raises
        UNKNOWN_SESSION, FENCED, GROUP_KIND."""
        status = self.status(epoch, transactional=transactional, rules=rules)
        if epoch == OPERATOR or status != code.OK:
            raise error(Code.UNKNOWN_SESSION if epoch == OPERATOR else Code(status))
        return self.group(epoch)

    def status(self, epoch: int, *, transactional: bool | None, rules: Rules) -> int:
        """As :meth:`check`, of one session."""
        if epoch == OPERATOR:
            return code.UNKNOWN_SESSION if transactional else code.OK
        row = self._row(epoch)
        if row < 0:
            return code.UNKNOWN_SESSION
        if self._rows.item("fenced", row):
            return code.FENCED
        if transactional is None:
            return code.OK
        kind = self.kind(self._rows.item("group", row), rules)
        half_refused = kind == PLAIN or not self._rows.item("transactional", row)
        refused = half_refused if transactional else kind == TRANSACTIONAL
        return code.GROUP_KIND if refused else code.OK

    def group(self, epoch: int) -> int:
        """As :meth:`groups_of`, of one session."""
        row = self._row(epoch)
        return NO_GROUP if row < 0 else self._rows.item("group", row)

    def first_us(self, group: int, rules: Rules) -> int:
        """Return the time (µs) from the prepare of a group's transaction to its first check."""
        return check_rules(self.own.get(group), rules).first_us

    def fenced(self, epochs: Int64s) -> Bools:
        """Return which of these sessions a newer one of their instance has fenced."""
        rows, fenced = self._rows_of(epochs), np.zeros(len(epochs), bool)
        fenced[rows >= 0] = self._rows["fenced"][rows[rows >= 0]]
        return fenced

    def timeouts_us(self, epochs: Int64s, rules: Rules) -> Int64s | int:
        """As :meth:`first_us`, of sessions: one number for all, or each."""
        if not self.own:
            return rules.transaction_timeout_us
        groups, row = np.unique(self.groups_of(epochs), return_inverse=True)
        return np.array([self.first_us(group, rules) for group in groups.tolist()], np.int64)[row]

    def decide_open(self, command: OpenSession, rules: Rules) -> Decision:
        """Decide that a session is opened, and its group created with rules if given. A process that repeats its
        request gets its session again. Answer: the epoch. Raises BAD_GROUP_NAME, BAD_REQUEST, BAD_DELAY, TOO_MANY,
        NO_PERMISSION, FENCED, GROUP_RULES; GROUP_KIND for a transactional session of a plain group."""
        if len(command.instance.encode(errors="replace")) > 255 or not is_text(command.instance):
            raise error(Code.BAD_GROUP_NAME, "an instance name is text of at most 255 bytes")
        group = self._check_group(command.group, rules)
        if (again := self._find_opened(command, group, rules)) is not None:
            return again
        if len(self) >= rules.max_sessions:
            raise error(Code.TOO_MANY, f"there are {len(self)} producer sessions", "max_sessions, producer_expiration")
        made = self._choose_rules(command, group, rules)
        self._check_half(command, self.kind(group, rules) if made is None else made.kind, rules)
        if command.resume is not None and self._instances.get((group, command.instance), OPERATOR) > command.resume:
            raise error(Code.FENCED)
        events = [] if made is None else [_make_rules(command.group, made)]
        row = (self.next_epoch, command.group, command.instance, command.transactional)
        events.append(event_of_rows(Kind.SESSION, [row]))
        if command.process is not None:
            events.append(_make_owned(self.next_epoch, command.process, command.transactional))
        return Decision(tuple(events), self.next_epoch)

    def _check_group(self, name: str, rules: Rules) -> int:
        """Return a group's number; ``NO_GROUP`` if it may be created. Raises BAD_GROUP_NAME, TOO_MANY."""
        if not is_name(name):
            raise error(Code.BAD_GROUP_NAME, f"{name!r} is not a group name")
        if name not in self._ordinals and len(self.groups) >= rules.max_groups:
            raise error(Code.TOO_MANY, f"there are {len(self.groups)} producer groups", "max_groups")
        return self._ordinals.get(name, NO_GROUP)

    def _find_opened(self, command: OpenSession, group: int, rules: Rules) -> Decision | None:
        """Return a decision with the session that this process already has, or None. Raises FENCED if a newer process
        has its name; NO_PERMISSION, GROUP_KIND if the session cannot become transactional."""
        if command.process is None:
            return None
        if (epoch := self._of_process.get((group, command.instance, command.process))) is None:
            return None
        row = self._row(epoch)
        if self._rows.item("fenced", row):
            raise error(Code.FENCED)
        if self._rows.item("transactional", row) or not command.transactional:
            return Decision((), epoch)
        self._check_half(command, self.kind(group, rules), rules)
        return Decision((_make_owned(epoch, command.process, True),), epoch)

    def _check_half(self, command: OpenSession, kind: str | None, rules: Rules) -> None:
        """Raise NO_PERMISSION or GROUP_KIND for a transactional session where none is allowed."""
        if command.transactional and rules.reject_transactional:
            raise error(Code.NO_PERMISSION)
        if command.transactional and kind == PLAIN:
            hint = (
                "prepare under another producer group; should this one be transactional: "
                f"`escrowmq groups alter-producers {command.group} --kind transactional`"
            )
            raise error(Code.GROUP_KIND, f"producer group {command.group!r} serves plain messages", hint)

    def _choose_rules(self, command: OpenSession, group: int, rules: Rules) -> ProducerRules | None:
        """Return the rules that the command gives to a new group, or None. Raises GROUP_RULES if the group exists and
        has others, BAD_REQUEST or BAD_DELAY if they are invalid."""
        if command.rules is None:
            return None
        policies.check(command.rules, rules)
        if group == NO_GROUP:
            return command.rules
        have = policies.effective(self.own.get(group), rules, self.kind(group, rules))
        if wrong := policies.differences(command.rules, have):
            raise error(Code.GROUP_RULES, f"producer group {command.group!r} has {wrong}")
        return None

    # Rules of a group's own

    def decide_alter(self, command: AlterProducers, rules: Rules) -> Decision:
        """Decide that a group gets other rules of its own; the answer is all of them. No event if they stay the same.
        Raises BAD_GROUP_NAME, BAD_REQUEST, BAD_DELAY; TOO_MANY for a new group beyond the limit."""
        had = self.own.get(self._check_group(command.group, rules), ProducerRules())
        made = policies.alter(had, command)
        policies.check(made, rules)
        if made == had and "kind" not in command.reset:
            return Decision((), made)
        return Decision((_make_rules(command.group, made),), made)

    def apply_producers(self, batch: pa.RecordBatch) -> None:
        """Apply Kind.PRODUCERS: set own rules of groups. One that loses its own kind gets one by its next use."""
        for name, text in rows_of(batch):
            group, own = self._number(name), policies.load(text)
            if own.kind is None and self.own.get(group, own).kind is not None:
                self.transactional.discard(group)
                self._plain.discard(group)
            self.own[group] = own
            if own == ProducerRules():
                del self.own[group]
                if group not in self._sizes:
                    self._leave(group)

    def _number(self, name: str) -> int:
        """Return the number of a group, created if missing."""
        group = self._ordinals.setdefault(name, self._next_group)
        if group == self._next_group:
            self._next_group += 1
            self.groups[group] = name
        return group

    def _leave(self, group: int) -> None:
        del self._ordinals[self.groups.pop(group)]

    def apply_session(self, batch: pa.RecordBatch, time_us: int) -> None:
        for epoch, name, instance, transactional in rows_of(batch):
            group = self._number(name)
            if transactional:
                self.transactional.add(group)
            if (before := self._instances.get((group, instance))) is not None:
                self._rows.put("fenced", self._row(before), True)
            row = {"epoch": epoch, "group": group, "transactional": transactional, "used_us": time_us}
            self._rows.extend(1, fenced=False, **row)
            self._remember(epoch, group, instance)
            self.next_epoch = epoch + 1

    def apply_owned(self, batch: pa.RecordBatch, time_us: int) -> None:
        """Apply Kind.OWNED: note the process numbers of sessions, and which sessions became transactional."""
        for epoch, process, transactional in rows_of(batch):
            at = self._row(epoch)
            group = self._rows.item("group", at)
            self._rows.put("used_us", at, time_us)
            self._own(epoch, group, process)
            if transactional:
                self._rows.put("transactional", at, True)
                self.transactional.add(group)

    def _own(self, epoch: int, group: int, process: int) -> None:
        self._processes[epoch] = process
        self._of_process[group, self._names[epoch], process] = epoch

    def _remember(self, epoch: int, group: int, instance: str) -> None:
        self._instances[(group, instance)] = epoch
        self._names[epoch] = instance
        self._group_of[epoch] = group
        self._sizes[group] = self._sizes.get(group, 0) + 1

    def note(self, epochs: npt.NDArray[np.uint32], time_us: int) -> None:
        """Set the last use of these sessions to ``time_us``; ``OPERATOR`` among them is skipped."""
        distinct = epochs[:1] if all_equal(epochs) else epochs
        self._rows["used_us"][self._rows_of(distinct[distinct != OPERATOR].astype(np.int64))] = time_us

    def note_sent(self, epochs: npt.NDArray[np.uint32]) -> None:
        """Note that the groups of these sessions sent plain messages; ``OPERATOR`` among them is skipped."""
        for epoch in epochs[:1].tolist() if all_equal(epochs) else np.unique(epochs).tolist():
            if epoch != OPERATOR:
                self._plain.add(self.group(epoch))

    def note_one(self, epoch: int, time_us: int, *, sent: bool = False) -> None:
        """As :meth:`note` and, if it sent plain messages, :meth:`note_sent`, of one session that is known."""
        row = self._row(epoch)
        self._rows.put("used_us", row, time_us)
        if sent:
            self._plain.add(self._rows.item("group", row))

    def forget(self, epochs: Int64s) -> list[int]:
        """Remove sessions. Returns the groups that lost their last one; those without own rules are removed."""
        rows = self._rows_of(epochs)
        for epoch, group in zip(epochs.tolist(), self._rows["group"][rows].tolist(), strict=True):
            instance = self._names.pop(epoch)
            del self._group_of[epoch]
            if self._instances.get((group, instance)) == epoch:
                del self._instances[(group, instance)]
            if (process := self._processes.pop(epoch, None)) is not None:
                del self._of_process[group, instance, process]
            self._sizes[group] -= 1
        old, self._rows = self._rows, Columns(_COLUMNS)
        kept = {name: np.delete(old[name], rows) for name in _COLUMNS}
        self._rows.extend(len(kept["epoch"]), **kept)
        gone = [group for group, size in self._sizes.items() if not size]
        for group in gone:
            del self._sizes[group]
            self.transactional.discard(group)
            self._plain.discard(group)
            if group not in self.own:
                self._leave(group)
        return gone

    def snapshot(self) -> dict[str, pa.Table]:
        rules = [policies.dump(self.own[group]) if group in self.own else None for group in self.groups]
        groups = {
            "name": pa.array(self.groups.values(), pa.utf8()),
            "transactional": pa.array([group in self.transactional for group in self.groups], pa.bool_()),
            "ordinal": pa.array(self.groups, pa.int64()),
            "plain": pa.array([group in self._plain for group in self.groups], pa.bool_()),
            "rules": pa.array(rules, pa.utf8()),
        }
        rows = self._rows.to_table().append_column("instance", pa.array(self._names.values(), pa.utf8()))
        processes = [self._processes.get(epoch) for epoch in self._names]
        rows = rows.append_column("process", pa.array(processes, pa.int64()))
        next_ones = {"next_epoch": str(self.next_epoch), "next_group": str(self._next_group)}
        return {"producer_groups": pa.table(groups), "sessions": rows.replace_schema_metadata(next_ones)}

    def restore(self, tables: dict[str, pa.Table], time_us: int) -> None:
        """Restore :meth:`snapshot`. Format 1 had every session, without its last use: it becomes ``time_us``, the time
        of the snapshot. Before format 3 senders of plain messages were not noted: they are all groups that are not
        transactional, for their sessions were opened to send."""
        groups, sessions = tables["producer_groups"].to_pydict(), tables["sessions"]
        names, transactional = groups["name"], groups["transactional"]
        metadata = sessions.schema.metadata
        if "epoch" not in sessions.column_names:
            first, size = int(metadata[b"first"]), sessions.num_rows
            sessions = sessions.append_column("epoch", pa.array(np.arange(first, first + size)))
            sessions = sessions.append_column("used_us", pa.array(np.full(size, time_us)))
            metadata = {b"next_epoch": first + size, b"next_group": len(names)}
        self.next_epoch, self._next_group = int(metadata[b"next_epoch"]), int(metadata[b"next_group"])
        ordinals = groups.get("ordinal", range(len(names)))
        self.groups = dict(zip(ordinals, names, strict=True))
        self._ordinals = dict(zip(names, ordinals, strict=True))
        plain = groups.get("plain", [not is_one for is_one in transactional])
        self.transactional, self._plain = ({*compress(ordinals, kinds)} for kinds in (transactional, plain))
        rules = groups.get("rules", [None] * len(names))
        self.own = {n: policies.load(text) for n, text in zip(ordinals, rules, strict=True) if text is not None}
        self._rows.load(sessions)
        listed = sessions.to_pydict()
        processes = listed.get("process", [None] * len(sessions))  # absent before processes had numbers
        columns = (listed[name] for name in ("epoch", "group", "instance", "fenced"))
        for epoch, group, instance, fenced, process in zip(*columns, processes, strict=True):
            self._remember(epoch, group, instance)
            if fenced:
                del self._instances[(group, instance)]
            if process is not None:
                self._own(epoch, group, process)


def _make_owned(epoch: int, process: int, transactional: bool) -> Event:
    return event_of_rows(Kind.OWNED, [(epoch, process, transactional)])


def _make_rules(group: str, own: ProducerRules) -> Event:
    return event_of_rows(Kind.PRODUCERS, [(group, policies.dump(own))])
