"""Rules on which the fold of the log depends: those of a shard, and those of one producer group or topic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings that the fold of the log depends on. They are events themselves, so replay needs no settings."""

    transaction_timeout_us: int = 6_000_000
    check_interval_us: int = 30_000_000
    check_max: int = 15
    half_retention_us: int = 72 * 3600 * 1_000_000
    exhausted_rollback: bool = False
    reject_transactional: bool = False
    mixed_groups: bool = False
    auto_create_topics: bool = True
    default_queues: int = 4
    max_attempts: int = 16
    retry_backoff_us: int = 1_000_000
    retry_backoff_max_us: int = 300_000_000
    dedup_window_us: int = 3_600_000_000
    dedup_max: int = 1 << 20
    max_body_bytes: int = 4 << 20
    max_key_bytes: int = 1024
    max_tag_bytes: int = 128
    max_tags: int = 65_536
    max_properties_bytes: int = 32 << 10
    max_delay_us: int = 40 * 86400 * 1_000_000
    max_topics: int = 4096
    max_queues: int = 1024
    max_groups: int = 4096
    max_open_transactions: int = 4_000_000
    max_transaction_messages: int = 10_000
    max_leases: int = 10_000
    max_writers: int = 1_000_000
    max_sessions: int = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerRules:
    """One producer group's own rules instead of the shard's :class:`Rules`; None: nothing.

    ``kind`` is ``"plain"``, ``"transactional"`` or ``"mixed"``; None: what the group did first says it (or
    ``mixed_groups``).
    """

    kind: str | None = None
    transaction_timeout_us: int | None = None
    check_interval_us: int | None = None
    check_max: int | None = None
    exhausted_rollback: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRules:
    """One topic's own rules: how long messages stay after they became visible (None: as long as the log keeps
    them), and how many bytes each of its queues keeps at most (None: any)."""

    retention_us: int | None = None
    retention_bytes: int | None = None

    @property
    def is_own(self) -> bool:
        """Whether there is any."""
        return self.retention_us is not None or self.retention_bytes is not None
