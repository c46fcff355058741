"""Named members (``in_doubt="hold"``): their epochs, and leases of unknown outcome handed to a restarted member.

Theory of operation:

1. Leases of such a group do not end by time. What a silent member was handed is given to no other member: its effect
   may be done, or about to be.
2. Members have names. JOINED begins a new *epoch* of a member (its position is the epoch); an older one may receive no
   more (FENCED). All that the member held is then *in doubt*: its old process can settle it no more (LEASE_LOST), and
   it is handed to the new one first, as HANDED: a new lease, one attempt later; after the last attempt it is a dead
   letter.
3. A process that merely lost answers (its broker restarted, the connection broke) joins again and names the leases that
   reached it, with how far: KEPT, they are not in doubt. So nothing that was lost on the way stays leased to a process
   that does not have it.
4. FENCED gives everything a member holds back to the group at once, each as a failed attempt, and ends its epoch.

In an ordered group what is in doubt in a queue is handed out when the member has settled what it got of it before, and
all of a lease at once, even if that is more than was asked for: a rest could be overtaken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Join, Receive, Rules
from escrowmq.ledger.events import Event, event_of, event_of_rows
from escrowmq.ledger.groups.cursors import NOT_LEASED, PENDING, Lease, pending_runs
from escrowmq.ledger.groups.group import Group, Member
from escrowmq.ledger.groups.receiving import Piece, Plan
from escrowmq.ledger.groups.subscriptions import holds
from escrowmq.ledger.queues.topics import Topics
from escrowmq.message.names import is_name
from escrowmq.model import member_id
from escrowmq.schemas import Kind


def decide_join(group: Group, cmd: Join, rules: Rules, position: int) -> tuple[tuple[Event, ...], dict[str, int]]:
    """Events and answer. BAD_REQUEST for a bad name or a group without members, TOO_MANY; FENCED for a ``resume`` after
    another process, or an operator, took the member over."""
    if not holds(group.subscription):
        hint = 'only groups with in_doubt="hold" have named members'
        raise error(Code.BAD_REQUEST, f"consumer group {group.name!r} gives back what is in doubt", hint)
    if not is_name(cmd.instance):
        raise error(Code.BAD_REQUEST, f"{cmd.instance!r} is not a member's name", "1 to 127 of A-Z a-z 0-9 . _ -")
    id = member_id(group.name, cmd.instance)
    known = group.members.get(id)
    if known is not None and known.name != cmd.instance:
        raise error(Code.BAD_REQUEST, f"{cmd.instance!r} and {known.name!r} have the same number", "use another name")
    if known is None and len(group.members) >= rules.max_leases:
        raise error(Code.TOO_MANY, f"the group has {len(group.members)} members", "max_leases")
    if cmd.resume and (known is None or known.fenced or known.process != cmd.process):
        raise _make_fenced(group, cmd.instance, fenced=known is not None and known.fenced)
    joined = event_of(Kind.JOINED, [position], [group.ordinal], [id], [cmd.process], [cmd.instance])
    reached = dict(cmd.keep)
    ends = ((x, min(reached.get(x.id, 0), x.doubt)) for x in group.leases_of(id))
    kept = [(lease.id, end) for lease, end in ends if end > lease.start]
    events = (joined, event_of_rows(Kind.KEPT, kept)) if kept else (joined,)
    return events, {"member": id, "epoch": position}


def member_of(group: Group, cmd: Receive) -> Member:
    """Return the member that receives. BAD_REQUEST if it never joined, FENCED if it is not its newest epoch."""
    member = group.members.get(cmd.member)
    if member is None or cmd.epoch is None:
        hint = 'give bus.consumer(..., instance="NAME", in_doubt="hold")'
        raise error(Code.BAD_REQUEST, f"members of consumer group {group.name!r} have names and join it", hint)
    if cmd.epoch != member.epoch:
        raise _make_fenced(group, member.name, fenced=member.fenced)
    return member


def _make_fenced(group: Group, name: str, *, fenced: bool) -> EscrowError:
    why = "was fenced" if fenced else "has a newer process"
    hint = f"what it held is with the {'group' if fenced else 'newer one'}; stop this process"
    return error(Code.FENCED, f"member {name!r} of consumer group {group.name!r} {why}", hint)


@dataclass(slots=True)
class Handing:
    """Redelivery to a member: rows of a HANDED event, what they hold, and what had its last attempt."""

    dead: list[tuple[int, int, int, str]] = field(default_factory=list)
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)  # old lease, start, count, attempt
    held: list[tuple[int, Int64s, Int64s]] = field(default_factory=list)  # queue id, offsets, positions: one a row

    def events(self, position: int) -> list[Event]:
        """DEAD, then HANDED, the first row standing at ``position``."""
        events = [event_of_rows(Kind.DEAD, self.dead)] if self.dead else []
        if self.rows:
            olds, starts, counts, attempts = zip(*self.rows, strict=True)
            ids = range(position + len(self.dead), position + len(self.dead) + len(self.rows))
            events.append(event_of(Kind.HANDED, ids, olds, starts, counts, attempts))
        return events

    def pieces(self, position: int) -> list[Piece]:
        """Return the content of the rows; the first event's first row gets ``position``."""
        first = position + len(self.dead)
        return [
            Piece(first + number, queue_id, row[3], offsets, positions)
            for number, (row, (queue_id, offsets, positions)) in enumerate(zip(self.rows, self.held, strict=True))
        ]


def in_doubt(group: Group, member: Member, topics: Topics) -> list[Lease]:
    """Return the leases with something in doubt of ``member`` that may be handed out, oldest first."""
    found = sorted(member.doubted.values(), key=lambda lease: lease.id)
    if not group.paused:
        return found
    return [lease for lease in found if not group.is_paused(topics.queues[lease.cursor.queue_id].place.topic)]


def hand_over(plan: Plan, group: Group, member: Member, topics: Topics, max_attempts: int) -> Handing:
    """Hand over what is in doubt of ``member``, up to the plan's bounds, which it lowers (in order: to the end of a
    lease)."""
    handing, ordered = Handing(), group.subscription.ordered
    for lease in in_doubt(group, member, topics):
        if plan.budget <= 0:
            break
        if ordered and _is_busy(lease):
            continue
        first = max(lease.doubt - lease.start, 0)
        offsets = np.flatnonzero(np.frombuffer(lease.copy_mask(), np.uint8)[first:] == PENDING) + first + lease.start
        attempt = lease.attempt + 1
        left = lease.pending
        if attempt > max_attempts:
            failed, attempt = (1 if ordered else len(offsets)), lease.attempt
            handing.dead += _dead(lease, int(offsets[0]), int(offsets[failed - 1]) + 1, max_attempts)
            offsets, left = offsets[failed:], left - failed
            plan.room += not left
        chosen = offsets if ordered else offsets[: plan.budget]
        stays = left > len(chosen)
        if len(chosen) and (plan.room > 0 or not stays):
            _hand(handing, plan, lease, chosen, attempt, topics)
            plan.room -= stays
    return handing


def _hand(handing: Handing, plan: Plan, lease: Lease, chosen: Int64s, attempt: int, topics: Topics) -> None:
    start, end = int(chosen[0]), int(chosen[-1]) + 1
    queue_id = lease.cursor.queue_id
    handing.rows.append((lease.id, start, end - start, attempt))
    positions = topics.queues[queue_id].positions(start, end)[chosen - start]
    handing.held.append((queue_id, chosen, lease.cursor.edited.instead(chosen, positions)))
    plan.budget -= len(chosen)


def _is_busy(lease: Lease) -> bool:
    """Return whether a message of the lease's queue is being worked on, so that in order nothing may follow yet."""
    working = (x.pending - x.pending_from(x.doubt) for x in lease.cursor.leases.values())
    return any(working)


def _dead(lease: Lease, start: int, end: int, max_attempts: int) -> list[tuple[int, int, int, str]]:
    cause = f"in doubt when its consumer came back, attempt {lease.attempt} of {max_attempts}"
    runs = pending_runs(lease.copy_mask(), start - lease.start, end - lease.start)
    return [(lease.id, lease.start + a, b - a, cause) for a, b in runs]


def describe(group: Group, topics: Topics) -> list[dict[str, Any]]:
    """List what each member holds: ``member, leases, messages, in_doubt`` (messages), ``held`` (one dict per lease,
    oldest first: ``lease, topic, queue, first, last`` offset, ``messages, in_doubt, attempt``, ``deadline_us`` or
    None); of named members also ``instance, epoch, fenced, joined_us``."""
    found: dict[int, list[Lease]] = {member: [] for member in group.members}
    for cursor in group.cursors.values():
        for lease in cursor.leases.values():
            found.setdefault(lease.member, []).append(lease)
    listed = []
    for id, leases in found.items():
        member = group.members.get(id)
        held = [_describe_lease(lease, topics) for lease in sorted(leases, key=lambda lease: lease.id)]
        listed.append(
            {
                "member": id,
                "instance": member.name if member else None,
                "epoch": member.epoch if member else None,
                "fenced": member.fenced if member else None,
                "joined_us": member.joined_us if member else None,
                "leases": len(held),
                "messages": sum(line["messages"] for line in held),
                "in_doubt": sum(line["in_doubt"] for line in held),
                "held": held,
            }
        )
    return listed


def _describe_lease(lease: Lease, topics: Topics) -> dict[str, Any]:
    place = topics.queues[lease.cursor.queue_id].place
    pending = np.flatnonzero(np.frombuffer(lease.copy_mask(), np.uint8) == PENDING) + lease.start
    return {
        "lease": lease.id,
        "topic": place.topic,
        "queue": place.queue,
        "first": int(pending[0]),
        "last": int(pending[-1]),
        "messages": lease.pending,
        "in_doubt": lease.pending_from(lease.doubt),
        "attempt": lease.attempt,
        "deadline_us": None if lease.deadline_us == NEVER_US else lease.deadline_us,
    }


def unreached(group: Group, expired: Sequence[Lease], attempts: int) -> list[Lease]:
    """Return the leases of rule 2, as ``expired`` end; those among them that end now, and others."""
    over = {lease.id for lease in expired}
    found: list[Lease] = []
    for leases in _by_member(group, {lease.member for lease in expired}).values():
        if all(lease.attempt < attempts for lease in leases):
            continue
        before: set[int] = set()  # deadlines of what the member was given before
        ended: set[int] = set()  # and of those of them that end now
        for lease in leases:
            if lease.attempt >= attempts and _is_untouched(lease):
                earlier = before if lease.id in over else ended
                if earlier - {lease.deadline_us}:
                    found.append(lease)
            before.add(lease.deadline_us)
            if lease.id in over:
                ended.add(lease.deadline_us)
    return found


def _by_member(group: Group, members: set[int]) -> dict[int, list[Lease]]:
    """Return the live leases of these members, oldest first."""
    held: dict[int, list[Lease]] = {}
    for cursor in group.cursors.values():
        for lease in cursor.leases.values():
            if lease.member in members:
                held.setdefault(lease.member, []).append(lease)
    for leases in held.values():
        leases.sort(key=lambda lease: lease.id)
    return held


def _is_untouched(lease: Lease) -> bool:
    mask = lease.mask
    return mask is None or mask.count(PENDING) + mask.count(NOT_LEASED) == len(mask)
