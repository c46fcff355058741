"""An order clears its cart, also when the program is killed between its database commit and its COMMIT."""

import argparse
import os
import signal
import sqlite3
from pathlib import Path

import escrowmq as mq


def open_shop(folder: Path) -> sqlite3.Connection:
    database = sqlite3.connect(folder / "shop.db", check_same_thread=False)
    database.executescript(
        """
        CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, customer TEXT, transaction_id TEXT);
        CREATE TABLE IF NOT EXISTS cleared_carts (order_id TEXT PRIMARY KEY, customer TEXT);
        """
    )
    return database


def place_order(producer: mq.Producer, database: sqlite3.Connection, order: str, customer: str, crash: bool) -> None:
    with producer.transaction() as txn:
        txn.send("orders", customer.encode(), key=order)  # in escrow: durable, and nobody can see it
        with database:  # the local transaction
            database.execute("INSERT INTO orders VALUES (?, ?, ?)", (order, customer, str(txn.id)))
        if crash:
            print(f"order {order} is in the database; killed before its COMMIT", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"order {order} is placed")


def main(folder: Path, order: str | None, customer: str, crash: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    database = open_shop(folder)

    def decide(check: mq.Check) -> mq.Outcome:
        """The broker asks what became of a transaction: look in the database."""
        found = database.execute(
            "SELECT id FROM orders WHERE transaction_id = ?", (str(check.transaction_id),)
        ).fetchone()
        print(
            f"asked about {check.messages[0].key}: " + ("it is in the database" if found else "there is no such order")
        )
        return mq.COMMIT if found else mq.ROLLBACK

    with mq.connect(f"file:{folder / 'broker'}", transaction_timeout=1, check_interval=1) as bus:
        producer = bus.producer("shop", checker=decide)
        producer.wait_until_listening()
        if order is not None:
            place_order(producer, database, order, customer, crash)
        for message in bus.consumer("cart", ["orders"]).messages(idle_timeout=3):
            with database:  # the key makes a message that comes twice have one effect
                row = (message.key, message.body.decode())
                database.execute("INSERT OR IGNORE INTO cleared_carts VALUES (?, ?)", row)
            message.ack()
            print(f"the cart of {message.body.decode()} is cleared for order {message.key}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the database and the broker's data live")
    parser.add_argument("--order", help="place this order first")
    parser.add_argument("--customer", default="ann")
    parser.add_argument("--crash", action="store_true", help="die between the database commit and the COMMIT")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.order, arguments.customer, arguments.crash)
