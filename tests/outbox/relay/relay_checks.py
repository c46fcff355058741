"""What relay tests share: messages in, rows out, and the judges: nothing lost, order per key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from escrowmq import outbox
from escrowmq.model import Message
from escrowmq.outbox.tables import State, trans_lane, trans_message, trans_relay
from escrowmq.testing.memory_target import Taken

PATIENCE = 60.0


def put(engine: sa.Engine, *messages: tuple[str | None, str] | Message) -> list[bytes]:
    """Commit messages, given as (key, body) or whole, in one transaction; their ids."""
    made = [m if isinstance(m, Message) else Message("orders", m[1].encode(), key=m[0]) for m in messages]
    with engine.begin() as connection:
        return outbox.send_batch_tx(connection, made)


def numbered(key: str | None, count: int, start: int = 0) -> list[tuple[str | None, str]]:
    """Messages of one key, whose bodies count up."""
    return [(key, str(number)) for number in range(start, start + count)]


def rows(engine: sa.Engine) -> list[Any]:
    """All rows of the outbox, by number."""
    with engine.connect() as connection:
        return list(connection.execute(sa.select(trans_message).order_by(trans_message.c.seq)).all())


def states(engine: sa.Engine) -> list[State]:
    """The state of every row."""
    return [State(row.state) for row in rows(engine)]


def left(engine: sa.Engine) -> set[bytes]:
    """The ids that are still in the outbox and not sent."""
    return {bytes(row.id) for row in rows(engine) if row.state not in (State.SENT, State.DONE)}


def bodies(taken: Iterable[Taken], key: str | None) -> list[str]:
    """The bodies of one key, in the order in which they came first."""
    return list(dict.fromkeys(t.body.decode() for t in taken if t.key == key))


def lost(committed: Iterable[bytes], taken: Iterable[bytes], engine: sa.Engine) -> set[bytes]:
    """The judge of I38 and I40: what was committed, and is neither sent nor waiting to be sent."""
    return set(committed) - set(taken) - left(engine)


def out_of_order(taken: Sequence[Taken]) -> list[str]:
    """The judge of I39: keys whose messages (bodies that count up) did not come in order, first comings only."""
    keys = {t.key for t in taken if t.key is not None}
    came = {key: [int(body) for body in bodies(taken, key)] for key in keys}
    return sorted(key for key, numbers in came.items() if numbers != sorted(numbers))


def expire_leases(engine: sa.Engine) -> None:
    """As if all relays had been silent for as long as their leases."""
    with engine.begin() as connection:
        connection.execute(sa.update(trans_lane).values(leased_until_us=1))
        connection.execute(sa.update(trans_relay).values(alive_until_us=1))


def eventually(condition: Callable[[], Any], what: str = "it did not come to pass", patience: float = PATIENCE) -> Any:
    """The first true value of ``condition``."""
    deadline = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.005)
    return found
