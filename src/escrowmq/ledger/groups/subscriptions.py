"""Subscriptions of consumer groups: validation, storage as JSON, comparison when a member joins."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence, Set
from typing import Any

from escrowmq.errors import Code, error
from escrowmq.ledger.commands import AlterGroup, Rules, Subscription
from escrowmq.ledger.groups.failed import Redelivery
from escrowmq.ledger.queues.topics import Topics
from escrowmq.message.names import is_name

HOLD = "hold"
IN_DOUBT = ("redeliver", HOLD)
MAX_DELAYS = 100  # delays before a redelivery that one group may have


def check(name: str, subscription: Subscription, topics: Topics) -> None:
    """Validate a subscription of the group ``name``. Raises BAD_GROUP_NAME, UNKNOWN_TOPIC, or BAD_REQUEST for an
    invalid start, limit or tag."""
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
        hint = "earliest, latest, or microseconds since 1970 as a text"
        raise error(Code.BAD_REQUEST, f"{subscription.start!r} is not a start", hint)
    if subscription.in_doubt not in IN_DOUBT:
        raise error(Code.BAD_REQUEST, f"in_doubt = {subscription.in_doubt!r}", f"one of {', '.join(IN_DOUBT)}")
    backoff = (subscription.retry_backoff_us, subscription.retry_backoff_max_us)
    attempts = 1 if subscription.max_attempts is None else subscription.max_attempts
    if not 1 <= attempts < 1 << 31 or any(time is not None and not 0 <= time < 1 << 62 for time in backoff):
        raise error(Code.BAD_REQUEST, "max_attempts is at least 1, and a back-off is not negative")
    delays = subscription.retry_delays_us
    if len(delays) > MAX_DELAYS or not all(0 <= delay < 1 << 62 for delay in delays):
        raise error(Code.BAD_REQUEST, f"at most {MAX_DELAYS} delays before a redelivery, none of them negative")
    if delays and backoff != (None, None):
        raise error(Code.BAD_REQUEST, "redelivery is after given delays or with a back-off, not both")


def holds(subscription: Subscription) -> bool:
    """Return whether a silent member keeps its messages (``in_doubt="hold"``)."""
    return subscription.in_doubt == HOLD


def differences(have: Subscription, given: Subscription, rules: Rules) -> str:
    """Describe why a member with the subscription ``given`` cannot share a group of ``have``; empty if it can.

    Topics and tags are sets; of the redelivery only given values count. The start is not compared.
    """
    names = {"topics": "topics", "tags": "tags", "order": "ordered", "in_doubt": "in_doubt"}
    pairs = [(name, _value(have, field), _value(given, field)) for name, field in names.items()]
    wrong = [f"the {name} {_words(mine)}, not {_words(theirs)}" for name, mine, theirs in pairs if mine != theirs]
    times = redelivery(have, rules)
    if given.max_attempts is not None and times.attempts != given.max_attempts:
        wrong.append(f"max_attempts {times.attempts}, not {given.max_attempts}")
    if given.retry_delays_us and given.retry_delays_us != have.retry_delays_us:
        wrong.append(f"the redelivery {_describe_times(times)}, not {_describe_times(redelivery(given, rules))}")
    for name, effective in (("retry_backoff_us", times.first_us), ("retry_backoff_max_us", times.most_us)):
        value = getattr(given, name)
        if value is not None and (have.retry_delays_us or value != effective):
            wrong.append(f"the redelivery {_describe_times(times)}, not {name.removesuffix('_us')} {value / 1e6:g}")
    return "; ".join(wrong)


def _value(subscription: Subscription, field: str) -> object:
    value = getattr(subscription, field)
    return set(value) if isinstance(value, tuple) else value


def _words(value: object) -> str:
    if isinstance(value, set):
        return ", ".join(sorted(value)) or "(all)"
    return {True: "by key", False: "(none)"}[value] if isinstance(value, bool) else str(value)


def _describe_times(times: Redelivery) -> str:
    if times.delays_us:
        return "after " + ", ".join(f"{delay / 1e6:g}" for delay in times.delays_us) + " s"
    return f"with a back-off of {times.first_us / 1e6:g} to {times.most_us / 1e6:g} s"


def alter(had: Subscription, cmd: AlterGroup) -> Subscription:
    """Return the subscription with an operator's changes. Raises BAD_REQUEST for delays together with a back-off."""
    names = [field.name for field in dataclasses.fields(had) if field.name not in ("start", "starts")]
    changes = {name: value for name in names if (value := getattr(cmd, name)) is not None}
    backoff = changes.keys() & {"retry_backoff_us", "retry_backoff_max_us"}
    if cmd.retry_delays_us is not None and backoff:
        raise error(Code.BAD_REQUEST, "redelivery is after given delays or with a back-off, not both")
    cleared: dict[str, Any] = {"retry_delays_us": ()} if backoff else {}
    if cmd.default_redelivery or cmd.retry_delays_us is not None:
        cleared = {"max_attempts": None, "retry_backoff_us": None, "retry_backoff_max_us": None, "retry_delays_us": ()}
    return dataclasses.replace(had, **cleared | changes)


def resolve(subscription: Subscription, topics: Topics) -> Subscription:
    """Return the subscription with the first offset to deliver of each existing queue, by its start.

    A time in the future is "latest". Queues that come later are consumed from their beginning: all messages in them are
    newer than the group.
    """
    ids = queue_ids(subscription.topics, topics)
    return dataclasses.replace(
        subscription,
        topics=tuple(dict.fromkeys(subscription.topics)),
        tags=tuple(sorted(set(subscription.tags))),
        starts={str(id): topics.queues[id].offset_of_start(subscription.start) for id in ids},
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


def take_up(had: Subscription, given: Subscription, topics: Topics) -> Subscription:
    """Return the subscription of a group whose topics were all deleted with those of ``given``, a joining member's,
    from that member's start on."""
    new = resolve(dataclasses.replace(had, topics=given.topics, start=given.start), topics)
    return dataclasses.replace(new, start=had.start, starts=had.starts | new.starts)


def queue_ids(names: Sequence[str], topics: Topics) -> list[int]:
    """Return the ids of all queues of these topics, rising. Raises UNKNOWN_TOPIC."""
    if len(names) == 1:
        return list(topics.queue_ids(names[0]))
    return sorted(queue_id for name in names for queue_id in topics.queue_ids(name))


def dump(subscription: Subscription) -> str:
    """Return the subscription as JSON. Fields newer than the first format are left out at their default."""
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
    """Return the attempt number of a redelivery after an attempt that is not counted: 2, so that it differs from a
    first delivery (I23); 1 if the group has only one attempt."""
    return min(2, redelivery(subscription, rules).attempts)


def redelivery(subscription: Subscription, rules: Rules) -> Redelivery:
    """Return when and how often a group retries a failed message: its own rules, else the shard's."""
    own = subscription
    attempts = len(own.retry_delays_us) + 1 if own.retry_delays_us else rules.max_attempts
    return Redelivery(
        attempts if own.max_attempts is None else own.max_attempts,
        rules.retry_backoff_us if own.retry_backoff_us is None else own.retry_backoff_us,
        rules.retry_backoff_max_us if own.retry_backoff_max_us is None else own.retry_backoff_max_us,
        own.retry_delays_us,
    )
