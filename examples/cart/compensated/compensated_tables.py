"""Two databases: the shop's, with its orders, and the cart's, with its effects."""

import json
from typing import Any

import sqlalchemy as sa

SHOP, CART = "compensated_shop", "compensated_cart"
ORDERS, KEYS = "orders", "order-keys"
"""The topic of the orders, and that of their unique keys."""
GROUP = "cart"
"""The consumer group: its marks say what has had its effect."""

shop = sa.MetaData()
orders = sa.Table(
    "orders",
    shop,
    sa.Column("id", sa.String(20), primary_key=True),
    sa.Column("message_id", sa.LargeBinary(16), nullable=False),
    sa.Column("customer", sa.String(20), nullable=False),
)

cart = sa.MetaData()
cleared = sa.Table(
    "cleared_carts",
    cart,
    # A number of its own, and no unique order: a second effect must be seen, not refused by the table.
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("order_id", sa.String(20), nullable=False),
    sa.Column("customer", sa.String(20), nullable=False),
    sa.Column("made_by", sa.String(20), nullable=False),
)


def customer_of(number: int) -> str:
    """Who gives order ``number``; every seventh order is refused, by a customer who has no money."""
    return "nobody" if number % 7 == 3 else f"customer-{number % 50}"


def body_of(order: str, customer: str) -> bytes:
    """The body of an order's message."""
    return json.dumps({"id": order, "customer": customer}).encode()


def clear_cart(connection: Any, body: bytes, made_by: str) -> None:
    """The effect of an order, inside the caller's transaction."""
    order = json.loads(body)
    row = {"order_id": order["id"], "customer": order["customer"], "made_by": made_by}
    connection.execute(sa.insert(cleared), row)
