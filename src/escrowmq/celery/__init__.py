"""Celery on EscrowMQ: a kombu transport with leases, and tasks that are sent if and only if a database transaction
commits (the extra ``celery``).

Importing this module makes ``broker_url="escrow://HOST:PORT"`` and ``escrows://`` known to Celery. Without the import,
``broker_transport="escrowmq.celery:Transport"`` does the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from escrowmq.platform.extras import from_extra, missing_package

try:
    from kombu.transport import TRANSPORT_ALIASES
except ModuleNotFoundError as problem:
    raise missing_package("kombu", "escrowmq.celery") from problem

if TYPE_CHECKING:
    from escrowmq.celery.transactions import atomic
    from escrowmq.celery.transport import Transport

__all__ = ["Transport", "atomic"]

TRANSPORT_ALIASES |= dict.fromkeys(("escrow", "escrows"), "escrowmq.celery.transport:Transport")

_NEEDS = {"kombu": "celery", "celery": "celery", "sqlalchemy": "celery"}
__getattr__ = from_extra(
    __name__, {"Transport": "transport", "atomic": "transactions"}, needs=_NEEDS, who="escrowmq.celery"
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
