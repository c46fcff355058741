"""Paying, and why no payment and no sweep can both win (the argument is in README.md)."""

import sqlalchemy as sa
from placing import tell
from shop_tables import Freeze, Order, freezes, orders, users

from escrowmq.platform.failpoints import reach


class PaymentRefused(Exception):
    """The order cannot be paid: there is none, its time is over, or its stock was given back."""


def pay(order_db: sa.Connection, product_db: sa.Connection, trans_id: str) -> bool:
    """Pay an order: True if this did it, False if it was paid before. Raises PaymentRefused; nothing was changed then.

    The guard: the freeze must still be frozen, and is held locked until the payment is committed.
    """
    with order_db.begin() as payment:
        order = order_db.execute(sa.select(orders).where(orders.c.trans_id == trans_id).with_for_update()).one_or_none()
        if order is not None and order.state == Order.PAID:
            return False
        if order is None or order.state != Order.UNPAID:
            raise PaymentRefused(f"the order is {order.state}" if order else "there is no such order")
        reach("shop.order-locked-to-pay")
        with product_db.begin():
            locked = sa.select(freezes.c.state).where(freezes.c.trans_id == trans_id).with_for_update()
            if set(product_db.scalars(locked)) != {Freeze.FROZEN}:
                raise PaymentRefused("its stock was given back")
            reach("shop.guard-passed")
            order_db.execute(sa.update(orders).where(orders.c.trans_id == trans_id).values(state=Order.PAID))
            spent = users.c.spent_cents + order.cents
            order_db.execute(sa.update(users).where(users.c.user_id == order.user_id).values(spent_cents=spent))
            tell(order_db, trans_id, "paid", order.units)
            reach("shop.payment-written")
            payment.commit()
            reach("shop.payment-committed")
    return True
