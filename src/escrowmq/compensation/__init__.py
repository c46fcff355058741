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
    from escrowmq.compensation.announcing import Announced as Announced
    from escrowmq.compensation.announcing import Announcing as Announcing
    from escrowmq.compensation.announcing import Prepared as Prepared
    from escrowmq.compensation.cases import Case as Case
    from escrowmq.compensation.cases import CaseState as CaseState
    from escrowmq.compensation.cases import count_cases as count_cases
    from escrowmq.compensation.cases import list_cases as list_cases
    from escrowmq.compensation.cases import purge_cases as purge_cases
    from escrowmq.compensation.cases import retry_cases as retry_cases
    from escrowmq.compensation.cases import settle_cases as settle_cases
    from escrowmq.compensation.effects import DatabaseEffects as DatabaseEffects
    from escrowmq.compensation.effects import consume as consume
    from escrowmq.compensation.feeds import GivenKeys as GivenKeys
    from escrowmq.compensation.feeds import TopicKeys as TopicKeys
    from escrowmq.compensation.halves import HalfSet as HalfSet
    from escrowmq.compensation.halves import HalfSetConsumer as HalfSetConsumer
    from escrowmq.compensation.journal import Journal as Journal
    from escrowmq.compensation.redis_effects import RedisEffects as RedisEffects
    from escrowmq.compensation.remedies import LookedUp as LookedUp
    from escrowmq.compensation.scheduler import Scheduler as Scheduler
    from escrowmq.compensation.sets.opening import open_sets as open_sets
    from escrowmq.compensation.sets.redis import RedisSets as RedisSets
    from escrowmq.compensation.sets.sql import SqlSets as SqlSets
    from escrowmq.compensation.statistics import Report as Report
    from escrowmq.compensation.statistics import Statistics as Statistics

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

__all__ = [*_LAZY]

__getattr__ = from_extra(__name__, _LAZY, needs={"sqlalchemy": "outbox", "redis": "redis"}, who="compensation.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
