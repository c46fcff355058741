"""A shop as a process, to be killed: each order is a business row, a mark, and a message; every third order fails and
goes back.

``python barrier_shop.py BROKER DATABASE TOPIC FIRST COUNT``, with ESCROWMQ_FAILPOINT saying where it dies.
"""

from __future__ import annotations

import sys

import sqlalchemy as sa
from barrier_race import orders
from sqlalchemy.orm import Session

import escrowmq as mq
from escrowmq.outbox import bind_tx
from escrowmq.platform import failpoints

QUICK = {"transaction_timeout": 0.2, "check_interval": 0.2, "check_max": 1_000_000}


class OutOfStock(Exception):
    """An order that fails."""


def place(producer: mq.Producer, engine: sa.Engine, topic: str, number: int) -> None:
    with producer.transaction() as txn:
        txn.send(topic, str(number).encode())
        failpoints.reach("shop.prepared")
        with Session(engine) as session, session.begin():
            session.execute(orders.insert(), {"id": number})
            bind_tx(session, txn)
            if number % 3 == 2:
                raise OutOfStock
        failpoints.reach("shop.committed")
    failpoints.reach("shop.done")


def main(broker: str, database: str, topic: str, first: int, count: int) -> None:
    engine = sa.create_engine(database)
    with mq.connect(broker, **(QUICK if broker.startswith("file:") else {})) as bus:
        # it knows nothing: on a busy machine it may be asked about a transaction that is not bound yet
        producer = bus.producer(topic, checker=lambda check: mq.UNKNOWN)
        for number in range(first, first + count):
            try:
                place(producer, engine, topic, number)
            except OutOfStock:
                pass
    engine.dispose()


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:6]))
