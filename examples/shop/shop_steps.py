"""The steps of the example's story. Each can be run here, or as a process of its own that is killed at a named place.

``python shop_steps.py STEP CONFIG.json``, with ``ESCROWMQ_FAILPOINT`` naming the place.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from deliver import deliver
from paying import PaymentRefused, pay
from placing import MINUTE_US, OrderFenced, place_order
from shop_baskets import baskets
from shop_databases import Databases, opened
from shop_tables import Basket, Freeze, Order, freezes, orders
from sweeps import Settled, sweep_freezes, sweep_orders
from till import Bought, Fate, serve

from escrowmq.platform import failpoints

TILLS = 3
START_US = 1_700_000_000_000_000

PLACES = {
    "tills": (
        *["shop.stock-taken", "shop.stock-frozen", "shop.order-written", "shop.order-placed"],
        *["shop.order-locked-to-pay", "shop.guard-passed", "shop.payment-written", "shop.payment-committed"],
        *["shop.fence-written", "shop.fenced", "shop.orphan-written", "shop.orphan-released"],
    ),
    "sweep 2": ("shop.fence-written", "shop.fenced", "shop.orphan-written", "shop.orphan-released"),
    "sweep 1": ("shop.order-locked-to-settle", "shop.freeze-written", "shop.freeze-released", "shop.order-settled"),
    "delivery": ("relay.leased", "relay.read", "relay.sent", "relay.marked", "shop.parcel-packed"),
}
"""Where each step can be killed: between every two things that it does."""


@dataclass(frozen=True)
class Run:
    """One run of the example: its databases, its folder, and what is bought."""

    urls: list[str]
    folder: Path
    orders: int
    data: Path | None = None

    def baskets(self) -> list[tuple[int, Basket, Fate]]:
        return baskets(self.orders, self.data)

    def killed_at(self, step: str, place: str) -> bool:
        """Run a step in a process of its own that dies at ``place``; whether it came there. Raises if it failed
        otherwise."""
        config = {"urls": self.urls, "folder": str(self.folder), "orders": self.orders, "data": str(self.data or "")}
        environment = {**os.environ, failpoints.VARIABLE: place}
        command = [sys.executable, __file__, step, json.dumps(config)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ended.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError(f"{step}: exit code {ended.returncode}\n{ended.stderr}")
        return ended.returncode != 0


def tills(run: Run, databases: Databases) -> Counter[str]:
    """Several tills at once; how many baskets came how far."""
    parts = [run.baskets()[number::TILLS] for number in range(TILLS)]
    with ThreadPoolExecutor(TILLS) as pool:
        done = list(pool.map(lambda part: serve(databases, part, START_US), parts))
    return Counter({how: sum(len(part[how]) for part in done) for how in Bought})


def second_sweep(_: Run, databases: Databases) -> Counter[Settled]:
    """Sweep 2, ten minutes later, twice at once."""
    return _twice(lambda: sweep_freezes(_shards(databases), databases.products.connect, START_US + 10 * MINUTE_US))


def first_sweep(_: Run, databases: Databases) -> Counter[Settled]:
    """Sweep 1, fifteen minutes later, twice at once."""
    return _twice(lambda: sweep_orders(_shards(databases), databases.products.connect, START_US + 15 * MINUTE_US))


def late_orders(run: Run, databases: Databases) -> tuple[int, int]:
    """Transaction 2 of the baskets that come late; how many were placed, how many refused."""
    late = {number: basket for number, basket, fate in run.baskets() if fate == Fate.COMES_LATE}
    with databases.products.begin() as connection:
        names = set(connection.scalars(sa.select(freezes.c.trans_id)))
    told = Counter(_comes_late(databases, name, late[int(name[:7])]) for name in names if int(name[:7]) in late)
    return told[True], told[False]


def _comes_late(databases: Databases, trans_id: str, basket: Basket) -> bool:
    with databases.shard(basket.user_id).connect() as order_db:
        try:
            place_order(order_db, trans_id, basket, START_US + 30 * MINUTE_US)
        except OrderFenced:
            return False
    return True


def pay_what_is_unpaid(
    databases: Databases, states: tuple[Order, ...] = (Order.UNPAID,), every: int = 1
) -> tuple[int, int]:
    """Try to pay every ``every``-th order of these states, the newest first; how many were paid, how many refused."""
    told: Counter[bool] = Counter()
    for shard in databases.shards:
        with shard.connect() as order_db, databases.products.connect() as product_db:
            with order_db.begin():
                found = sa.select(orders.c.trans_id).where(orders.c.state.in_(states))
                names = order_db.scalars(found.order_by(orders.c.trans_id.desc())).all()
            for name in names[::every]:
                try:
                    told[pay(order_db, product_db, name)] += 1
                except PaymentRefused:
                    told[False] += 1
    return told[True], told[False]


def delivery(run: Run, databases: Databases) -> int:
    """Relays, broker and warehouse, until nothing is left."""
    return deliver(databases, run.folder)


def still_frozen(databases: Databases) -> int:
    """How many freezes are frozen now."""
    with databases.products.begin() as connection:
        frozen = sa.select(sa.func.count(freezes.c.trans_id.distinct())).where(freezes.c.state == Freeze.FROZEN)
        return connection.scalar(frozen) or 0


STEPS: dict[str, Callable[[Run, Databases], Any]] = {
    "tills": tills,
    "sweep 2": second_sweep,
    "sweep 1": first_sweep,
    "delivery": delivery,
}


def _shards(databases: Databases) -> list[Callable]:
    return [shard.connect for shard in databases.shards]


def _twice(sweep: Callable[[], Counter[Settled]]) -> Counter[Settled]:
    with ThreadPoolExecutor(2) as pool:
        return sum((each.result() for each in [pool.submit(sweep), pool.submit(sweep)]), Counter())


def main(step: str, config: str) -> None:
    """One step as a process."""
    given = json.loads(config)
    run = Run(given["urls"], Path(given["folder"]), given["orders"], Path(given["data"]) if given["data"] else None)
    with opened(run.urls) as databases:
        STEPS[step](run, databases)


if __name__ == "__main__":
    main(*sys.argv[1:])
