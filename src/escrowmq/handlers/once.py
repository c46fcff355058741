"""``once=``: the transaction that holds the effect of a handler together with the mark of its message.

The marks are those of :mod:`escrowmq.outbox.inbox`: the receive log of the consumer group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from escrowmq.errors import Code, Misuse
from escrowmq.platform.extras import missing_package


class Once:
    """Begins transactions and claims messages in them, blocking or to await, as its handler is."""

    def __init__(self, database: Any, annotations: Sequence[Any], awaits: bool, who: str) -> None:
        """``database`` is an Engine, an AsyncEngine, a sessionmaker of either, or an :class:`escrowmq.django.Database`;
        ``annotations`` are those of the handler's parameters. Raises Misuse(BAD_ARGUMENT) if they do not go together.
        """
        try:
            import sqlalchemy as sa
            from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
            from sqlalchemy.orm import Session, sessionmaker
        except ModuleNotFoundError as problem:
            raise missing_package(problem.name or "", f"{who} with once=") from problem
        session, connection = (AsyncSession, AsyncConnection) if awaits else (Session, sa.Connection)
        maker: Any = async_sessionmaker if awaits else sessionmaker
        self._awaits = awaits
        if getattr(database, "is_ambient", False) and not awaits:  # the handler finds the transaction by itself
            self.kind: Any = connection
            self.begin: Callable[[], Any] = database.begin
            return
        if not isinstance(database, (AsyncEngine if awaits else sa.Engine, maker)):
            wanted = "an AsyncEngine or async_sessionmaker" if awaits else "an Engine or sessionmaker"
            is_plain = "a coroutine function" if awaits else "a plain function"
            raise Misuse(Code.BAD_ARGUMENT, f"{who}: once={type(database).__name__}", f"{is_plain} needs {wanted}")
        known = [one for one in annotations if isinstance(one, type)]
        kinds = [one for one in known if issubclass(one, session) or one is connection]
        if len(kinds) != 1:
            text = f"{who}: once= gives one parameter the transaction, and {len(kinds)} are annotated with it"
            hint = (
                f"annotate one parameter with {session.__name__} or {connection.__name__}, and write the effect there"
            )
            raise Misuse(Code.BAD_ARGUMENT, text, hint)
        (self.kind,) = kinds
        if isinstance(database, maker):
            if self.kind is connection:
                text = f"{who}: a sessionmaker makes no {connection.__name__}"
                raise Misuse(Code.BAD_ARGUMENT, text, f"annotate {session.__name__}, or give the engine")
            self.begin = database.begin
        else:
            self.begin = database.begin if self.kind is connection else maker(database, class_=self.kind).begin

    async def claim(self, session: Any, messages: Sequence[Any], group: str) -> list[bool]:
        """Return for each message whether its effect is still to happen; marks it in the transaction of ``session``."""
        if self._awaits:
            from escrowmq.outbox import aio

            return list(await aio.claim_batch_tx(session, messages, group))
        from escrowmq.outbox.inbox import claim_batch_tx

        return claim_batch_tx(session, messages, group)
