"""Subscriptions of consumer groups: validation, storage as JSON, comparison when a member joins."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

from escrowmq.errors import Code, error
from escrowmq.ledger.commands import Rules, Subscription
from escrowmq.ledger.queues.topics import Topics
from escrowmq.message.names import is_name

HOLD = "hold"
IN_DOUBT = ("redeliver", HOLD)


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


def holds(subscription: Subscription) -> bool:
    """Whether what is in doubt stays with the member that had it."""
    return subscription.in_doubt == HOLD


def same(one: Subscription, other: Subscription) -> bool:
    """Whether members with these subscriptions can share a group: topics and tags as sets, the order, what is in doubt."""
    sets = set(one.topics) == set(other.topics) and set(one.tags) == set(other.tags)
    return sets and one.ordered == other.ordered and one.in_doubt == other.in_doubt


def resolve(subscription: Subscription, topics: Topics) -> Subscription:
    """The subscription with its start as an offset of each existing queue.

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


def queue_ids(names: Sequence[str], topics: Topics) -> list[int]:
    """The queue ids of all these topics, rising."""
    if len(names) == 1:
        return list(topics.queue_ids(names[0]))
    return sorted(queue_id for name in names for queue_id in topics.queue_ids(name))


def dump(subscription: Subscription) -> str:
    """The subscription as JSON. What came later than the first format is left out where it has its default."""
    fields = dataclasses.asdict(subscription)
    if not holds(subscription):
        del fields["in_doubt"]
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def load(text: str) -> Subscription:
    """The subscription from its JSON."""
    fields = json.loads(text)
    fields["topics"], fields["tags"] = tuple(fields["topics"]), tuple(fields["tags"])
    return Subscription(**fields)


def retry_rules(subscription: Subscription, rules: Rules) -> tuple[int, int, int]:
    """Attempts, first back-off and longest back-off of a group: its own, else those of the rules."""
    own = subscription
    return (
        rules.max_attempts if own.max_attempts is None else own.max_attempts,
        rules.retry_backoff_us if own.retry_backoff_us is None else own.retry_backoff_us,
        rules.retry_backoff_max_us if own.retry_backoff_max_us is None else own.retry_backoff_max_us,
    )
