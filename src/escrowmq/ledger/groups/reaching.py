"""Expired leases: which of their messages a silent member cannot have come to. A dead letter is never made of these.

A lease counts an attempt for all that it holds, and a member holds more than it works on: what it fetched ahead waits
in its memory. When its process dies again and again, on one message, the attempts of its neighbours are used up as
well. So the last attempt is ruled more strictly:

1. A member that says that it takes messages one by one is given a message for the last time alone: it is all that the
   answer holds (in order: with the later ones that are released with it). So nothing dies beside another message of its
   own lease.
2. What a member was given in an answer it works on in the order of the answers. So a lease at its last attempt in which
   nothing was settled, and before which its member was given another that is not done, was not come to: when either of
   the two ends by time, its messages are given back, and the attempt does not count (UNSEEN). Answers are distinguished
   by the deadlines of their leases.

What this cannot tell: the lease that a member was given first may have been lost on the way to it, or lie in its memory
untouched; that counts, so that a message which kills whoever takes it does die in the end. Leases of members that take
whole batches hold what was handed out together, and their messages die together.
"""

from __future__ import annotations

from collections.abc import Sequence

from escrowmq.ledger.groups.cursors import NOT_LEASED, PENDING, Lease
from escrowmq.ledger.groups.group import Group


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
