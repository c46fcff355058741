"""Half messages without check-back: two sets of ids, announced and handled, and a scheduler that repairs their
difference.

The producer ends its transactions one way and announces each committed one by its id, in a second topic. Consumers of
the messages record the id in the *commit set*, together with the effect. Consumers of the announcements record it in
the *half set*. A scheduler periodically takes half − commit: it looks up each id and handles it, once, however often it
is found.

Names load on first use; without SQLAlchemy (or redis) they raise Misuse(MISSING_PACKAGE).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from escrowmq.platform.extras import from_extra

if TYPE_CHECKING:
    from escrowmq.compensation.announcing import Announced, Announcing, Prepared
    from escrowmq.compensation.cases import (
        Case,
        CaseState,
        count_cases,
        list_cases,
        purge_cases,
        retry_cases,
        settle_cases,
    )
    from escrowmq.compensation.effects import DatabaseEffects, consume
    from escrowmq.compensation.feeds import GivenKeys, TopicKeys
    from escrowmq.compensation.halves import HalfSet, HalfSetConsumer
    from escrowmq.compensation.journal import Journal
    from escrowmq.compensation.redis_effects import RedisEffects
    from escrowmq.compensation.remedies import LookedUp
    from escrowmq.compensation.scheduler import Scheduler
    from escrowmq.compensation.sets.opening import open_sets
    from escrowmq.compensation.sets.redis import RedisSets
    from escrowmq.compensation.sets.sql import SqlSets
    from escrowmq.compensation.statistics import Report, Statistics

_HOMES = {
    "cases": ("Case", "CaseState", "count_cases", "list_cases", "purge_cases", "retry_cases", "settle_cases"),
    "effects": ("DatabaseEffects", "consume"),
    "feeds": ("GivenKeys", "TopicKeys"),
    "halves": ("HalfSet", "HalfSetConsumer"),
    "journal": ("Journal",),
    "redis_effects": ("RedisEffects",),
    "remedies": ("LookedUp",),
    "scheduler": ("Scheduler",),
    "announcing": ("Announcing", "Announced", "Prepared"),
    "sets.opening": ("open_sets",),
    "sets.redis": ("RedisSets",),
    "sets.sql": ("SqlSets",),
    "statistics": ("Report", "Statistics"),
}
_LAZY = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022  # grouped, not sorted
    # the producer
    "Announcing",
    "Announced",
    "Prepared",
    # set stores
    "open_sets",
    "RedisSets",
    "SqlSets",
    # the consumers
    "consume",
    "RedisEffects",
    "HalfSetConsumer",
    "HalfSet",
    "GivenKeys",
    "TopicKeys",
    # the scheduler
    "Scheduler",
    "DatabaseEffects",
    "LookedUp",
    "Report",
    "Statistics",
    "Journal",
    # operators
    "Case",
    "CaseState",
    "count_cases",
    "list_cases",
    "purge_cases",
    "retry_cases",
    "settle_cases",
]


__getattr__ = from_extra(__name__, _LAZY, needs={"sqlalchemy": "outbox", "redis": "redis"}, who="compensation.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
