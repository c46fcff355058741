"""Interface of the log to Kafka: one partition to send to and read from.
Implemented by ``cluster/confluent.py``, and in memory by ``escrowmq.testing.partitions``."""

from __future__ import annotations

from typing import Protocol

UNKNOWN_OFFSET = -1  # in an acknowledgement: the record is stored at an offset that Kafka did not report
END = 1 << 62  # an offset after any record


class Partition(Protocol):
    """One partition, as one opener has it. Records are stored in the order in which one opener sends them, each once;
    after the first failure, no later record is stored. Any thread may call any method; only one at a time
    ``acknowledged``, and ``read``. Errors of all: Denied(DENIED), Rejected(UNKNOWN_TOPIC), Unknown(CLOSED) after
    ``close``, Corrupt(LOG_FAILED) for a producer that has ended."""

    @property
    def name(self) -> str: ...  # for display: ``TOPIC/PARTITION``
    def produce(self, number: int, record: bytes) -> None:
        """Start sending a record, acknowledged under ``number``. Blocks while the memory for these is full."""

    def acknowledged(self, timeout: float) -> list[tuple[int, int]]:
        """Return new acknowledgements: (number, offset or :data:`UNKNOWN_OFFSET`), in any order; wait up to ``timeout``
        s for one. Corrupt(LOG_FAILED) if the producer has ended: unacknowledged records may be stored, now or later."""

    def read(self, start: int, end: int = END, timeout: float = 0.0) -> list[tuple[int, bytes]]:
        """Read available records from offset ``start`` on, below ``end``, in order without a gap.
        Waits up to ``timeout`` seconds for the first. Raises Rejected(RANGE_PURGED) if ``start`` is below the first
        record, Corrupt(DAMAGED) if it is after the end: Kafka lost records."""

    def rest(self) -> None:
        """Stop reading ahead until the next ``read``: the leader has sent the records itself and need not read them."""

    def ends(self, timeout: float) -> tuple[int, int]:
        """Query the offsets of the first stored and of the next record. Raises Unknown(TIMED_OUT) if unanswered."""

    def delete_before(self, offset: int, timeout: float = 30.0) -> None:
        """Delete all records below ``offset`` permanently. Raises Unknown(TIMED_OUT) if the outcome is unknown."""

    def close(self) -> None: ...  # idempotent; unacknowledged records may or may not be stored


class Partitions(Protocol):
    """Provider of the two partitions of one shard."""

    @property
    def name(self) -> str: ...  # of their location, for display
    def check(self, timeout: float = 30.0) -> str:
        """Check that the topics exist with suitable settings; return the id of their cluster, which is independent of
        host names. Raises Misuse(BAD_SETTING) with the setting and its right value, or for an invalid certificate;
        Rejected(UNKNOWN_TOPIC); Denied(DENIED); Unknown(TIMED_OUT), with the known cause; Unknown(CLOSED)."""

    def log(self) -> Partition: ...  # each call is a separate opener
    def base(self) -> Partition: ...  # of base snapshots: the same partition of the topic ``TOPIC.base``
    def close(self) -> None: ...  # idempotent; threads waiting for Kafka soon get Unknown(CLOSED)
