"""The shop: places orders with transactional messages and answers the broker's check-backs. One order is one database
transaction and one message transaction, whose two messages (to the cart and the points service) become visible
together, or never. Tills work concurrently; each waits for its own order."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from escrowmq.client.producing.producer import Producer
from escrowmq.demo.databases import COMMITTED, ORDER_COLUMNS, ORDERS_DB, ROLLED_BACK, Database, insert
from escrowmq.errors import EscrowError
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN, Check, Outcome
from escrowmq.platform.clock import now_us

GROUP = "shop"
ORDERS_TOPIC, POINTS_TOPIC = "orders", "points"
AFTER_DATABASE_COMMIT = "between the database commit and the COMMIT"

Order = dict[str, Any]


class OrderCancelled(Exception):
    """Rejection of an order by its local transaction."""


class OrdersDatabase(Database):
    """The database ``orders.db``: orders, and the outcome of each transaction; one database transaction per order."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, ORDERS_DB)

    def placed(self) -> set[str]:
        """Return the ids of all orders."""
        with self.using() as connection:
            return {row[0] for row in connection.execute("SELECT order_id FROM orders")}

    def place(self, order: Order, transaction_id: str) -> None:
        """Run the local transaction. Raises OrderCancelled, or IntegrityError if a check-back has settled it before."""
        with self.transaction() as connection:
            insert(connection, "orders", order["order_id"], *(order[name] for name in ORDER_COLUMNS), transaction_id)
            insert(connection, "trans_barrier", transaction_id, order["order_id"], COMMITTED)
            if order["cancelled"]:
                raise OrderCancelled(order["order_id"])

    def outcome(self, transaction_id: str, order_id: str | None) -> Outcome:
        """Return the outcome of a transaction; one without a trace is settled as rolled back."""
        with self.using() as connection:
            insert(connection, "trans_barrier", transaction_id, order_id, ROLLED_BACK, repeat_ok=True)
            look = "SELECT outcome FROM trans_barrier WHERE transaction_id = ?"
            row = connection.execute(look, (transaction_id,)).fetchone()
        return COMMIT if row[0] == COMMITTED else ROLLBACK


class Shop:
    """Places orders with several tills. ``report`` gets every event; it may end the process, or never return."""

    def __init__(self, producer: Producer, database: OrdersDatabase, report: Callable[..., None]) -> None:
        self._producer = producer
        self._database = database
        self._report = report
        self._running: set[str] = set()
        self._stop = threading.Event()
        producer.checker(self.answer)

    def stop(self) -> None:
        """Stop each till after its current order."""
        self._stop.set()

    def answer(self, check: Check) -> Outcome:
        """Answer a check-back from the orders database, unless a till is still processing the order."""
        transaction_id = str(check.transaction_id)
        running = transaction_id in self._running
        outcome = UNKNOWN if running else self._database.outcome(transaction_id, check.messages[0].key)
        self._report("asked", transaction=transaction_id, attempt=check.attempt, answer=outcome.name.lower())
        return outcome

    def serve(self, orders: Iterable[Order], tills: int, stop_at: set[str]) -> None:
        """Place all orders, ``tills`` at a time; at those in ``stop_at`` ``report`` gets the event "at failpoint"."""
        with ThreadPoolExecutor(tills, "till") as pool:
            for done in [pool.submit(self.place_with_retry, order, order["order_id"] in stop_at) for order in orders]:
                done.result()

    def place_with_retry(self, order: Order, stop_there: bool = False) -> None:
        """Place an order; retry if the broker was unreachable before the database commit."""
        while not self._stop.is_set():
            begun_us = now_us()
            try:
                placed = self.place(order, stop_there)
            except EscrowError as problem:
                self._report("retry", order=order["order_id"], code=problem.code.name)
                self._stop.wait(0.05)
            except sqlite3.IntegrityError:  # a check-back came first and settled this attempt as rolled back
                self._report("retry", order=order["order_id"], code="SETTLED_BY_CHECK")
            else:
                self._report("placed" if placed else "cancelled", order=order["order_id"], begun_us=begun_us)
                return

    def place(self, order: Order, stop_there: bool = False) -> bool:
        """Place one order once. Returns True if it is in the database, False if it was cancelled. Raises EscrowError if
        it is in neither state. Once it is in the database, the shop may ignore a COMMIT without a response: the broker
        will send a check-back, and :meth:`answer` knows the outcome."""
        body = _body(order, ORDER_COLUMNS)
        points = _body(order, ("customer_id", "points"))
        placed = False
        running: str | None = None
        try:
            with self._producer.transaction() as txn:
                txn.send(ORDERS_TOPIC, body, key=order["order_id"], tag=order["country"])
                self._running.add(running := str(txn.id))
                txn.send(POINTS_TOPIC, points, key=order["order_id"])
                self._database.place(order, running)
                placed = True
                if stop_there:
                    self._report("at failpoint", where=AFTER_DATABASE_COMMIT, order=order["order_id"])
        except OrderCancelled:
            return False
        except EscrowError:
            if not placed:
                raise
        finally:
            self._running.discard(running or "")
        return True


def _body(order: Order, columns: Iterable[str]) -> bytes:
    return json.dumps({"order_id": order["order_id"], **{name: order[name] for name in columns}}).encode()
