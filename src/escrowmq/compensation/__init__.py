"""Half messages without check-back, repaired by two sets of ids: what was announced less what had its effect.

The producer ends its transactions one way and announces each committed one by its id, in a second topic. Whoever
handles a message records its id in the *commit set*, together with the effect; whoever reads the announcements records
them in the *half set*. On a schedule half − commit is taken: each id in it is looked up and handled, once, however
often it is found.

Names load when they are first used; without SQLAlchemy (or redis) they raise Misuse(MISSING_PACKAGE).
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
    # where the sets live
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
    # a person
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
