"""Half messages without check-back, repaired by two sets of ids: what was announced less what had its effect.

The producer ends its transactions one way and announces each committed one by its id, in a second topic. Whoever handles a
message records its id in the *commit set*, together with the effect; whoever reads the announcements records them in the *half set*.
On a schedule half − commit is taken: each id in it is looked up and handled, once, however often it is found.

Names load when they are first used; without the package that they need they raise Misuse(MISSING_PACKAGE).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from escrowmq.errors import Code, Misuse

if TYPE_CHECKING:
    from escrowmq.compensation.announcing import Announced, Announcing, Prepared
    from escrowmq.compensation.sets.opening import open_sets
    from escrowmq.compensation.sets.redis import RedisSets
    from escrowmq.compensation.sets.sql import SqlSets

_HOMES = {
    "announcing": ("Announcing", "Announced", "Prepared"),
    "sets.opening": ("open_sets",),
    "sets.redis": ("RedisSets",),
    "sets.sql": ("SqlSets",),
}
_LAZY = {name: home for home, names in _HOMES.items() for name in names}
_EXTRAS = {"sqlalchemy": "outbox", "redis": "redis"}

__all__ = [  # noqa: RUF022  # grouped, not sorted
    # the producer
    "Announcing",
    "Announced",
    "Prepared",
    # where the sets live
    "open_sets",
    "RedisSets",
    "SqlSets",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'escrowmq.compensation' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"escrowmq.compensation.{_LAZY[name]}"), name)
    except ModuleNotFoundError as problem:
        package = (problem.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        text, hint = (
            f"compensation.{name} needs {package}, which is not installed",
            f'python -m pip install "escrowmq[{_EXTRAS[package]}]"',
        )
        raise Misuse(Code.MISSING_PACKAGE, text, hint) from problem
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
