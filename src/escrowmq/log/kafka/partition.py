"""The interface to Kafka: one partition to send to and to read. Implemented by ``cluster/confluent.py``, and in
memory by ``escrowmq.testing.partitions``.
"""

from __future__ import annotations

from typing import Protocol

UNKNOWN_OFFSET = -1
"""In an acknowledgement: the record is stored, and Kafka did not say where."""
END = 1 << 62
"""Behind any record."""


class Partition(Protocol):
    """One partition, as one opener has it. Records are kept in the order in which one opener sends them, each once, or
    everything ends: after the first failure nothing that was sent later is stored.

    Methods may be called from any thread; ``acknowledged`` and ``read`` each by one at a time. Errors of all of them:
    Denied(DENIED), Rejected(UNKNOWN_TOPIC), Unknown(CLOSED) after ``close``, Corrupt(LOG_FAILED) for a producer that
    has ended.
    """

    @property
    def name(self) -> str:
        """For people: ``TOPIC/PARTITION``."""

    def produce(self, number: int, record: bytes) -> None:
        """Begin to send a record, at once, behind those sent before; ``number`` comes back with its acknowledgement.
        Does not wait, unless the memory for what is not acknowledged is full."""

    def acknowledged(self, timeout: float) -> list[tuple[int, int]]:
        """Acknowledgements that have come: (number, offset or :data:`UNKNOWN_OFFSET`), in any order. Waits ``timeout``
        seconds at most for the first. Corrupt(LOG_FAILED) when the producer has ended: of what is not acknowledged
        nobody knows whether it is stored, or will be."""

    def read(self, start: int, end: int = END, timeout: float = 0.0) -> list[tuple[int, bytes]]:
        """Return records from offset ``start`` on, below ``end``, in their order without a gap, as many as are at
        hand; waits ``timeout`` seconds at most for the first.

        Rejected(RANGE_PURGED) if ``start`` is below the first record, Corrupt(DAMAGED) if it is behind the end:
        Kafka lost what it had.
        """

    def rest(self) -> None:
        """Read nothing ahead any more, until ``read`` is called again: who leads knows what is in the partition, for it
        comes from there."""

    def ends(self, timeout: float) -> tuple[int, int]:
        """Return the offset of the first record that is kept and the one that the next will get, asked of the
        partition now. Unknown(TIMED_OUT) if it does not answer."""

    def delete_before(self, offset: int, timeout: float = 30.0) -> None:
        """Delete all records below ``offset``, for ever. Unknown(TIMED_OUT) if it is not known to be done."""

    def close(self) -> None:
        """Let the connections go; what is not acknowledged may be stored, or not. Idempotent."""


class Partitions(Protocol):
    """Opens the two partitions of one shard."""

    @property
    def name(self) -> str:
        """For people: where they are."""

    def check(self, timeout: float = 30.0) -> str:
        """Look whether the topics are there and are kept as a log must be; the id of the cluster that has them,
        whatever its hosts are called.

        Misuse(BAD_SETTING) names the setting and what to set it to, or the certificate that does not check;
        Rejected(UNKNOWN_TOPIC); Denied(DENIED); Unknown(TIMED_OUT) if Kafka does not answer, with what is known of why;
        Unknown(CLOSED) after ``close``.
        """

    def log(self) -> Partition:
        """Return the log's own. Each call is an opener of its own."""

    def base(self) -> Partition:
        """Return the partition of base snapshots, the same one of the topic ``TOPIC.base``."""

    def close(self) -> None:
        """Close all that it gave: whoever waits for Kafka, in another thread, gets Unknown(CLOSED) soon. Idempotent."""
