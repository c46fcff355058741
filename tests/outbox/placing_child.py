"""Places orders and is killed in the middle: a process for ``test_outbox_kills``.

Called with a database's two URLs (blocking and to await). For every way of working and every place to die it forks; the
fork arms the failpoint, works on orders of its own, and dies by SIGKILL. Prints one JSON line a fork: way, place, and
the orders that were committed before.
"""

import asyncio
import json
import os
import signal
import sys

import sqlalchemy as sa
from outbox_world import Order, orders
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from escrowmq.outbox import aio, send_tx
from escrowmq.platform import failpoints

PLACES = {"ordered": 2, "sent": 2, "committed": 3}
"""Where to die the third time, and how many transactions are committed then."""


def by_core(url: str, number: int) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.insert(orders).values(id=number))
        failpoints.reach("ordered")
        send_tx(connection, "orders", b"placed", key=str(number))
        failpoints.reach("sent")
    failpoints.reach("committed")


def by_orm(url: str, number: int) -> None:
    engine = sa.create_engine(url)
    with Session(engine) as session:
        send_tx(session, "orders", b"placed", key=str(number))
        failpoints.reach("sent")
        session.add(Order(id=number))
        session.flush()
        failpoints.reach("ordered")
        session.commit()
    failpoints.reach("committed")


async def to_await(url: str, number: int) -> None:
    engine = create_async_engine(url)
    async with AsyncSession(engine) as session, session.begin():
        session.add(Order(id=number))
        await session.flush()
        failpoints.reach("ordered")
        async with session.begin_nested():
            await aio.send_tx(session, "orders", b"placed", key=str(number))
        failpoints.reach("sent")
    failpoints.reach("committed")


def main(url: str, url_to_await: str) -> None:
    ways = {
        "core": lambda number: by_core(url, number),
        "orm": lambda number: by_orm(url, number),
        "await": lambda number: asyncio.run(to_await(url_to_await, number)),
    }
    first = 0
    for way, place in ways.items():
        for name, committed in PLACES.items():
            child = os.fork()
            if not child:
                failpoints.arm(failpoints.parse(f"{name}:3"))
                for number in range(first, first + 5):
                    place(number)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            done = [str(number) for number in range(first, first + committed)]
            print(json.dumps({"way": way, "place": name, "killed": killed, "committed": done}), flush=True)
            first += 5


if __name__ == "__main__":
    main(*sys.argv[1:])
