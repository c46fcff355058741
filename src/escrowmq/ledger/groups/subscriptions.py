"""Subscriptions of consumer groups: validation, storage as JSON, comparison when a member joins."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence, Set

from escrowmq.errors import Code, error
from escrowmq.ledger.commands import AlterGroup, Rules, Subscription
from escrowmq.ledger.groups.failed import Redelivery
from escrowmq.ledger.queues.topics import Topics
from escrowmq.message.names import is_name

HOLD = "hold"
IN_DOUBT = ("redeliver", HOLD)
MAX_DELAYS = 100
"""Delays before a redelivery that one group may have."""


def check(name: str, subscription: Subscription, topics: Topics) -> None:
    """Raise BAD_GROUP_NAME, UNKNOWN_TOPIC, or BAD_REQUEST for a start, limit or tag that makes no sense."""
    if not is_name(name):
        raise error(Code.BAD_GROUP_NAME, f"{name!r} is not a group name")
    if not subscription.topics:
        raise error(Code.BAD_REQUEST, "a consumer group needs at least one topic")
    for topic in subscription.topics:
        if not topics.has(topic):
            raise error(Code.UNKNOWN_TOPIC, f"no topic {topic!r}")
    if any(not tag for tag in subscription.tags):
        raise error(Code.BAD_REQUEST, "an empty tag matches no message", "leave tags empty to get all messages")
    if subscription.start not in ("earliest", "latest") and not re.fullmatch(r"[0-9]{1,18}", subscription.start):
        raise error(
            Code.BAD_REQUEST,
            f"{subscription.start!r} is not a start",
            "earliest, latest, or microseconds since 1970 as a text",
        )
    if subscription.in_doubt not in IN_DOUBT:
        raise error(Code.BAD_REQUEST, f"in_doubt = {subscription.in_doubt!r}", f"one of {', '.join(IN_DOUBT)}")
    attempts, first, most = subscription.max_attempts, subscription.retry_backoff_us, subscription.retry_backoff_max_us
    if (attempts is not None and not 1 <= attempts < 1 << 31) or any(
        value is not None and not 0 <= value < 1 << 62 for value in (first, most)
    ):
        raise error(Code.BAD_REQUEST, "max_attempts is at least 1, and a back-off is not negative")
    delays = subscription.retry_delays_us
    if len(delays) > MAX_DELAYS or not all(0 <= delay < 1 << 62 for delay in delays):
        raise error(Code.BAD_REQUEST, f"at most {MAX_DELAYS} delays before a redelivery, none of them negative")
    if delays and (first is not None or most is not None):
        raise error(Code.BAD_REQUEST, "redelivery is after given delays or with a back-off, not both")


def holds(subscription: Subscription) -> bool:
    """Return whether what is in doubt stays with the member that had it."""
    return subscription.in_doubt == HOLD


def differences(have: Subscription, given: Subscription, rules: Rules) -> str:
    """In words, why a member with the subscription ``given`` cannot share a group of ``have``; empty if it can. Topics
    and tags are sets; of the redelivery only what is given counts. Where the group began is no difference here."""
    wrong = [
        f"the {name} {_words(mine)}, not {_words(theirs)}"
        for name, mine, theirs in _shared(have, given)
        if mine != theirs
    ]
    redelivered, wanted = redelivery(have, rules), redelivery(given, rules)
    if given.max_attempts is not None and redelivered.attempts != given.max_attempts:
        wrong.append(f"max_attempts {redelivered.attempts}, not {given.max_attempts}")
    if given.retry_delays_us and given.retry_delays_us != have.retry_delays_us:
        wrong.append(f"the redelivery {_times(have, redelivered)}, not {_times(given, wanted)}")
    for name in ("retry_backoff_us", "retry_backoff_max_us"):
        value = getattr(given, name)
        effective = redelivered.first_us if name == "retry_backoff_us" else redelivered.most_us
        if value is not None and (have.retry_delays_us or value != effective):
            wrong.append(f"the redelivery {_times(have, redelivered)}, not {name.removesuffix('_us')} {value / 1e6:g}")
    return "; ".join(wrong)


def _shared(have: Subscription, given: Subscription) -> list[tuple[str, object, object]]:
    return [
        ("topics", set(have.topics), set(given.topics)),
        ("tags", set(have.tags), set(given.tags)),
        ("order", have.ordered, given.ordered),
        ("in_doubt", have.in_doubt, given.in_doubt),
    ]


def _words(value: object) -> str:
    if isinstance(value, set):
        return ", ".join(sorted(value)) or "(all)"
    return {True: "by key", False: "(none)"}[value] if isinstance(value, bool) else str(value)


def _times(subscription: Subscription, times: Redelivery) -> str:
    if subscription.retry_delays_us:
        return "after " + ", ".join(f"{delay / 1e6:g}" for delay in times.delays_us) + " s"
    return f"with a back-off of {times.first_us / 1e6:g} to {times.most_us / 1e6:g} s"


def altered(had: Subscription, cmd: AlterGroup) -> Subscription:
    """Return a subscription after an operator's action. BAD_REQUEST for delays and a back-off at once."""
    backoff = {name: getattr(cmd, name) for name in ("retry_backoff_us", "retry_backoff_max_us")}
    backoff = {name: value for name, value in backoff.items() if value is not None}
    if cmd.retry_delays_us is not None and backoff:
        raise error(Code.BAD_REQUEST, "redelivery is after given delays or with a back-off, not both")
    changes: dict[str, object] = {}
    if cmd.default_redelivery or cmd.retry_delays_us is not None:
        changes = {"max_attempts": None, "retry_backoff_us": None, "retry_backoff_max_us": None, "retry_delays_us": ()}
    elif backoff:
        changes = {"retry_delays_us": ()}
    for name in ("topics", "tags", "ordered", "in_doubt", "max_attempts", "retry_delays_us"):
        if (value := getattr(cmd, name)) is not None:
            changes[name] = value
    return dataclasses.replace(had, **{**changes, **backoff})


def resolve(subscription: Subscription, topics: Topics) -> Subscription:
    """Return the subscription with its start as an offset of each existing queue.

    A time in the future is "latest". Queues that come later are consumed from their beginning: all that is in them is
    newer than the group.
    """
    starts: dict[str, int] = {}
    for queue_id in queue_ids(subscription.topics, topics):
        queue = topics.queues[queue_id]
        if subscription.start == "earliest":
            starts[str(queue_id)] = queue.head
        elif subscription.start == "latest":
            starts[str(queue_id)] = queue.end
        else:
            starts[str(queue_id)] = queue.offset_at(int(subscription.start))
    return dataclasses.replace(
        subscription,
        topics=tuple(dict.fromkeys(subscription.topics)),
        tags=tuple(sorted(set(subscription.tags))),
        starts=starts,
    )


def without(subscription: Subscription, topic: str, gone: Set[int]) -> Subscription:
    """Return the subscription without a topic, whose queue ids are ``gone``."""
    if topic not in subscription.topics and not gone & {int(id) for id in subscription.starts}:
        return subscription
    return dataclasses.replace(
        subscription,
        topics=tuple(name for name in subscription.topics if name != topic),
        starts={id: start for id, start in subscription.starts.items() if int(id) not in gone},
    )


def taken_up(had: Subscription, given: Subscription, topics: Topics) -> Subscription:
    """Return the subscription of a group whose topics were all deleted, with those of whoever joins it. It begins
    in them where that one says."""
    new = resolve(dataclasses.replace(had, topics=given.topics, start=given.start), topics)
    return dataclasses.replace(new, start=had.start, starts=had.starts | new.starts)


def queue_ids(names: Sequence[str], topics: Topics) -> list[int]:
    """Return the queue ids of all these topics, rising."""
    if len(names) == 1:
        return list(topics.queue_ids(names[0]))
    return sorted(queue_id for name in names for queue_id in topics.queue_ids(name))


def dump(subscription: Subscription) -> str:
    """Return the subscription as JSON. What came later than the first format is left out where it has its default."""
    fields = dataclasses.asdict(subscription)
    if not holds(subscription):
        del fields["in_doubt"]
    if not subscription.retry_delays_us:
        del fields["retry_delays_us"]
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def load(text: str) -> Subscription:
    """Return the subscription from its JSON."""
    fields = json.loads(text)
    for name in ("topics", "tags", "retry_delays_us"):
        fields[name] = tuple(fields.get(name, ()))
    return Subscription(**fields)


def repeated(subscription: Subscription, rules: Rules) -> int:
    """Return the attempt of a repeat that is not charged: distinguished from a first delivery (I23), if the group has
    more than one."""
    return min(2, redelivery(subscription, rules).attempts)


def redelivery(subscription: Subscription, rules: Rules) -> Redelivery:
    """Return when and how often a group gets a message again that failed: its own rules, else the shard's."""
    own = subscription
    attempts = len(own.retry_delays_us) + 1 if own.retry_delays_us else rules.max_attempts
    return Redelivery(
        attempts if own.max_attempts is None else own.max_attempts,
        rules.retry_backoff_us if own.retry_backoff_us is None else own.retry_backoff_us,
        rules.retry_backoff_max_us if own.retry_backoff_max_us is None else own.retry_backoff_max_us,
        own.retry_delays_us,
    )
