"""What each side writes down in its own database, for the check at the end: by id and content, never by count.

A producer writes three things about an id: that it *intends* to place it (in a transaction of its own, before anything
else), the *business* row (in the local transaction of the mode: it stands if and only if that transaction committed, so
it is the truth), and that it was *confirmed* (afterwards, when the mode said that all is done). A consumer writes an
*effect* in the transaction of the mode's mark. No effect is refused or overwritten here: one that happens twice stands
twice.

The body of a message follows from its id (:func:`body_of`), so an effect tells by the hash of what it got whether the
content is right.
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
"""Bytes of a body beside its id."""


def body_of(identity: str) -> bytes:
    """Return the body of the message with this id: the id, a space, and filler that nobody could guess."""
    return identity.encode() + b" " + hashlib.shake_128(identity.encode()).digest(FILLER // 2).hex().encode()


def id_of(body: bytes) -> str:
    """Return the id that a body claims; what is no body gives some text, whose hash will be wrong."""
    return body.partition(b" ")[0].decode(errors="replace")[:96]


def hash_of(body: bytes) -> bytes:
    """Eight bytes that tell whether a body is what :func:`body_of` made."""
    return hashlib.blake2b(body, digest_size=8).digest()


def message_id_of(identity: str) -> bytes:
    """Return the 16 bytes that name the message of this id at the brokers, however often it is sent."""
    return hashlib.blake2b(identity.encode(), digest_size=16).digest()


class Books:
    """The books of one node. Thread-safe; errors are SQLAlchemy's."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def make(self) -> None:
        """Make the tables where they are not there yet."""
        metadata.create_all(self._engine)

    def intend(self, mode: str, ids: Sequence[str], *, dooms: bool = False) -> None:
        """Before anything else is done about ``ids``; ``dooms``: their business will be rolled back."""
        with self._engine.begin() as connection:
            connection.execute(intended.insert(), _rows(mode, ids, dooms=dooms))

    def enter(self, session: Any, mode: str, ids: Sequence[str]) -> None:
        """Write the business change in the local transaction of ``session`` (a session or a connection)."""
        session.execute(business.insert(), _rows(mode, ids))

    def confirm(self, mode: str, ids: Sequence[str]) -> None:
        """All is done, as far as the producer was told."""
        with self._engine.begin() as connection:
            connection.execute(confirmed.insert(), _rows(mode, ids))

    def effect(self, session: Any, mode: str, bodies: Iterable[bytes]) -> None:
        """Write the effects of messages with these bodies in the transaction of ``session``."""
        now = now_us()
        rows = [{"id": id_of(body), "mode": mode, "hash": hash_of(body), "at_us": now} for body in bodies]
        if rows:
            session.execute(effects.insert(), rows)


def now_us() -> int:
    """Wall time, microseconds since 1970: for the report, nothing is decided by it."""
    return time.time_ns() // 1000


def _rows(mode: str, ids: Sequence[str], **more: Any) -> list[dict[str, Any]]:
    now = now_us()
    return [{"id": identity, "mode": mode, "at_us": now, **more} for identity in ids]
