"""The history of one message in its consumer groups, read from the log.

The log records ranges of a queue, or of a lease, and a range may span messages that it does not hold. So the state of
the message is followed step by step for each group: a lease holds the message only if the message was free then, and
due, and had that attempt.

Reading begins when the message got its place, and ends as soon as its state for every group is that in the ledger; so a
message that was acknowledged early costs little in a log of any size. If a group was reset since, it may have had the
same state twice: everything is read. At most :data:`MOST_FRAMES` frames are read; the answer has the time reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import Code, Rejected
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.groups.groups import DISCARD
from escrowmq.ledger.groups.settling import RELEASED, UNSEEN
from escrowmq.log.seam import Frame
from escrowmq.schemas import Kind
from escrowmq.wire.actions.standing import AtGroup, Happened

MOST_FRAMES = 10_000  # frames that are read for one message: some tenths of a second
MOST_EVENTS = 1_000

_UNTOUCHED = ("waiting", "filtered", "skipped", "expired", "gone")


@dataclass(slots=True)
class Way:
    """The progress of a message in one group. ``stands``: its present state there."""

    name: str
    stands: AtGroup
    state: str = "waiting"
    lease: int | None = None
    deadline_us: int = NEVER_US
    attempt: int | None = 1  # of the lease that holds it, or of the next one; None: unknown
    due_us: int = 0
    dead_us: int = 0
    cause: str | None = None  # of its next failure, as reported by its consumer
    events: list[Happened] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Return whether the events read so far lead to the present state of the message in this group, so that no
        later event is searched."""
        now = self.stands
        if now["state"] != self.state:
            return now["state"] in _UNTOUCHED
        if self.state == "leased":
            return self.lease == now.get("lease")
        if self.state == "retrying":
            return self.due_us == now.get("due_us") and self.attempt in (None, now.get("attempt"))
        return self.state != "dead" or self.dead_us == now.get("dead_us")

    def undo_lease(self) -> None:
        """Remove the events of a lease that spanned the message but did not hold it: an ordered group passes over a
        message while an earlier one of its key is unfinished."""
        if self.state == "leased" and self.stands["ordered"]:
            self.state, self.lease = "retrying" if self.due_us else "waiting", None
            while self.events and self.events[-1]["event"] == "leased":
                self.events.pop()

    def note(self, frame: Frame, row: int, event: str, **more: Any) -> None:
        """Append an event of the message in this group, with the time and position of a row of ``frame``."""
        place: Any = {"group": self.name, "event": event, "time_us": frame.time_us, "position": frame.position + row}
        self.events.append(place | more)


def read_history(
    engine: Readable, queue_id: int, offset: int, placed_us: int, ways: dict[int, Way]
) -> tuple[list[Happened], int | None]:
    """Read from the log what happened to the message at an offset in each group. Returns the events, oldest first, and
    None if they are complete (reading ends at its present state in every group), otherwise the time (µs) up to which
    the log was read. ``placed_us``: when it got its offset. ``ways``: its progress by group number, which is
    updated."""
    reading = _Reading(queue_id, offset, ways)
    until_us: int | None = None
    log = engine.log
    start = max(log.position_at(placed_us), log.first_position)
    reading.all = log.holds(start, [Kind.GROUP_RESET])
    try:
        for count, frame in enumerate(log.frames_at(start, list(_TAKES), damaged=True)):
            if not reading.all and all(way.is_over for way in ways.values()):
                break
            if count == MOST_FRAMES or sum(len(way.events) for way in ways.values()) >= MOST_EVENTS:
                until_us = frame.time_us
                break
            if frame.damage is None:
                _TAKES[frame.kind](reading, frame)
    except Rejected as problem:
        if problem.code is not Code.RANGE_PURGED:  # by retention, while it was read
            raise
        until_us = placed_us
    for way in ways.values():
        if until_us is None and way.stands["state"] != "leased":
            way.undo_lease()
    events = [event for way in ways.values() for event in way.events]
    return sorted(events, key=lambda event: event["position"]), until_us


class _Reading:
    """The progress of one message in all groups, frame by frame."""

    def __init__(self, queue_id: int, offset: int, ways: dict[int, Way]) -> None:
        self.queue_id = queue_id
        self.offset = offset
        self.ways = ways
        self.all = False  # whether a group may have had its present state before

    def leased(self, frame: Frame) -> None:
        """Record new leases that hold the message. An ordered group has one lease of a queue at a time, so a new one
        ends the one before."""
        for _, earlier in self._named(frame, True):
            earlier.undo_lease()
        for row in self._spanning(frame, frame.batch.column("queue_id").to_numpy() == self.queue_id):
            lease, group, _, _, _, attempt, member, deadline_us = (
                column[row].as_py() for column in frame.batch.columns
            )
            way = self.ways.get(group)
            if way is None or way.state not in ("waiting", "retrying"):
                continue
            if not self.all and way.stands["state"] in _UNTOUCHED:
                continue
            if way.due_us > frame.time_us or way.attempt not in (None, attempt):
                continue
            way.state, way.lease, way.attempt, way.deadline_us = "leased", lease, attempt, deadline_us
            way.note(frame, row, "leased", attempt=attempt, lease=lease, member=member)

    def handed(self, frame: Frame) -> None:
        """Record that a lease of the message was handed to the next process of its member: a new lease id and
        attempt."""
        for row, way in self._find_held(frame, "old"):
            way.lease, way.attempt = (frame.batch.column(name)[row].as_py() for name in ("lease", "attempt"))
            way.note(frame, row, "leased", attempt=way.attempt, lease=way.lease)

    def extended(self, frame: Frame) -> None:
        """Note the new deadline of extended leases that hold the message."""
        for row, lease in enumerate(frame.batch.column("lease").to_pylist()):
            for way in self._of_lease(lease):
                way.deadline_us = frame.batch.column("deadline_us")[row].as_py()

    def acked(self, frame: Frame) -> None:
        """Record that groups acknowledged the message."""
        for row, way in self._find_held(frame, "lease"):
            way.note(frame, row, "acked", attempt=way.attempt, lease=way.lease)
            way.state, way.lease = "acked", None

    def failed(self, frame: Frame) -> None:
        """Note the reported cause of a failure, for the event of the failure itself, which follows."""
        for row, way in self._find_held(frame, "lease"):
            way.cause = frame.batch.column("cause")[row].as_py()

    def retried(self, frame: Frame) -> None:
        """Record that the message was released, or failed in a group: it was given back, or its lease expired."""
        for row, way in self._find_held(frame, "lease"):
            due_us = frame.batch.column("due_us")[row].as_py()
            more: dict[str, Any] = {"attempt": way.attempt, "lease": way.lease}
            if due_us in (RELEASED, UNSEEN):
                way.note(frame, row, "released", **more)
                way.due_us, way.attempt = frame.time_us, way.attempt if due_us == UNSEEN else None
            else:
                more |= {"due_us": due_us, "expired": frame.time_us >= way.deadline_us}
                way.note(frame, row, "failed", **more, **({} if way.cause is None else {"cause": way.cause}))
                way.due_us, way.attempt = due_us, None if way.attempt is None else way.attempt + 1
            way.state, way.lease, way.cause = "retrying", None, None

    def dead(self, frame: Frame) -> None:
        """Record that the message became a dead letter of a group."""
        for row, way in self._find_held(frame, "lease"):
            cause = frame.batch.column("cause")[row].as_py()
            way.note(frame, row, "dead", attempt=way.attempt, lease=way.lease, cause=cause)
            way.state, way.lease, way.dead_us = "dead", None, frame.time_us

    def dead_settled(self, frame: Frame) -> None:
        """Record that an operator retried or discarded the message as a dead letter."""
        for row, way in self._named(frame, frame.batch.column("offset").to_numpy() == self.offset):
            discarded = frame.batch.column("act")[row].as_py() == DISCARD
            way.note(frame, row, "discarded" if discarded else "retried")
            way.state, way.due_us, way.attempt = "discarded" if discarded else "retrying", frame.time_us, 1

    def edited(self, frame: Frame) -> None:
        """Record that an operator replaced the message, a dead letter of a group, by an edited one."""
        for row, way in self._named(frame, frame.batch.column("offset").to_numpy() == self.offset):
            way.note(frame, row, "edited", message_id=frame.batch.column("message_id")[row].as_py().hex())
            way.state, way.due_us, way.attempt = "retrying", frame.time_us, 1

    def reset(self, frame: Frame) -> None:
        """Record that an operator moved a group to another offset of the queue: the message waits again, or is
        skipped."""
        for row, way in self._named(frame, True):
            way.note(frame, row, "reset")
            if self.offset >= frame.batch.column("offset")[row].as_py():
                way.state, way.attempt, way.due_us = "waiting", None, 0
            elif way.state in ("waiting", "leased", "retrying"):
                way.state = "skipped"
            way.lease = None

    def _spanning(self, frame: Frame, among: Any) -> list[int]:
        start, count = frame.batch.column("start").to_numpy(), frame.batch.column("count").to_numpy()
        found: list[int] = np.flatnonzero(among & (start <= self.offset) & (self.offset < start + count)).tolist()
        return found

    def _named(self, frame: Frame, among: Any) -> list[tuple[int, Way]]:
        """Return the rows of a frame, of those in the mask ``among``, that name the queue of the message and a group
        whose progress is followed. Each comes with that progress."""
        groups = frame.batch.column("group").to_numpy()
        rows = np.flatnonzero(among & (frame.batch.column("queue_id").to_numpy() == self.queue_id)).tolist()
        return [(row, self.ways[group]) for row in rows if (group := int(groups[row])) in self.ways]

    def _find_held(self, frame: Frame, column: str) -> list[tuple[int, Way]]:
        """Return the rows of a frame that are about the message and name, in ``column``, a lease that holds it. Each
        comes with the progress in the group that has the lease."""
        leases = frame.batch.column(column).to_numpy()
        mine = [way.lease for way in self.ways.values() if way.lease is not None]
        rows = self._spanning(frame, np.isin(leases, mine)) if mine else []
        return [(row, way) for row in rows for way in self._of_lease(int(leases[row]))]

    def _of_lease(self, lease: int) -> list[Way]:
        return [way for way in self.ways.values() if way.lease == lease]


_TAKES: dict[Kind, Callable[[_Reading, Frame], None]] = {
    Kind.LEASED: _Reading.leased,
    Kind.HANDED: _Reading.handed,
    Kind.EXTENDED: _Reading.extended,
    Kind.ACKED: _Reading.acked,
    Kind.FAILED: _Reading.failed,
    Kind.RETRIED: _Reading.retried,
    Kind.DEAD: _Reading.dead,
    Kind.BURIED: _Reading.dead,
    Kind.DEAD_SETTLED: _Reading.dead_settled,
    Kind.EDITED: _Reading.edited,
    Kind.GROUP_RESET: _Reading.reset,
}
"""How each kind of frame is read."""
