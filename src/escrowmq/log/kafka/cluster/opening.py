"""Opens the partitions of a log in Kafka. Kafka's client package is imported only here."""

from __future__ import annotations

import importlib
from typing import Any, cast

from escrowmq.errors import Code, Misuse
from escrowmq.log.kafka.cluster.address import KafkaAddress
from escrowmq.log.kafka.partition import Partitions
from escrowmq.platform.extras import missing_package


def open_partitions(address: str | KafkaAddress) -> Partitions:
    """Create the partitions of an address without connecting. Raises Misuse(BAD_URL), Misuse(MISSING_PACKAGE),
    Misuse(BAD_SETTING) for a setting that the client does not know, or that the log itself must control."""
    return cast(Partitions, _client().ConfluentPartitions(_parsed(address)))


def create_topics(address: str | KafkaAddress, *, partitions: int | None = None, timeout: float = 30.0) -> list[str]:
    """Create the topics of a log with the required settings; return the names of the new ones. ``partitions`` of each,
    by default as many as the address needs. Existing topics are checked as at every opening. Raises as
    :func:`open_partitions` and :meth:`Partitions.check`, and Misuse(BAD_SETTING) if Kafka cannot create them so."""
    parsed = _parsed(address)
    count = parsed.partition + 1 if partitions is None else partitions
    if count <= parsed.partition:
        raise Misuse(Code.BAD_ARGUMENT, f"{count} partitions: the address names number {parsed.partition}")
    return cast(list[str], _client().ConfluentPartitions(parsed).create(count, timeout))


def _parsed(address: str | KafkaAddress) -> KafkaAddress:
    return KafkaAddress.parse(address) if isinstance(address, str) else address


def _client() -> Any:
    try:
        return importlib.import_module("escrowmq.log.kafka.cluster.confluent")
    except ModuleNotFoundError as problem:
        if (problem.name or "").startswith("escrowmq"):
            raise
        raise missing_package(problem.name or "", "a log in Kafka", "kafka") from problem
