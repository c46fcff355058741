"""The auditor: reads all of the shop's databases and says what is wrong. An empty list is the verdict that all is
well."""

import json
from collections import Counter
from dataclasses import dataclass

import sqlalchemy as sa
from shop_databases import Databases
from shop_tables import Freeze, Order, freezes, orders, parcels, products, users

from escrowmq.outbox.tables import trans_message
from escrowmq_lab.databases import snapshot


def stock_problems(product_db: sa.Connection) -> list[str]:
    """Of every product: what there was = what there is + what is frozen + what was sold. True at every moment."""
    gone = sa.select(freezes.c.product_id, sa.func.sum(freezes.c.amount).label("amount"))
    gone = gone.where(freezes.c.state != Freeze.UNSOLD).group_by(freezes.c.product_id).subquery()
    both = sa.select(products, sa.func.coalesce(gone.c.amount, 0).label("gone"))
    rows = product_db.execute(both.outerjoin_from(products, gone, products.c.product_id == gone.c.product_id))
    return [
        f"product {row.product_id}: {row.initial} at first, but {row.stock} left + {row.gone} frozen or sold"
        for row in rows
        if row.initial != row.stock + row.gone
    ]


def order_problems(databases: Databases, now_us: int) -> list[str]:
    """Orders against freezes, by trans_id: true at every moment, also between two steps of anything."""
    placed = _orders(databases)
    frozen = _freezes(databases)
    sold = [name for name in frozen.keys() - placed.keys() if frozen[name][0] == Freeze.SOLD]
    problems = [f"freeze {name}: {Freeze.SOLD}, but there is no order" for name in sold]
    for name, order in placed.items():
        state, units = frozen.get(name, ("missing", 0))
        allowed = {
            Order.UNPAID: {Freeze.FROZEN, Freeze.UNSOLD} if order.pay_by_us <= now_us else {Freeze.FROZEN},
            Order.PAID: {Freeze.FROZEN, Freeze.SOLD},
            Order.TIMED_OUT: {Freeze.UNSOLD},
        }[Order(order.state)]
        if state not in allowed or units != order.units:
            problems.append(f"order {name}: {order.state}, {order.units} pieces; its freeze: {state}, {units} pieces")
    return problems


def final_problems(databases: Databases) -> list[str]:
    """What must hold beyond that once both sweeps have been everywhere."""
    frozen = _freezes(databases)
    placed = _orders(databases)
    problems = [f"order {name}: still {Order.UNPAID}" for name, order in placed.items() if order.state == Order.UNPAID]
    problems += [f"order {name}: not settled" for name, order in placed.items() if not order.settled]
    problems += [
        f"freeze {name}: still {Freeze.FROZEN}" for name, (state, _) in frozen.items() if state == Freeze.FROZEN
    ]
    problems += [f"user {name}: spent {said}, but paid for {paid}" for name, said, paid in _spendings(databases)]
    for name, told in _events(databases).items():
        if name not in placed or told != ["placed", str(placed[name].state)]:
            problems.append(f"order {name}: its messages say {', '.join(told) or 'nothing'}")
    return problems


def delivery_problems(databases: Databases) -> list[str]:
    """What must hold beyond that once every message has arrived: one parcel for every paid order."""
    paid = {name for name, order in _orders(databases).items() if order.state == Order.PAID}
    with snapshot(databases.warehouse) as connection:
        sent = Counter(connection.scalars(sa.select(parcels.c.trans_id)))
    problems = [f"order {name}: paid, {sent[name]} parcels" for name in paid if sent[name] != 1]
    return problems + [f"order {name}: a parcel, but it is not paid" for name in sent.keys() - paid]


def verdict(databases: Databases, now_us: int) -> list[str]:
    """Everything that is wrong when all is done; empty if all is well."""
    with snapshot(databases.products) as product_db:
        problems = stock_problems(product_db)
    return [*problems, *order_problems(databases, now_us), *final_problems(databases), *delivery_problems(databases)]


def _freezes(databases: Databases) -> dict[str, tuple[str, int]]:
    """State and pieces by trans_id; a freeze whose lines disagree has both states."""
    found: dict[str, tuple[set[str], int]] = {}
    with snapshot(databases.products) as connection:
        for row in connection.execute(sa.select(freezes.c.trans_id, freezes.c.state, freezes.c.amount)):
            states, units = found.get(row.trans_id, (set(), 0))
            found[row.trans_id] = (states | {row.state}, units + row.amount)
    return {name: (" and ".join(sorted(states)), units) for name, (states, units) in found.items()}


def _orders(databases: Databases) -> dict[str, sa.Row]:
    found: dict[str, sa.Row] = {}
    for shard in databases.shards:
        with snapshot(shard) as connection:
            found |= {row.trans_id: row for row in connection.execute(sa.select(orders))}
    return found


def _spendings(databases: Databases) -> list[tuple[str, int, int]]:
    wrong = []
    for shard in databases.shards:
        paid = sa.func.coalesce(sa.func.sum(orders.c.cents), 0)
        of_user = sa.select(paid).where(orders.c.user_id == users.c.user_id, orders.c.state == Order.PAID)
        both = sa.select(users.c.user_id, users.c.spent_cents, of_user.scalar_subquery().label("paid"))
        with snapshot(shard) as connection:
            wrong += [(user, said, int(paid)) for user, said, paid in connection.execute(both) if said != paid]
    return wrong


def _events(databases: Databases) -> dict[str, list[str]]:
    told: dict[str, list[str]] = {name: [] for name in _orders(databases)}
    for shard in databases.shards:
        with snapshot(shard) as connection:
            for body in connection.scalars(sa.select(trans_message.c.body).order_by(trans_message.c.seq)):
                event = json.loads(body)
                told.setdefault(event["trans_id"], []).append(event["event"])
    return told


@dataclass
class Sums:
    """The shop in numbers."""

    initial: int
    stock: int
    frozen: int
    sold: int
    paid: int
    timed_out: int
    unpaid: int
    parcels: int

    @property
    def orders(self) -> int:
        return self.paid + self.timed_out + self.unpaid


def sums(databases: Databases) -> Sums:
    """What everything adds up to."""
    with snapshot(databases.products) as connection:
        shelf = sa.select(sa.func.sum(products.c.initial), sa.func.sum(products.c.stock))
        initial, stock = connection.execute(shelf).one()
        by_state = sa.select(freezes.c.state, sa.func.sum(freezes.c.amount)).group_by(freezes.c.state)
        pieces = Counter({state: int(amount) for state, amount in connection.execute(by_state)})
    states = Counter(order.state for order in _orders(databases).values())
    with snapshot(databases.warehouse) as connection:
        sent = connection.scalar(sa.select(sa.func.count()).select_from(parcels)) or 0
    return Sums(
        initial=int(initial),
        stock=int(stock),
        frozen=pieces[Freeze.FROZEN],
        sold=pieces[Freeze.SOLD],
        paid=states[Order.PAID],
        timed_out=states[Order.TIMED_OUT],
        unpaid=states[Order.UNPAID],
        parcels=sent,
    )
