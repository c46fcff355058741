"""An order clears its cart, also when the program is killed between its database commit and its COMMIT."""

import argparse
import os
import signal
from pathlib import Path

import sqlalchemy as sa

import escrowmq as mq
from escrowmq import outbox

tables = sa.MetaData()
orders = sa.Table(
    "orders", tables, sa.Column("id", sa.String(20), primary_key=True), sa.Column("customer", sa.String(20))
)
cleared_carts = sa.Table(
    "cleared_carts",
    tables,
    sa.Column("order_id", sa.String(20), primary_key=True),
    sa.Column("customer", sa.String(20)),
)


def open_shop(folder: Path) -> sa.Engine:
    database = sa.create_engine(f"sqlite:///{folder / 'shop.db'}")
    tables.create_all(database)
    outbox.migrate(database)
    return database


def place_order(producer: mq.Producer, database: sa.Engine, order: str, customer: str, crash: bool) -> None:
    with producer.transaction() as txn:
        txn.send("orders", customer.encode(), key=order)  # in escrow: durable, and nobody can see it
        with database.begin() as connection:  # the local transaction
            connection.execute(orders.insert(), {"id": order, "customer": customer})
            outbox.bind_tx(connection, txn)  # the message stands and falls with it
        if crash:
            print(f"order {order} is in the database; killed before its COMMIT", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"order {order} is placed")


def clear_carts(consumer: mq.Consumer, database: sa.Engine) -> None:
    for message in consumer.messages(idle_timeout=3):
        with database.begin() as connection:
            if outbox.claim_tx(connection, message, group="cart"):  # a message that comes twice has one effect
                row = {"order_id": message.key, "customer": message.body.decode()}
                connection.execute(cleared_carts.insert(), row)
        message.ack()
        print(f"the cart of {message.body.decode()} is cleared for order {message.key}")


def main(folder: Path, order: str | None, customer: str, crash: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    database = open_shop(folder)
    barrier = outbox.Barrier(database)
    said = {mq.COMMIT: "it is in the database", mq.ROLLBACK: "there is no such order", mq.UNKNOWN: "it is being placed"}

    def decide(check: mq.Check) -> mq.Outcome:
        """The broker asks what became of a transaction: the barrier knows."""
        outcome = barrier(check)
        print(f"asked about {check.messages[0].key}: {said[outcome]}")
        return outcome

    with mq.connect(f"file:{folder / 'broker'}", transaction_timeout=1, check_interval=1) as bus:
        producer = bus.producer("shop", checker=decide)
        producer.wait_until_listening()
        if order is not None:
            place_order(producer, database, order, customer, crash)
        with bus.consumer("cart", ["orders"]) as consumer:
            clear_carts(consumer, database)
    database.dispose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the database and the broker's data live")
    parser.add_argument("--order", help="place this order first")
    parser.add_argument("--customer", default="ann")
    parser.add_argument("--crash", action="store_true", help="die between the database commit and the COMMIT")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.order, arguments.customer, arguments.crash)
