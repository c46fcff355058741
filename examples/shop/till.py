"""A till: takes baskets through transactions 1 and 2 (3 if need be) and the payment, whatever the network does to
it."""

import uuid
from collections.abc import Iterable
from enum import StrEnum

import sqlalchemy as sa
from paying import PaymentRefused, pay
from placing import OrderFenced, OutOfStock, place_order, take_stock
from shop_databases import Databases
from shop_tables import Basket, Order, freezes, orders
from sweeps import Settled, release_orphan


class Fate(StrEnum):
    """What this example lets happen to a basket, so that every path is walked."""

    PAYS = "pays"
    FORGETS = "never pays"
    LOSES_ANSWER = "the answer of transaction 2 is lost, then pays"
    NEVER_ARRIVES = "transaction 2 never arrives"
    WALKS_AWAY = "gone after transaction 1"
    COMES_LATE = "transaction 2 comes after half an hour"


class Bought(StrEnum):
    """How far a basket came at the till."""

    PAID = "paid"
    UNPAID = "placed, not paid"
    NOT_PLACED = "not placed, stock given back at once"
    OUT_OF_STOCK = "refused, out of stock"
    ORPHANED = "stock frozen, no order"


def new_trans_id(number: int) -> str:
    """A transaction number that nobody ever had, of basket ``number``."""
    return f"{number:07d}-{uuid.uuid4().hex[:12]}"


def serve(databases: Databases, baskets: Iterable[tuple[int, Basket, Fate]], now_us: int) -> dict[Bought, list[str]]:
    """Take every basket as far as its fate lets it; the trans_ids by how far they came.

    A till that died is simply started again on the same baskets: an order that is there is not placed a second time.
    """
    done: dict[Bought, list[str]] = {how: [] for how in Bought}
    for number, basket, fate in baskets:
        with databases.shard(basket.user_id).connect() as order_db, databases.products.connect() as product_db:
            if fate in (Fate.WALKS_AWAY, Fate.COMES_LATE) and _frozen_before(product_db, number):
                continue
            trans_id = _placed_before(order_db, number) or new_trans_id(number)
            done[_buy(order_db, product_db, trans_id, basket, fate, now_us)].append(trans_id)
    return done


def _buy(
    order_db: sa.Connection, product_db: sa.Connection, trans_id: str, basket: Basket, fate: Fate, now_us: int
) -> Bought:
    try:
        placed = _there(order_db, trans_id) or place(order_db, product_db, trans_id, basket, fate, now_us)
    except OutOfStock:
        return Bought.OUT_OF_STOCK
    if placed is None:
        return Bought.ORPHANED
    if not placed:
        return Bought.NOT_PLACED
    if fate == Fate.FORGETS:
        return Bought.UNPAID
    try:
        pay(order_db, product_db, trans_id)
    except PaymentRefused:
        return Bought.UNPAID
    return Bought.PAID


def place(
    order_db: sa.Connection, product_db: sa.Connection, trans_id: str, basket: Basket, fate: Fate, now_us: int
) -> bool | None:
    """Transaction 1, 2 and, if 2 fails, 3. Whether there is an order now; None where the till walks away in between."""
    take_stock(product_db, trans_id, basket, now_us)
    if fate in (Fate.WALKS_AWAY, Fate.COMES_LATE):
        return None
    try:
        if fate == Fate.NEVER_ARRIVES:
            raise ConnectionError("no way to the order database")
        place_order(order_db, trans_id, basket, now_us)
        if fate == Fate.LOSES_ANSWER:
            raise ConnectionError("no answer from the order database")
    except OrderFenced:
        return False
    except (sa.exc.DBAPIError, ConnectionError):  # it may be there, it may not: transaction 3 finds out
        return release_orphan(order_db, product_db, trans_id) == Settled.HAS_ORDER
    return True


def _placed_before(order_db: sa.Connection, number: int) -> str | None:
    with order_db.begin():
        of_basket = orders.c.trans_id.startswith(f"{number:07d}-")
        return order_db.scalar(sa.select(orders.c.trans_id).where(of_basket, orders.c.state != Order.TIMED_OUT))


def _frozen_before(product_db: sa.Connection, number: int) -> bool:
    with product_db.begin():
        of_basket = freezes.c.trans_id.startswith(f"{number:07d}-")
        return product_db.scalar(sa.select(freezes.c.trans_id).where(of_basket).limit(1)) is not None


def _there(order_db: sa.Connection, trans_id: str) -> bool:
    with order_db.begin():
        return order_db.scalar(sa.select(orders.c.trans_id).where(orders.c.trans_id == trans_id)) is not None
