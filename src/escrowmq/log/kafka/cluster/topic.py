"""Rules for the settings of a topic that can be a log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from escrowmq.errors import Code, Misuse
from escrowmq.log.kafka.cluster.address import KafkaAddress
from escrowmq.log.kafka.records import LARGEST_RECORD

_ROOM = 1_000
"""Bytes that Kafka's framing adds to a record, generously."""


class Rule(NamedTuple):
    """One setting of a topic. ``right`` and ``set_to`` are given how many replicas must have a record."""

    setting: str
    right: Callable[[str, int], bool]
    set_to: Callable[[int], str]
    otherwise: str
    """What happens if it is otherwise."""


def _is(value: str) -> tuple[Callable[[str, int], bool], Callable[[int], str]]:
    return lambda found, _: found == value, lambda _: value


def _at_least(found: str, least: int) -> bool:
    return found.isdigit() and int(found) >= least


RULES = (
    Rule("cleanup.policy", *_is("delete"), "compaction takes records out of the middle of the log"),
    Rule("retention.ms", *_is("-1"), "Kafka deletes the log by its age"),
    Rule("retention.bytes", *_is("-1"), "Kafka deletes the log by its size"),
    Rule("unclean.leader.election.enable", *_is("false"), "a replica that is behind may become the leader, and drop "
                                                          "what was acknowledged"),
    Rule("min.insync.replicas", _at_least, str, "Kafka acknowledges what too few replicas have, and loses it with "
                                                "them"),
    Rule(
        "max.message.bytes",
        lambda found, _: _at_least(found, LARGEST_RECORD + _ROOM),
        lambda _: "1048588",
        "Kafka refuses a record of the log as too large, and the leader stops",
    ),
)  # fmt: skip


def settings_for(address: KafkaAddress) -> dict[str, str]:
    """Return the settings of a right topic. Times are the brokers' own: one of ours whose clock is ahead would have
    its records refused."""
    rules = {rule.setting: rule.set_to(address.enough) for rule in RULES}
    return {**rules, "message.timestamp.type": "LogAppendTime"}


def refuse_wrong(
    address: KafkaAddress, topic: str, found: Mapping[str, str | None], replicas: Mapping[int, int]
) -> None:
    """Misuse(BAD_SETTING) if a topic is not kept as a log must be: every wrong setting, and what to set it to.

    ``found``: its settings as they are in effect. ``replicas``: how many each of its partitions has.
    """
    if address.partition not in replicas:
        what = f"topic {topic} has {len(replicas)} partitions, and none with the number {address.partition}"
        raise Misuse(Code.BAD_SETTING, what, "name another partition in the URL, or add partitions to the topic")
    wrong = [rule for rule in RULES if not rule.right(found.get(rule.setting) or "", address.enough)]
    if wrong:
        said = "; ".join(f"{rule.setting} is {found.get(rule.setting)}: {rule.otherwise}" for rule in wrong)
        change = ",".join(f"{rule.setting}={rule.set_to(address.enough)}" for rule in wrong)
        hint = f"kafka-configs.sh --bootstrap-server {address.servers[0]} --alter --topic {topic} --add-config {change}"
        raise Misuse(Code.BAD_SETTING, f"topic {topic} would lose the log: {said}", hint)
    if (there := replicas[address.partition]) < address.replicas:
        what = (
            f"partition {address.partition} of topic {topic} has {there} of {address.replicas} replicas: the log is "
            "lost with them"
        )
        hint = (
            f"give it more with kafka-reassign-partitions.sh; ?replication={there} in the URL says that {there} is "
            "enough for you"
        )
        raise Misuse(Code.BAD_SETTING, what, hint)
