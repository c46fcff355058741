"""Placing an order: stock in one database, the order in another, and never an order without stock.

Transaction 1 takes the stock and freezes it. Transaction 2 places the order. If transaction 2 fails, nobody knows
whether it did: transaction 3 finds out and, where there is no order, gives the stock back at once
(``sweeps.release_orphan``).

Every function takes connections that have no transaction open, and opens its own.
"""

import json

import sqlalchemy as sa
from shop_tables import Basket, Freeze, Mark, Order, freezes, insert_new, order_marks, orders, products, users

from escrowmq.outbox import send_tx
from escrowmq.platform.failpoints import reach

MINUTE_US = 60_000_000
TIME_TO_PAY_US = 15 * MINUTE_US
EVENTS = "order-events"


class OutOfStock(Exception):
    """There are not enough pieces of a product; nothing was taken."""


class OrderFenced(Exception):
    """Too late: it was settled that there is no such order, and its stock was given back."""


def take_stock(product_db: sa.Connection, trans_id: str, basket: Basket, now_us: int) -> None:
    """Transaction 1: take every line of the basket from the stock and freeze it under ``trans_id``; or raise
    OutOfStock."""
    with product_db.begin():
        for product_id, amount in sorted(basket.lines.items()):  # always in this order: no deadlock between baskets
            take = (
                sa.update(products)
                .where(products.c.product_id == product_id, products.c.stock >= amount)
                .values(stock=products.c.stock - amount)
            )
            if product_db.execute(take).rowcount != 1:
                raise OutOfStock(product_id)
        frozen = {"trans_id": trans_id, "user_id": basket.user_id, "state": Freeze.FROZEN, "frozen_us": now_us}
        lines = [{**frozen, "product_id": product, "amount": amount} for product, amount in basket.lines.items()]
        product_db.execute(sa.insert(freezes), lines)
        reach("shop.stock-taken")
    reach("shop.stock-frozen")


def place_order(order_db: sa.Connection, trans_id: str, basket: Basket, now_us: int) -> None:
    """Transaction 2: the order, its user and the message about it. Raises OrderFenced if the stock is gone by now.

    Any other exception leaves it open whether the order exists: a commit whose answer was lost is still a commit.
    """
    with order_db.begin():
        if not insert_new(order_db, order_marks, trans_id=trans_id, mark=Mark.PLACED):
            raise OrderFenced(trans_id)
        order = {
            "trans_id": trans_id,
            "user_id": basket.user_id,
            "units": basket.units,
            "cents": basket.cents,
            "state": Order.UNPAID,
            "pay_by_us": now_us + TIME_TO_PAY_US,
            "settled": False,
        }
        order_db.execute(sa.insert(orders), order)
        insert_new(order_db, users, user_id=basket.user_id, spent_cents=0)
        tell(order_db, trans_id, "placed", basket.units)
        reach("shop.order-written")
    reach("shop.order-placed")


def tell(order_db: sa.Connection, trans_id: str, event: str, units: int) -> None:
    """Say what became of an order, inside the transaction in which it became so. The key keeps an order's events in
    order."""
    body = json.dumps({"trans_id": trans_id, "event": event, "units": units})
    send_tx(order_db, EVENTS, body.encode(), key=trans_id)
