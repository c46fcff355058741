"""Operator actions under load: while producers and consumers work and fail, an operator decides and rechecks
transactions, retries and discards dead letters, alters groups, adds queues, fences silent members, and resets, pauses
and deletes groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

from escrowmq.client.admin import Admin
from escrowmq.client.links.answers import Listing
from escrowmq.errors import Code, EscrowError, Fenced, Unknown
from escrowmq_lab import promises
from escrowmq_lab.checker import Violation
from escrowmq_lab.history import Act, Event, Kind, kind_of
from escrowmq_lab.workloads.drain import TOPICS, any_operation, write
from escrowmq_lab.workloads.reading import Reader
from escrowmq_lab.workloads.seam import Operation, Role, Site, Workload, to_do

MOST_ATTEMPTS = 3
PASSING = "passing"
"""The group that is deleted."""
VERBS = ("decide", "dead letters", "attempts", "check rules", "queues", "fence")
WEIGHTS = (8, 6, 1, 1, 1, 2)
GROUP_VERBS = ("reset", "pause", "delete")
GROUP_WEIGHTS = (5, 2, 3)
SECONDS = 20.0
"""Timeout (s) of one operator action."""


class Operator(Workload):
    """See the module."""

    name = "operator"
    remade = (PASSING,)

    def roles(self, chance: Random, size: int) -> list[Role]:
        """Return two writers that leave many transactions undecided, two careless consumers of a shared group, a member
        that holds its messages, one whose group is deleted sometimes; one operator of messages, and one of groups."""

        def share(site: Site, plan: Iterable[Operation]) -> None:
            Reader(site, "cart", TOPICS, careless=0.4).work()

        def hold(site: Site, plan: Iterable[Operation]) -> None:
            try:
                Reader(site, "held", ["orders"], careless=0.0, instance="holder", in_doubt="hold").work()
            except Fenced:  # its supervisor starts it again
                site.history.add(site.name, Act.KILL, Kind.OK)
                raise

        def pass_by(site: Site, plan: Iterable[Operation]) -> None:
            Reader(site, PASSING, TOPICS, careless=0.2).work()

        def plan(writer: str) -> list[Operation]:
            plan = [any_operation(f"{writer}-{number}", chance) for number in range(size)]
            for operation in plan:
                if operation.verb == "transact" and chance.random() < 0.5:
                    operation.details["end"] = chance.choice(("never", "never", "silent commit", "silent rollback"))
            return plan

        acts = [
            Operation(chance.choices(VERBS, WEIGHTS)[0], f"operator-{number}", chance.random(), _details(chance))
            for number in range(2 * size)
        ]
        group_acts = [
            Operation(
                chance.choices(GROUP_VERBS, GROUP_WEIGHTS)[0], f"group-{number}", 2 * chance.random(), _details(chance)
            )
            for number in range(size)
        ]
        return [
            *(Role(f"w{n}", write, plan(f"w{n}")) for n in range(2)),
            Role("cart-1", share, drains=True),
            Role("cart-2", share, drains=True),
            Role("holder", hold, drains=True),
            Role("passer", pass_by, drains=True),
            Role("operator", _operate, [Operation("attempts", "operator-first", 0.1, {"number": 0}), *acts]),
            Role("group operator", _operate_groups, group_acts),
        ]

    def check(self, events: Sequence[Event]) -> list[Violation]:
        """Check the limit of attempts, and that a paused group gets no deliveries."""
        begun = next((n for n, e in enumerate(events) if e.note == "attempts are bounded"), len(events))
        paused = promises.handed_out_while_paused(events)
        return [*super().check(events), *paused, *promises.overattempted(events[begun:], "cart", MOST_ATTEMPTS)]


def _details(chance: Random) -> dict[str, Any]:
    return {"number": chance.randrange(1 << 16), "outcome": chance.choice(("commit", "rollback", "recheck"))}


def _operate(site: Site, plan: Iterable[Operation]) -> None:
    router = site.connect().router
    admin = Admin(router, SECONDS)
    for operation in to_do(site, plan):
        try:
            _ACTS[operation.verb](site, admin, {**operation.details, "brokers": len(router)})
        except EscrowError as problem:  # the history has the invocation; the next action may reach the broker
            site.history.add(site.name, Act.OPERATE, kind_of(problem), note=f"{operation.verb}: {problem}"[:200])
        else:
            site.history.add(site.name, Act.OPERATE, Kind.OK, note=operation.verb)


def _decide(site: Site, admin: Admin, details: dict[str, Any]) -> None:
    """Commit, roll back or recheck one of the undecided transactions, open or parked."""
    names = site.shared.get("names", {})
    known = [one["id"] for one in admin.transactions(state="undecided") if one["id"] in names]
    if not known:
        return
    chosen, outcome = known[details["number"] % len(known)], details["outcome"]
    act = {"commit": Act.COMMIT, "rollback": Act.ROLLBACK, "recheck": Act.RECHECK}[outcome]
    do = {"commit": admin.commit, "rollback": admin.rollback, "recheck": admin.recheck}[outcome]
    with site.history.call(site.name, act, transaction=names[chosen]):
        do(chosen)


def _dead_letters(site: Site, admin: Admin, details: dict[str, Any]) -> None:
    """Redeliver or discard some dead letters."""
    letters = list(admin.dead_letters("cart"))
    chosen = [letter for number, letter in enumerate(letters) if (details["number"] >> number % 16) & 1]
    if details["outcome"] == "rollback":
        for letter in chosen:
            place = {"topic": letter["topic"], "queue": letter["queue"], "offset": letter["offset"]}
            site.history.add(site.name, Act.DISCARD, Kind.INVOKE, group="cart", broker=letter["broker"], **place)
        admin.discard_dead_letters("cart", chosen)
    else:
        admin.retry_dead_letters("cart", chosen)


def _attempts(site: Site, admin: Admin, details: dict[str, Any]) -> None:
    altered = admin.alter_group("cart", max_attempts=(2, 2, 3, MOST_ATTEMPTS)[details["number"] % 4])
    if len(altered) == details["brokers"]:  # a broker without the group creates it later, with its settings
        site.history.add(site.name, Act.OPERATE, Kind.OK, note="attempts are bounded")


def _check_rules(site: Site, admin: Admin, details: dict[str, Any]) -> None:
    admin.alter_producers("shop", check_interval=(0.2, 0.5, 2.0)[details["number"] % 3], check_max=1)


def _queues(site: Site, admin: Admin, details: dict[str, Any]) -> None:
    name = TOPICS[details["number"] % 2]
    most = max((len(topic["queues"]) for topic in admin.topics() if topic["name"] == name), default=0)
    admin.create_topic(name, most + 1, may_exist=True)


def _fence(site: Site, admin: Admin, details: dict[str, Any]) -> None:
    admin.fence("held", "holder")


_ACTS: dict[str, Callable[[Site, Admin, dict[str, Any]], None]] = {
    "decide": _decide,
    "dead letters": _dead_letters,
    "attempts": _attempts,
    "check rules": _check_rules,
    "queues": _queues,
    "fence": _fence,
}


def _operate_groups(site: Site, plan: Iterable[Operation]) -> None:
    admin = Admin(site.connect().router, SECONDS)
    for operation in to_do(site, plan):
        try:
            _GROUP_ACTS[operation.verb](site, admin, operation.details)
        except EscrowError as problem:
            site.history.add(site.name, Act.OPERATE, kind_of(problem), note=f"{operation.verb}: {problem}"[:200])
        else:
            site.history.add(site.name, Act.OPERATE, Kind.OK, note=operation.verb)
    while not site.ended:
        _resume(site, admin)
        site.pause(1.0)
    site.pause(3.0)  # a pause whose response was lost may take effect late
    _resume(site, admin)


def _reset(site: Site, admin: Admin, details: dict[str, Any]) -> None:
    """Reset back or forward a little, to the beginning or the end; the history records the result, queue by queue."""
    shift = (-1, -3, -20, 2, None, None)[details["number"] % 6]
    to = None if shift is not None else ("earliest", "latest")[details["number"] % 2]
    direction = "forward" if shift == 2 or to == "latest" else "back"
    with site.history.call(site.name, Act.RESET, group="cart", value=direction):
        moves = admin.reset_group("cart", to, shift=shift)
        for move in moves:
            place = {"broker": move["broker"], "topic": move["topic"], "queue": move["queue"], "offset": move["now"]}
            site.history.add(site.name, Act.MOVED, Kind.OK, group="cart", **place)
        _check_all_reached(moves)


def _check_all_reached(done: Listing[Any]) -> None:
    """Raise Unknown if a broker was unreachable: it may have applied the action, or still apply it."""
    if done.missing:
        raise Unknown(Code.TIMED_OUT, f"{done.missing[0]['broker']} is away")


def _pause(site: Site, admin: Admin, details: dict[str, Any]) -> None:
    """Pause for a moment: consumers wait, then continue."""
    try:
        _check_all_reached(admin.pause_group("cart"))
    except EscrowError:
        _resume(site, admin)
        raise
    position = max(int(stats["log_position"]) for stats in admin.stats())
    site.history.add(site.name, Act.PAUSED, Kind.OK, group="cart", position=position)
    site.pause(details["number"] % 5)
    _resume(site, admin)


def _resume(site: Site, admin: Admin) -> None:
    """Resume, until every broker has done it."""
    site.history.add(site.name, Act.PAUSED, Kind.INVOKE, group="cart", value="no")
    while True:
        try:
            _check_all_reached(admin.resume_group("cart"))
            return
        except EscrowError as problem:
            if problem.code is Code.UNKNOWN_GROUP:
                return
            site.pause(0.5)


def _delete(site: Site, admin: Admin, details: dict[str, Any]) -> None:
    """Delete a group; its consumer creates it again, and starts at the beginning."""
    with site.history.call(site.name, Act.RESET, group=PASSING, value="back"):
        _check_all_reached(admin.delete_group(PASSING, force=True))


_GROUP_ACTS: dict[str, Callable[[Site, Admin, dict[str, Any]], None]] = {
    "reset": _reset,
    "pause": _pause,
    "delete": _delete,
}
