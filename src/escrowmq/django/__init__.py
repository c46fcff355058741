"""Django: outbox, barrier and receive log inside ``transaction.atomic``, a backend for tasks, admin pages, commands.

Add ``"escrowmq.django"`` to ``INSTALLED_APPS`` and run ``manage.py migrate``. Names load at their first use; without
Django or SQLAlchemy they raise Misuse(MISSING_PACKAGE).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from escrowmq.platform.extras import from_extra

if TYPE_CHECKING:
    from escrowmq.django.database import Database, connection, engine_of
    from escrowmq.django.transactional import barrier, bind_tx, claim_batch_tx, claim_tx, send_batch_tx, send_tx

_HOMES = {
    "database": ("Database", "connection", "engine_of"),
    "transactional": ("barrier", "bind_tx", "claim_batch_tx", "claim_tx", "send_batch_tx", "send_tx"),
}
_LAZY = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Database",
    "barrier",
    "bind_tx",
    "claim_batch_tx",
    "claim_tx",
    "connection",
    "engine_of",
    "send_batch_tx",
    "send_tx",
]

__getattr__ = from_extra(
    __name__, _LAZY, needs={"django": "django", "sqlalchemy": "django"}, who="escrowmq.django.{name}"
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
