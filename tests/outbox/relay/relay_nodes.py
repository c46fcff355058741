"""Processes of the kill matrix, forked by a zygote: a sender that changes its business table and its outbox in one
transaction, a receiver whose effect and claim are one transaction, and the commands that serve and relay. They go on
until they are told to stop, or die where they are told to.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

import escrowmq as mq
from escrowmq import outbox
from escrowmq.cli.main import main as cli
from escrowmq.errors import EscrowError
from escrowmq.platform.failpoints import reach

KEYS = 4
TOPICS = ("orders", "late")
"""Orders go to either; the broker refuses the second until somebody makes it."""

metadata = sa.MetaData()
business = sa.Table("business", metadata, sa.Column("number", sa.Integer, primary_key=True, autoincrement=False))
effects = sa.Table(
    "effects",
    metadata,
    sa.Column("place", sa.Integer, primary_key=True, autoincrement=True),  # no unique number: a repeat would show
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("key", sa.String(16)),
)
stopping = threading.Event()


def identity(number: int) -> str:
    return f"order-{number}"


def engine_at(url: str) -> sa.Engine:
    if not url.startswith("sqlite"):
        return sa.create_engine(url)
    return sa.create_engine(url, connect_args={"timeout": 60.0})


def send(database: str, pause: float) -> None:
    """Orders by number from the first that is missing; every fifth transaction is rolled back once, and done again."""
    engine = engine_at(database)
    with engine.connect() as connection:
        number = (connection.scalar(sa.select(sa.func.max(business.c.number))) or 0) + 1
    doubts = 0
    while not stopping.wait(pause):
        try:
            with engine.connect() as connection, connection.begin() as transaction:
                connection.execute(sa.insert(business).values(number=number))
                reach("sender.changed")
                key = f"k{number % KEYS}" if number % 7 else None
                topic = TOPICS[number % 11 == 0]
                outbox.send_tx(connection, topic, str(number).encode(), key=key, message_id=identity(number))
                reach("sender.sent")
                if number % 5 == 0 and doubts < number:
                    doubts = number
                    transaction.rollback()
                    continue
        except DBAPIError:
            continue  # the database is locked, or away
        reach("sender.committed")
        number += 1


def receive(database: str, broker: str) -> None:
    """Each message in a transaction of its own: claim, effect, commit; then the acknowledgement."""
    engine = engine_at(database)
    with mq.connect(broker) as bus:
        while not stopping.is_set():
            try:
                consumer = bus.consumer("effects", list(TOPICS), ordered=True)
                break
            except EscrowError:
                stopping.wait(0.1)
        while not stopping.is_set():
            try:
                for message in consumer.receive(20, wait=0.2):
                    handle(engine, message)
            except (EscrowError, DBAPIError):
                stopping.wait(0.05)


def handle(engine: sa.Engine, message: Any) -> None:
    reach("receiver.received")
    with engine.begin() as connection:
        first = outbox.claim_tx(connection, message, group="effects")
        reach("receiver.claimed")
        if first:
            connection.execute(sa.insert(effects).values(number=int(message.body), key=message.key))
            reach("receiver.affected")
    reach("receiver.committed")
    message.ack()
    reach("receiver.acknowledged")


def stoppable() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())


def sender(database: str, pause: float) -> None:
    """The role of who sends."""
    stoppable()
    send(database, pause)


def receiver(database: str, broker: str) -> None:
    """The role of who receives."""
    stoppable()
    receive(database, broker)


def command(line: list[str]) -> None:
    """The command ``escrowmq`` with these words, to its end."""
    sys.argv = ["escrowmq", *line]
    cli()


for name in ("broker.serving.serve", "outbox.relay", "outbox.targets.opening"):  # what commands import when they run
    importlib.import_module(f"escrowmq.{name}")
for name in ("psycopg", "pymysql"):
    with suppress(ImportError):
        importlib.import_module(name)
