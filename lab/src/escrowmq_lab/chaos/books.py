"""The books of each node in its own database, for the final check: by id and content, never by count.

A producer records three facts about an id: that it *intends* to place it (in a separate transaction, before anything
else), the *business* row (in the local transaction of the mode: it exists if and only if that transaction committed, so
it is the truth), and that it was *confirmed* (afterwards, when the mode reported success). A consumer records an
*effect* in the transaction of the mode's deduplication record. No effect is rejected or overwritten here: a repeated
effect has two rows.

The body of a message follows from its id (:func:`body_of`), so the hash in an effect shows whether the content is
right.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

metadata = sa.MetaData()

_ID = sa.String(96)
intended = sa.Table(
    "chaos_intended",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("mode", sa.String(24), nullable=False),
    sa.Column("dooms", sa.Boolean, nullable=False),  # its business will be rolled back on purpose
    sa.Column("at_us", sa.BigInteger, nullable=False),
)
business = sa.Table(
    "chaos_business",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("mode", sa.String(24), nullable=False),
    sa.Column("at_us", sa.BigInteger, nullable=False),
)
confirmed = sa.Table(
    "chaos_confirmed",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("mode", sa.String(24), nullable=False),
    sa.Column("at_us", sa.BigInteger, nullable=False),
)
effects = sa.Table(
    "chaos_effects",
    metadata,
    sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("id", _ID, nullable=False, index=True),
    sa.Column("mode", sa.String(24), nullable=False),
    sa.Column("hash", sa.LargeBinary(8), nullable=False),
    sa.Column("at_us", sa.BigInteger, nullable=False),
)

FILLER = 120
"""Bytes of a body in addition to its id."""


def body_of(identity: str) -> bytes:
    """Return the body of the message with this id: the id, a space, and unpredictable filler."""
    return identity.encode() + b" " + hashlib.shake_128(identity.encode()).digest(FILLER // 2).hex().encode()


def id_of(body: bytes) -> str:
    """Return the id that a body claims; for an invalid body some text, whose hash will be wrong."""
    return body.partition(b" ")[0].decode(errors="replace")[:96]


def hash_of(body: bytes) -> bytes:
    """Return eight bytes that show whether a body was made by :func:`body_of`."""
    return hashlib.blake2b(body, digest_size=8).digest()


def message_id_of(identity: str) -> bytes:
    """Return the 16-byte message id of this id at the brokers, the same for every send."""
    return hashlib.blake2b(identity.encode(), digest_size=16).digest()


class Books:
    """The books of one node. Thread-safe; errors are SQLAlchemy's."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def make(self) -> None:
        """Create the tables that do not exist."""
        metadata.create_all(self._engine)

    def intend(self, mode: str, ids: Sequence[str], *, dooms: bool = False) -> None:
        """Record the intention before any other work on ``ids``; ``dooms``: their business will be rolled back."""
        with self._engine.begin() as connection:
            connection.execute(intended.insert(), _rows(mode, ids, dooms=dooms))

    def enter(self, session: Any, mode: str, ids: Sequence[str]) -> None:
        """Record the business change, in the local transaction of ``session`` (a session or a connection)."""
        session.execute(business.insert(), _rows(mode, ids))

    def confirm(self, mode: str, ids: Sequence[str]) -> None:
        """Record that all is done, as reported to the producer."""
        with self._engine.begin() as connection:
            connection.execute(confirmed.insert(), _rows(mode, ids))

    def effect(self, session: Any, mode: str, bodies: Iterable[bytes]) -> None:
        """Record the effects of messages with these bodies, in the transaction of ``session``."""
        now = now_us()
        rows = [{"id": id_of(body), "mode": mode, "hash": hash_of(body), "at_us": now} for body in bodies]
        if rows:
            session.execute(effects.insert(), rows)


def now_us() -> int:
    """Return wall time, microseconds since 1970: for the report only, not for decisions."""
    return time.time_ns() // 1000


def _rows(mode: str, ids: Sequence[str], **more: Any) -> list[dict[str, Any]]:
    now = now_us()
    return [{"id": identity, "mode": mode, "at_us": now, **more} for identity in ids]
