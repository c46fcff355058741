"""Producer groups, sessions and fencing.

Rules:

1. Epochs count up from 1 over the whole shard; an epoch is never given twice, nor is the number of a group.
2. Opening a session of a (group, instance) fences the session of the same pair before it: from then on every act under
   the older epoch is refused (I7). A request may be repeated, come late, or after a later one; so it names its
   *process* by a random number. One of the process that has the newest session is given that session again (it becomes
   transactional, if that is asked now), one of a process that was fenced is refused. Older clients send no number: each
   of their requests fences.
3. What a group does first says its kind: a transactional session makes it transactional, a plain message plain. From
   then on it serves no other kind of message (systems.md 1.10), and it is the other kind that is refused: a plain
   message of a transactional group, a transactional session of a plain one. The group's own rules come before that
   (``policies.py``), and ``mixed_groups`` lets every group without a kind of its own do both.
4. Every act of a session says when it was used last, by the time of its frame. What is not used is forgotten after a
   while (``forgetting.py``), and a group with its last session. A process that comes back *resumes*: it gets a new
   session, unless a newer process has its name. A group that has rules of its own stays, without sessions, until a
   person takes them away.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.arrays import Bools, Columns, Int64s, UInt8s, all_equal, locate
from escrowmq.ledger.commands import AlterProducers, OpenSession, ProducerRules, Rules
from escrowmq.ledger.events import Decision, Event, event_of_rows
from escrowmq.ledger.transactions import policies
from escrowmq.ledger.transactions.policies import MIXED, PLAIN, TRANSACTIONAL
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
        self.own: dict[int, ProducerRules] = {}
        """The rules that groups have of their own."""
        self._transactional: set[int] = set()  # groups that had a transactional session
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

    # Finding

    def ordinal(self, group: str) -> int | None:
        """Return the group's number; None if it has no session."""
        return self._ordinals.get(group)

    def is_transactional(self, ordinal: int) -> bool:
        """Return whether the group has had a transactional session."""
        return ordinal in self._transactional

    def kind(self, ordinal: int, rules: Rules) -> str | None:
        """Return which messages a group serves: ``"plain"``, ``"transactional"`` or ``"mixed"``; None: it has done
        neither yet."""
        own = self.own.get(ordinal)
        if own is not None and own.kind is not None:
            return own.kind
        if rules.mixed_groups:
            return MIXED
        if ordinal in self._transactional:
            return TRANSACTIONAL
        return PLAIN if ordinal in self._plain else None

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
        """Return the group number of each epoch; ``NO_GROUP`` where it is not known."""
        if len(epochs) and all_equal(epochs):
            row = self._row(int(epochs[0]))
            return np.full(len(epochs), NO_GROUP if row < 0 else self._rows["group"][row], np.int64)
        rows = self._rows_of(epochs)
        known = rows >= 0
        groups = np.full(len(epochs), NO_GROUP, np.int64)
        groups[known] = self._rows["group"][rows[known]]
        return groups

    def of_group(self, ordinal: int) -> Int64s:
        """Return the epochs of a group, rising."""
        epochs: Int64s = self._rows["epoch"][self._rows["group"] == ordinal]
        return epochs

    def idle(self, before_us: int) -> Int64s:
        """Return the epochs that were used last before that time, rising."""
        epochs: Int64s = self._rows["epoch"][self._rows["used_us"] < before_us]
        return epochs

    def used_us(self) -> dict[int, int]:
        """Return when the sessions of each group did something last."""
        groups, row = np.unique(self._rows["group"], return_inverse=True)
        times = np.zeros(len(groups), np.int64)
        np.maximum.at(times, row, self._rows["used_us"])
        return dict(zip(groups.tolist(), times.tolist(), strict=True))

    def _row(self, epoch: int) -> int:
        """Return the row of an epoch; -1 if there is none."""
        rows = self._rows
        size = len(rows)
        if not size:
            return -1
        row: int = epoch - rows.item("epoch", 0)  # right while none between was forgotten
        if 0 <= row < size and rows.item("epoch", row) == epoch:
            return row
        epochs = rows["epoch"]
        row = int(epochs.searchsorted(epoch))
        return row if row < size and epochs.item(row) == epoch else -1

    def _rows_of(self, epochs: Int64s) -> Int64s:
        return locate(self._rows["epoch"], epochs)

    # What they may do

    def check(self, epochs: Int64s, *, transactional: bool | None, rules: Rules) -> UInt8s:
        """Check what each row's session may do: OK, UNKNOWN_SESSION, FENCED or GROUP_KIND. Epoch 0 stands for no
        session.

        ``transactional``: the kind of message that is sent, None when none is.
        """
        if len(epochs) and all_equal(epochs):
            return np.full(len(epochs), self._check_one(int(epochs[0]), transactional, rules), np.uint8)
        unique, inverse = np.unique(epochs, return_inverse=True)
        codes = [self._check_one(int(epoch), transactional, rules) for epoch in unique]
        return np.array(codes, np.uint8)[inverse]

    def group_that_may(self, epoch: int, rules: Rules) -> int | None:
        """Return the group number of a producer session that may decide; None of any other."""
        if epoch == OPERATOR or self.status(epoch, transactional=None, rules=rules) != code.OK:
            return None
        return self.group(epoch)

    def group_of(self, epoch: int, rules: Rules, *, transactional: bool | None = None) -> int:
        """Return the group number of one session that may act. Raises UNKNOWN_SESSION, FENCED, GROUP_KIND."""
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
        if self._rows.item("fenced", row):
            return code.FENCED
        if transactional is None:
            return code.OK
        kind = self.kind(self._rows.item("group", row), rules)
        half_refused = kind == PLAIN or not self._rows.item("transactional", row)
        refused = half_refused if transactional else kind == TRANSACTIONAL
        return code.GROUP_KIND if refused else code.OK

    def status(self, epoch: int, *, transactional: bool | None, rules: Rules) -> int:
        """As :meth:`check`, of one session."""
        return self._check_one(epoch, transactional, rules)

    def group(self, epoch: int) -> int:
        """As :meth:`groups_of`, of one session."""
        row = self._row(epoch)
        return NO_GROUP if row < 0 else self._rows.item("group", row)

    def first_us(self, group: int, rules: Rules) -> int:
        """Return how long the transactions of a group wait for their first question."""
        own = self.own.get(group)
        return rules.transaction_timeout_us if own is None else policies.asking(own, rules).first_us

    def fenced(self, epochs: Int64s) -> Bools:
        """Return which of these sessions a newer one of their instance has taken over."""
        rows = self._rows_of(epochs)
        if not len(rows) or not len(self._rows["fenced"]):
            return np.zeros(len(rows), bool)
        return np.asarray((rows >= 0) & self._rows["fenced"][rows].astype(bool))

    def timeouts_us(self, epochs: Int64s, rules: Rules) -> Int64s | int:
        """Return the time before the first check of these sessions' transactions: one number for all, or each."""
        if not self.own:
            return rules.transaction_timeout_us
        groups, row = np.unique(self.groups_of(epochs), return_inverse=True)
        times = [policies.asking(self.own.get(group), rules).first_us for group in groups.tolist()]
        return np.array(times, np.int64)[row]

    # Opening

    def decide_open(self, command: OpenSession, rules: Rules) -> Decision:
        """Return a new session, and before it the rules of a group that is made with some. A transactional one in a
        plain group is
        refused; a plain one in a transactional group only when it sends."""
        if not is_name(command.group):
            raise error(Code.BAD_GROUP_NAME, f"{command.group!r} is not a group name")
        if len(command.instance.encode(errors="replace")) > 255 or not is_text(command.instance):
            raise error(Code.BAD_GROUP_NAME, "an instance name is text of at most 255 bytes")
        if (again := self._find_opened(command, rules)) is not None:
            return again
        if command.group not in self._ordinals and len(self.groups) >= rules.max_groups:
            raise error(Code.TOO_MANY, f"there are {len(self.groups)} producer groups", "max_groups")
        if len(self) >= rules.max_sessions:
            raise error(Code.TOO_MANY, f"there are {len(self)} producer sessions", "max_sessions, producer_expiration")
        made = self._choose_rules(command, rules)
        kind = made.kind if made is not None else self.kind(self._ordinals.get(command.group, NO_GROUP), rules)
        self._check_half(command, kind, rules)
        newest = self._instances.get((self._ordinals.get(command.group, NO_GROUP), command.instance), OPERATOR)
        if command.resume is not None and newest > command.resume:
            raise error(Code.FENCED)
        events = [] if made is None else [self._alter(command.group, made)]
        row = (self.next_epoch, command.group, command.instance, command.transactional)
        events.append(event_of_rows(Kind.SESSION, [row]))
        if command.process is not None:
            events.append(_make_owned(self.next_epoch, command.process, command.transactional))
        return Decision(tuple(events), self.next_epoch)

    def _find_opened(self, command: OpenSession, rules: Rules) -> Decision | None:
        """Return the answer to a process that has a session of this name already; None if it has none. FENCED: a newer
        process has the
        name. NO_PERMISSION, GROUP_KIND: its session cannot become transactional."""
        group = self._ordinals.get(command.group, NO_GROUP)
        if command.process is None:
            return None
        epoch = self._of_process.get((group, command.instance, command.process))
        if epoch is None:
            return None
        row = self._row(epoch)
        if self._rows.item("fenced", row):
            raise error(Code.FENCED)
        if self._rows.item("transactional", row) or not command.transactional:
            return Decision((), epoch)
        self._check_half(command, self.kind(group, rules), rules)
        return Decision((_make_owned(epoch, command.process, True),), epoch)

    def _check_half(self, command: OpenSession, kind: str | None, rules: Rules) -> None:
        """Refuse a transactional session where there can be none: NO_PERMISSION, GROUP_KIND."""
        if command.transactional and rules.reject_transactional:
            raise error(Code.NO_PERMISSION)
        if command.transactional and kind == PLAIN:
            raise error(
                Code.GROUP_KIND,
                f"producer group {command.group!r} serves plain messages",
                "prepare under another producer group; should this one be transactional: "
                f"`escrowmq groups alter-producers {command.group} --kind transactional`",
            )

    def _choose_rules(self, command: OpenSession, rules: Rules) -> ProducerRules | None:
        """Return the rules that a new group is made with. One that exists must have them: GROUP_RULES."""
        if command.rules is None:
            return None
        policies.check(command.rules, rules)
        ordinal = self._ordinals.get(command.group)
        if ordinal is None:
            return command.rules
        have = policies.effective(self.own.get(ordinal), rules, self.kind(ordinal, rules))
        if wrong := policies.differences(command.rules, have):
            raise error(Code.GROUP_RULES, f"producer group {command.group!r} has {wrong}")
        return None

    # Rules of a group's own

    def decide_alter(self, command: AlterProducers, rules: Rules) -> Decision:
        """Give a group rules of its own. BAD_GROUP_NAME, BAD_REQUEST, BAD_DELAY; TOO_MANY for one too many groups."""
        if not is_name(command.group):
            raise error(Code.BAD_GROUP_NAME, f"{command.group!r} is not a group name")
        ordinal = self._ordinals.get(command.group)
        if ordinal is None and len(self.groups) >= rules.max_groups:
            raise error(Code.TOO_MANY, f"there are {len(self.groups)} producer groups", "max_groups")
        had = ProducerRules() if ordinal is None else self.own.get(ordinal, ProducerRules())
        made = policies.altered(had, command)
        policies.check(made, rules)
        if made == had and "kind" not in command.reset:
            return Decision((), made)
        return Decision((self._alter(command.group, made),), made)

    def _alter(self, group: str, own: ProducerRules) -> Event:
        return event_of_rows(Kind.PRODUCERS, [(group, policies.dump(own))])

    def apply_producers(self, batch: pa.RecordBatch) -> None:
        """Kind.PRODUCERS. A group without a kind of its own begins anew: what it does next says what it is."""
        for row in batch.to_pylist():
            group, own = self._number(row["group"]), policies.load(row["rules"])
            if own.kind is None and self.own.get(group, own).kind is not None:
                self._transactional.discard(group)
                self._plain.discard(group)
            self.own[group] = own
            if own == ProducerRules():
                del self.own[group]
                if group not in self._sizes:
                    self._leave(group)

    def _number(self, name: str) -> int:
        """Return the number of a group, made if it does not exist."""
        group = self._ordinals.setdefault(name, self._next_group)
        if group == self._next_group:
            self._next_group += 1
            self.groups[group] = name
        return group

    def _leave(self, group: int) -> None:
        del self._ordinals[self.groups.pop(group)]

    def apply_session(self, batch: pa.RecordBatch, time_us: int) -> None:
        for row in batch.to_pylist():
            group = self._number(row["group"])
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

    def apply_owned(self, batch: pa.RecordBatch, time_us: int) -> None:
        """Kind.OWNED: the processes of sessions, and whether they prepare."""
        for row in batch.to_pylist():
            epoch, at = row["epoch"], self._row(row["epoch"])
            self._rows.put("used_us", at, time_us)
            self._own(epoch, self._rows.item("group", at), row["process"])
            if row["transactional"]:
                self._rows.put("transactional", at, True)
                self._transactional.add(self._rows.item("group", at))

    def _own(self, epoch: int, group: int, process: int) -> None:
        self._processes[epoch] = process
        self._of_process[group, self._names[epoch], process] = epoch

    def _remember(self, epoch: int, group: int, instance: str) -> None:
        self._instances[(group, instance)] = epoch
        self._names[epoch] = instance
        self._group_of[epoch] = group
        self._sizes[group] = self._sizes.get(group, 0) + 1

    # Using and forgetting

    def note(self, epochs: npt.NDArray[np.uint32], time_us: int) -> None:
        """Note that these sessions (``OPERATOR`` among them) did something."""
        if all_equal(epochs):
            if len(epochs) and epochs[0] != OPERATOR:
                self._rows["used_us"][self._row(int(epochs[0]))] = time_us
            return
        self._rows["used_us"][self._rows_of(epochs[epochs != OPERATOR].astype(np.int64))] = time_us

    def sent(self, epochs: npt.NDArray[np.uint32]) -> None:
        """Note that these sessions (``OPERATOR`` among them) sent plain messages."""
        for epoch in epochs[:1].tolist() if all_equal(epochs) else np.unique(epochs).tolist():
            if epoch != OPERATOR:
                self._plain.add(int(self._rows["group"][self._row(epoch)]))

    def note_one(self, epoch: int, time_us: int, *, sent: bool = False) -> None:
        """As :meth:`note` and, if it sent plain messages, :meth:`sent`, of one session that is known."""
        row = self._row(epoch)
        self._rows.put("used_us", row, time_us)
        if sent:
            self._plain.add(self._rows.item("group", row))

    def forget(self, epochs: Int64s) -> list[int]:
        """Remove sessions. Returns the groups that lost their last one, and have no rules of their own."""
        rows = self._rows_of(epochs)
        gone = []
        for epoch, group in zip(epochs.tolist(), self._rows["group"][rows].tolist(), strict=True):
            instance = self._names.pop(epoch)
            del self._group_of[epoch]
            if self._instances.get((group, instance)) == epoch:
                del self._instances[(group, instance)]
            if (process := self._processes.pop(epoch, None)) is not None:
                del self._of_process[group, instance, process]
            self._sizes[group] -= 1
            if not self._sizes[group]:
                gone.append(group)
        self._drop(rows)
        for group in gone:
            del self._sizes[group]
            self._transactional.discard(group)
            self._plain.discard(group)
            if group not in self.own:
                self._leave(group)
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
            "plain": pa.array([group in self._plain for group in self.groups], pa.bool_()),
            "rules": pa.array([self._own_text(group) for group in self.groups], pa.utf8()),
        }
        rows = self._rows.to_table().append_column("instance", pa.array(self._names.values(), pa.utf8()))
        processes = [self._processes.get(epoch) for epoch in self._names]
        rows = rows.append_column("process", pa.array(processes, pa.int64()))
        next_ones = {"next_epoch": str(self.next_epoch), "next_group": str(self._next_group)}
        return {"producer_groups": pa.table(groups), "sessions": rows.replace_schema_metadata(next_ones)}

    def _own_text(self, group: int) -> str | None:
        return policies.dump(self.own[group]) if group in self.own else None

    def restore(self, tables: dict[str, pa.Table], time_us: int) -> None:
        """Become what :meth:`snapshot` gave. Those of format 1 held every session, and not when it was used: let that
        be ``time_us``, the time of the snapshot. Before format 3 nobody noted who sent plain messages: let it be every
        group that is not transactional, for its sessions were opened to send."""
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
        transactional = groups["transactional"].to_pylist()
        self._transactional = {n for n, is_one in zip(ordinals, transactional, strict=True) if is_one}
        if "plain" in groups.column_names:
            plain, own = groups["plain"].to_pylist(), groups["rules"].to_pylist()
            self.own = {n: policies.load(text) for n, text in zip(ordinals, own, strict=True) if text is not None}
        else:
            plain = [not is_one for is_one in transactional]
        self._plain = {n for n, is_one in zip(ordinals, plain, strict=True) if is_one}
        self._rows.load(sessions)
        columns = (sessions[name].to_pylist() for name in ("epoch", "group", "instance", "fenced"))
        for epoch, group, instance, fenced in zip(*columns, strict=True):
            self._remember(epoch, group, instance)
            if fenced:
                del self._instances[(group, instance)]
        if "process" in sessions.column_names:  # not in those of before processes had numbers
            owners = (sessions[name].to_pylist() for name in ("epoch", "group", "process"))
            for epoch, group, process in zip(*owners, strict=True):
                if process is not None:
                    self._own(epoch, group, process)


def _make_owned(epoch: int, process: int, transactional: bool) -> Event:
    return event_of_rows(Kind.OWNED, [(epoch, process, transactional)])
