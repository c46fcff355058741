"""Topic settings that a log needs, as rules over the settings reported by Kafka."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from escrowmq.errors import Code, Misuse
from escrowmq.log.kafka.cluster.address import KafkaAddress
from escrowmq.log.kafka.records import LARGEST_RECORD

_ROOM = 1_000  # upper bound for the bytes that Kafka's framing adds to a record


class Rule(NamedTuple):
    """The rule for one setting of a topic. The functions get the number of replicas that must have a record."""

    setting: str
    right: Callable[[str, int], bool]
    set_to: Callable[[int], str]
    otherwise: str  # the consequence of another value


def _is(value: str) -> tuple[Callable[[str, int], bool], Callable[[int], str]]:
    return lambda found, _: found == value, lambda _: value


def _at_least(found: str, least: int) -> bool:
    return found.isdigit() and int(found) >= least


RULES = (
    Rule("cleanup.policy", *_is("delete"), "compaction takes records out of the middle of the log"),
    Rule("retention.ms", *_is("-1"), "Kafka deletes the log by its age"),
    Rule("retention.bytes", *_is("-1"), "Kafka deletes the log by its size"),
    Rule("unclean.leader.election.enable", *_is("false"), "a stale replica may lead, and drop acknowledged records"),
    Rule("min.insync.replicas", _at_least, str, "Kafka acknowledges records on too few replicas, and may lose them"),
    Rule(
        "max.message.bytes",
        lambda found, _: _at_least(found, LARGEST_RECORD + _ROOM),
        lambda _: "1048588",
        "Kafka refuses a record of the log as too large, and the leader stops",
    ),
)  # fmt: skip


def settings_for(address: KafkaAddress) -> dict[str, str]:
    """Return the settings of a suitable topic. Times are the brokers' own, as clients' clocks may be ahead."""
    rules = {rule.setting: rule.set_to(address.enough) for rule in RULES}
    return {**rules, "message.timestamp.type": "LogAppendTime"}


def refuse_wrong(
    address: KafkaAddress, topic: str, found: Mapping[str, str | None], replicas: Mapping[int, int]
) -> None:
    """Raise Misuse(BAD_SETTING), with every wrong setting and its right value, if a topic is not suitable for a log.
    ``found``: its effective settings. ``replicas``: the replica count of each partition."""
    if address.partition not in replicas:
        message = f"topic {topic} has {len(replicas)} partitions, and none with the number {address.partition}"
        raise Misuse(Code.BAD_SETTING, message, "name another partition in the URL, or add partitions to the topic")
    wrong = [rule for rule in RULES if not rule.right(found.get(rule.setting) or "", address.enough)]
    if wrong:
        faults = "; ".join(f"{rule.setting} is {found.get(rule.setting)}: {rule.otherwise}" for rule in wrong)
        change = ",".join(f"{rule.setting}={rule.set_to(address.enough)}" for rule in wrong)
        hint = f"kafka-configs.sh --bootstrap-server {address.servers[0]} --alter --topic {topic} --add-config {change}"
        raise Misuse(Code.BAD_SETTING, f"topic {topic} would lose the log: {faults}", hint)
    if (actual := replicas[address.partition]) < address.replicas:
        message = f"partition {address.partition} of topic {topic} has {actual} of {address.replicas} replicas"
        hint = f"add replicas with kafka-reassign-partitions.sh, or set ?replication={actual} in the URL"
        raise Misuse(Code.BAD_SETTING, f"{message}: the log is lost with them", hint)
