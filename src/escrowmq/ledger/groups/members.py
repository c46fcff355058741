"""Named members (``in_doubt="hold"``), and members that stopped: what a lease of theirs leaves.

Rules of named members:

1. Leases of such a group do not end by time. Messages of a silent member are given to no other member: their effect may
   be done, or about to be.
2. JOINED begins a new *epoch* of a member (its position is the epoch); an older one cannot receive (FENCED). All
   messages that the member held are then *in doubt*: its old process cannot settle them (LEASE_LOST), and the new one
   gets them first, as HANDED: a new lease, one attempt later; after the last attempt they are dead letters.
3. A process that merely lost responses (its broker restarted, the connection broke) joins again and names the leases
   that reached it, with how far: KEPT, they are not in doubt. So messages lost on the way stay leased to no process.
4. FENCED gives all messages of a member back to the group at once, each as a failed attempt, and ends its epoch.
5. In an ordered group messages in doubt of a queue are handed over when the member settled the earlier ones, and all
   of a lease at once, even beyond the requested number: the rest could be overtaken.

Expired leases: which messages the consumer cannot have started. These never become dead letters. A lease counts an
attempt for all its messages, though a member works on few of them. When its process dies again and again on one
message, the attempts of its neighbours would be used up. So:

1. A member that handles messages one by one gets a message for the last time alone in its response (in order: with the
   later ones that are released with it). So no other message dies with it.
2. A member works on its responses in order, which the deadlines of leases distinguish. So a lease at its last attempt
   without a settled message was not started if the member has an older, unfinished one: when either of the two ends by
   time, its messages are given back, and the attempt does not count (UNSEEN).

The oldest lease may have been lost on the way to the member, or not started; that counts, so that a message which kills
its consumers does die in the end. Leases of members that take whole batches die together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Join, Receive, Rules
from escrowmq.ledger.events import Event, event_of, event_of_rows
from escrowmq.ledger.groups.cursors import ACKED, TAKEN, Lease, pending_runs
from escrowmq.ledger.groups.group import Group, Member
from escrowmq.ledger.groups.receiving import Piece, Plan
from escrowmq.ledger.groups.subscriptions import holds
from escrowmq.ledger.queues.topics import Topics
from escrowmq.message.names import is_name
from escrowmq.model import member_id
from escrowmq.schemas import Kind


def decide_join(group: Group, cmd: Join, rules: Rules, position: int) -> tuple[tuple[Event, ...], dict[str, int]]:
    """Decide that a process becomes the named member. Returns the events, JOINED at log ``position``, and the answer.
    Raises BAD_REQUEST for a bad name or a group without named members, TOO_MANY; FENCED for a ``resume`` after another
    process took the member over, or an operator fenced it."""
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
    ends = ((lease, min(reached.get(lease.id, 0), lease.doubt)) for lease in group.leases_of(id))
    kept = [(lease.id, end) for lease, end in ends if end > lease.start]
    events = (joined, event_of_rows(Kind.KEPT, kept)) if kept else (joined,)
    return events, {"member": id, "epoch": position}


def member_of(group: Group, cmd: Receive) -> Member:
    """Return the named member that receives. Raises BAD_REQUEST if it never joined, FENCED if its epoch is old."""
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
    """Redelivery to a member: rows of a HANDED event, their messages, and dead letters."""

    dead: list[tuple[int, int, int, str]] = field(default_factory=list)
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)  # old lease, start, count, attempt
    held: list[tuple[int, int, Int64s, Int64s]] = field(default_factory=list)  # queue, attempt, offsets, positions

    def events(self, position: int) -> list[Event]:
        """Return the events DEAD and HANDED, if they have rows. The first row of all gets log ``position``."""
        handed = [(id, *row) for id, row in enumerate(self.rows, position + len(self.dead))]
        return [event_of_rows(kind, rows) for kind, rows in ((Kind.DEAD, self.dead), (Kind.HANDED, handed)) if rows]

    def pieces(self, position: int) -> list[Piece]:
        """Return the messages of each new lease. ``position``: as of :meth:`events`; it sets the leases' ids."""
        return [Piece(id, *messages) for id, messages in enumerate(self.held, position + len(self.dead))]


def in_doubt(group: Group, member: Member, topics: Topics) -> list[Lease]:
    """Return the leases of ``member`` that have messages in doubt, except of paused topics; oldest first."""
    found = sorted(member.doubted.values(), key=lambda lease: lease.id)
    if not group.paused:
        return found
    return [lease for lease in found if not group.is_paused(topics.queues[lease.cursor.queue_id].place.topic)]


def hand_over(plan: Plan, group: Group, member: Member, topics: Topics, max_attempts: int) -> Handing:
    """Plan new leases for the messages in doubt of ``member``, and dead letters for those that had ``max_attempts``.
    Lowers the plan's budget and room; in order a lease is handed over as a whole, even beyond the budget."""
    handing, ordered = Handing(), group.subscription.ordered
    for lease in in_doubt(group, member, topics):
        if plan.budget <= 0:
            break
        if ordered and any(x.pending - x.pending_from(x.doubt) for x in lease.cursor.leases.values()):
            continue  # the member still works on earlier messages of the queue
        offsets, attempt, left = lease.pending_offsets(lease.doubt), lease.attempt + 1, lease.pending
        if attempt > max_attempts:
            failed, attempt = (1 if ordered else len(offsets)), lease.attempt
            start, end = int(offsets[0]) - lease.start, int(offsets[failed - 1]) + 1 - lease.start
            cause = f"in doubt when its consumer came back, attempt {lease.attempt} of {max_attempts}"
            runs = pending_runs(lease.copy_mask(), start, end)
            handing.dead += [(lease.id, lease.start + a, b - a, cause) for a, b in runs]
            offsets, left = offsets[failed:], left - failed
            plan.room += not left
        chosen = offsets if ordered else offsets[: plan.budget]
        stays = left > len(chosen)
        if len(chosen) and (plan.room > 0 or not stays):
            start, end, queue_id = int(chosen[0]), int(chosen[-1]) + 1, lease.cursor.queue_id
            handing.rows.append((lease.id, start, end - start, attempt))
            positions = topics.queues[queue_id].positions(start, end)[chosen - start]
            handing.held.append((queue_id, attempt, chosen, lease.cursor.edited.instead(chosen, positions)))
            plan.budget -= len(chosen)
            plan.room -= stays
    return handing


def describe(group: Group, topics: Topics) -> list[dict[str, Any]]:
    """List what each member holds: ``member, leases, messages, in_doubt`` (messages), ``held`` (one dict per lease,
    oldest first: ``lease, topic, queue, first, last`` offset, ``messages, in_doubt, attempt``, ``deadline_us`` or
    None); of named members also ``instance, epoch, fenced, joined_us``."""
    names, listed = {"instance": "name", "epoch": "epoch", "fenced": "fenced", "joined_us": "joined_us"}, []
    for id, leases in _by_member(group, list(group.members)).items():
        held = [_describe_lease(lease, topics) for lease in leases]
        known = {key: getattr(group.members.get(id), name, None) for key, name in names.items()}
        counts = {count: sum(line[count] for line in held) for count in ("messages", "in_doubt")}
        listed.append({"member": id, **known, "leases": len(held), **counts, "held": held})
    return listed


def _describe_lease(lease: Lease, topics: Topics) -> dict[str, Any]:
    place, pending = topics.queues[lease.cursor.queue_id].place, lease.pending_offsets(lease.start)
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


def find_unreached(group: Group, expired: Sequence[Lease], attempts: int) -> list[Lease]:
    """Return leases at their last attempt (number ``attempts``) that their member cannot have started, now that the
    leases ``expired`` end (rule 2 of expired leases above): some of these, or others of the same members."""
    over = {lease.id for lease in expired}
    held, found = _by_member(group), list[Lease]()
    for leases in (held[member] for member in dict.fromkeys(lease.member for lease in expired)):
        before: set[int] = set()  # deadlines of the member's earlier leases
        ended: set[int] = set()  # and of those of them that end now
        for lease in leases:
            if lease.attempt >= attempts and not any(done in lease.copy_mask() for done in (ACKED, TAKEN)):
                earlier = before if lease.id in over else ended
                if earlier - {lease.deadline_us}:
                    found.append(lease)
            before.add(lease.deadline_us)
            if lease.id in over:
                ended.add(lease.deadline_us)
    return found


def _by_member(group: Group, members: Sequence[int] = ()) -> dict[int, list[Lease]]:
    """Return the live leases of a group by member id, oldest first. ``members`` are in it even without leases."""
    held: dict[int, list[Lease]] = {member: [] for member in members}
    for cursor in group.cursors.values():
        for lease in cursor.leases.values():
            held.setdefault(lease.member, []).append(lease)
    return {member: sorted(leases, key=lambda lease: lease.id) for member, leases in held.items()}
