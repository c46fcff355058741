"""The asyncio versions of the outbox functions, for AsyncSession, AsyncConnection and AsyncEngine.

Each takes what its blocking namesake takes, with an asynchronous session, connection or engine (psycopg, asyncpg,
aiosqlite, aiomysql) as the first argument; see :func:`escrowmq.outbox.awaiting.awaited`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from escrowmq.outbox import acts, attention, callbacks, consuming, handled, inbox, migrations, sending
from escrowmq.outbox.awaiting import AnyAsyncSession as AnyAsyncSession
from escrowmq.outbox.awaiting import awaited, engine_of, engine_or_connection_of, session_of
from escrowmq.outbox.barrier import binding

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

    from escrowmq.client.consuming.consumer import AsyncConsumer
    from escrowmq.client.consuming.received import AsyncReceived

# Inside your transaction
send_tx = awaited(sending.send_tx, session_of)
send_batch_tx = awaited(sending.send_batch_tx, session_of)
bind_tx = awaited(binding.bind_tx, session_of)
bind_batch_tx = awaited(binding.bind_batch_tx, session_of)
claim_tx = awaited(inbox.claim_tx, session_of)
claim_batch_tx = awaited(inbox.claim_batch_tx, session_of)
unclaim_tx = awaited(inbox.unclaim_tx, session_of)
confirm_tx = awaited(callbacks.confirm_tx, session_of)
confirm_batch_tx = awaited(callbacks.confirm_batch_tx, session_of)
check_schema = awaited(migrations.check_schema, session_of)

# With an engine, in transactions of their own
migrate = awaited(migrations.migrate, engine_or_connection_of)
mark_done = awaited(callbacks.mark_done, engine_of)
purge_seen = awaited(inbox.purge_seen, engine_of)
list_messages = awaited(attention.list_messages, engine_of)
show = awaited(attention.show, engine_of)
retry = awaited(attention.retry, engine_of)
discard = awaited(attention.discard, engine_of)
settle = awaited(attention.settle, engine_of)
list_acts = awaited(acts.list_acts, engine_of)
verify_acts = awaited(acts.verify_acts, engine_of)
list_marks = awaited(handled.list_marks, engine_of)
show_marks = awaited(handled.show_marks, engine_of)
forget_marks = awaited(handled.forget_marks, engine_of)
settle_marks = awaited(handled.settle_marks, engine_of)


async def consume(
    consumer: AsyncConsumer,
    database: async_sessionmaker[AsyncSession] | AsyncEngine,
    handler: Callable[[Any, AsyncReceived], Awaitable[object]],
    *,
    group: str | None = None,
    max_messages: int = 500,
    idle_timeout: float | None = None,
    within: Callable[[Any, Sequence[AsyncReceived]], Awaitable[object]] | None = None,
    after: Callable[[Sequence[AsyncReceived]], Awaitable[object]] | None = None,
    stop: consuming.Stop | None = None,
) -> int:
    """Consume as :func:`escrowmq.outbox.inbox.consume`, with coroutine functions ``handler``, ``within`` and ``after``.
    ``stop`` may be the ``is_set`` of an ``asyncio.Event``."""
    functions = (handler, within, after, claim_batch_tx, unclaim_tx)
    loop = consuming.Loop(consumer, database, *functions, group, stop, awaits=True)
    return await loop.run(max_messages, idle_timeout)
