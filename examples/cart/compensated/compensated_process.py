"""One process of the example: ``python compensated_process.py NAME CONFIG`` (JSON). It ends when its standard input
does.

It tells on its standard output, a line each, when it is ready, and the shop how many orders it has dealt with.
"""

import contextlib
import json
import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from compensated_tables import GROUP, KEYS, ORDERS, body_of, clear_cart, customer_of, orders
from lossy_link import LossyLink

import escrowmq as mq
from escrowmq import compensation
from escrowmq.client.bus import Bus
from escrowmq.connecting import links
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.escrow import EscrowTarget
from escrowmq_lab.databases import open_engine

SHOP_ID = uuid.UUID("6a1c1d5e-8f0b-5d0a-9e57-5b1f6f7b2c11")
"""Names the shop's orders: an order has the same unique key whenever it is sent."""

QUICK = {"grace": 1.0, "lease": 5.0, "retry_after": 1.0, "max_attempts": 100}
"""Nothing has to be waited for as long as in earnest; a broker that is killed here is back at once, so no case is given
up.
"""


class NoMoney(Exception):
    """The customer cannot pay: the order is not placed."""


def tell(word: str) -> None:
    print(word, flush=True)


def shop(config: dict[str, Any]) -> None:
    """Places orders up to the number that comes on standard input. A share of its confirms is lost on the way."""
    database = open_engine(config["shop"])
    lossy = [LossyLink(link, config["share"], Path(config["lost"])) for link in links(config["broker"], {})]
    with Bus(lossy) as bus:
        producer = bus.producer("shop", unasked=True, confirm="oneway", timeout=10.0)
        announcing = compensation.Announcing(producer, KEYS, database=database, on_failure="rollback")
        tell("ready")
        done = 0
        for line in sys.stdin:
            for number in range(done, int(line)):
                place(announcing, database, number)
                tell(f"placed {number + 1}")
            done = int(line)


def place(announcing: Any, database: sa.Engine, number: int) -> None:
    """Place order ``number`` unless it is placed, whatever the broker does."""
    order, customer = f"o-{number:06d}", customer_of(number)
    message_id = uuid.uuid5(SHOP_ID, order)
    message = mq.Message(ORDERS, body_of(order, customer), key=order, message_id=message_id.bytes)

    def business(session: Any) -> None:
        if customer == "nobody":
            raise NoMoney(order)
        row = {"id": order, "message_id": message_id.bytes, "customer": customer}
        session.execute(sa.insert(orders), row)

    while not is_placed(database, order):
        try:
            announcing.send(message, business).check()
        except NoMoney:
            return
        except mq.Rejected as problem:
            if problem.code is mq.Code.CONFLICT:  # refused by the customer's bank before this process was started again
                return
            raise
        except (mq.EscrowError, sa.exc.DBAPIError) as problem:  # placed or not: look, and try again
            logging.info("order %s: %s", order, problem)


def is_placed(database: sa.Engine, order: str) -> bool:
    """Whether the order is in the shop's database."""
    with database.connect() as connection:
        return connection.scalar(sa.select(orders.c.id).where(orders.c.id == order)) is not None


def relay(config: dict[str, Any]) -> None:
    """Sends the keys that the shop has announced in its database."""
    database = open_engine(config["shop"])
    target = EscrowTarget(config["broker"])
    with closing(target), Relay(database, target, workers=1, lease=1.0, poll_interval=0.05, backoff_max=0.5):
        tell("ready")
        sys.stdin.read()


def cart(config: dict[str, Any]) -> None:
    """Handles orders: the effect, its mark and the entry of the commit set."""
    database = open_engine(config["cart"])
    with mq.connect(config["broker"]) as bus, closing(compensation.open_sets(config["sets"], GROUP)) as sets:
        consumer = bus.consumer(GROUP, [ORDERS])

        def handle(session: Any, message: Any) -> None:
            clear_cart(session, message.body, "message")

        with in_background(lambda: compensation.consume(consumer, database, sets, handle), consumer.close):
            tell("ready")
            sys.stdin.read()


def keys(config: dict[str, Any]) -> None:
    """Records the announced keys in the half set."""
    database = open_engine(config["cart"])
    with mq.connect(config["broker"]) as bus, closing(compensation.open_sets(config["sets"], GROUP)) as sets:
        consumer = compensation.HalfSetConsumer(bus, KEYS, database, sets)
        stop = threading.Event()
        with in_background(lambda: consumer.run(stop), stop.set):
            tell("ready")
            sys.stdin.read()


def scheduler(config: dict[str, Any]) -> None:
    """Repairs what the two sets differ by."""
    database = open_engine(config["cart"])
    with mq.connect(config["broker"]) as bus, closing(compensation.open_sets(config["sets"], GROUP)) as sets:

        def handle(session: Any, message: Any) -> None:
            clear_cart(session, message.body, "scheduler")

        work = compensation.Scheduler(bus, database, sets, topics=ORDERS, keys=KEYS, handler=handle, **QUICK)
        stop = threading.Event()
        with work, in_background(lambda: work.run(0.5, stop), stop.set):
            tell("ready")
            sys.stdin.read()


@contextlib.contextmanager
def in_background(work: Callable[[], object], stop: Callable[[], object]) -> Iterator[None]:
    """Run ``work`` beside the block; at its end ``stop`` it. If it fails, so does the process."""

    def run() -> None:
        try:
            work()
        except BaseException:
            logging.exception("this process cannot go on")
            os._exit(1)

    with ExitStack() as stack:
        thread = threading.Thread(target=run)
        stack.callback(thread.join)
        stack.callback(stop)
        thread.start()
        yield


PARTS = {"shop": shop, "relay": relay, "cart": cart, "keys": keys, "scheduler": scheduler}

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    PARTS[sys.argv[1].partition("-")[0]](json.loads(sys.argv[2]))
