"""One run: its databases, its broker, the store of its sets; what is still on its way, and what is wrong at the end."""

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import compensated_check as check
import sqlalchemy as sa
from compensated_staff import Staff
from compensated_tables import CART, GROUP, ORDERS, SHOP, cart, shop

import escrowmq as mq
from escrowmq import compensation, outbox
from escrowmq_lab.databases import open_engine
from escrowmq_lab.servers.process import Server

Act = Callable[["Run", Staff], None]
"""Something that happens while orders come."""
MANIFEST = {
    "log": "escrow",
    "tables": {
        "orders": {"database": f"{SHOP}.db", "table": "orders", "id": "id", "unique": True},
        "carts": {"database": f"{CART}.db", "table": "cleared_carts", "id": "order_id"},
    },
    "topics": [ORDERS],
    "comparisons": [
        {"expected": "table:orders", "found": f"topic:{ORDERS}", "columns": ["customer"]},
        {"expected": f"half:{ORDERS}", "found": f"topic:{ORDERS}", "columns": ["message_id", "body"]},
        {"expected": f"topic:{ORDERS}", "found": "table:carts", "columns": ["customer"]},
    ],
    "consumers": {GROUP: "carts"},
}
"""What ``escrowmq audit`` compares in a run folder with SQLite databases."""

_STATE = outbox.metadata.tables["trans_message"].c.state
_TO_SEND = sa.select(sa.func.count()).where(_STATE.not_in([int(outbox.State.SENT), int(outbox.State.DONE)]))
_OVER = (compensation.CaseState.DONE, compensation.CaseState.SETTLED)


def killing(name: str) -> Act:
    """The act of killing one of :data:`compensated_staff.ROLES`, or the broker; another takes its place at once."""

    def act(run: "Run", staff: Staff) -> None:
        if name == "broker":
            run.broker.kill()
            run.broker.start()
            staff.killed.append(name)
        else:
            staff.kill(name)

    return act


class Run:
    """Made with the URLs of the shop's and the cart's database and of the store of the sets; ``share`` of the confirms
    is lost."""

    def __init__(self, urls: Sequence[str], sets: str, folder: Path, broker: Server, share: float) -> None:
        with contextlib.closing(compensation.open_sets(sets, GROUP)) as store:
            store.epoch()  # one that is not there, or does not keep what it is given, is refused before anything runs
        self.shop, self.cart = map(open_engine, urls)
        self.broker = broker
        self._folder = folder
        self._lost = folder / "lost.txt"
        self._lost.touch()
        self._sets = sets
        self._config = {
            "shop": urls[0],
            "cart": urls[1],
            "sets": sets,
            "broker": broker.url,
            "lost": str(self._lost),
            "share": share,
        }
        for engine, tables in ((self.shop, shop), (self.cart, cart)):
            tables.create_all(engine)
            outbox.migrate(engine)
        if self.shop.dialect.name == "sqlite":
            (folder / "manifest.json").write_text(json.dumps(MANIFEST, indent=2) + "\n")

    def work(self, wanted: int, acts: Sequence[Act] = ()) -> list[str]:
        """Place ``wanted`` orders, with the acts spread over them, and wait until all is settled; who was killed."""
        with Staff(self._config, self._folder) as staff:
            for part, act in enumerate([*acts, None], 1):
                end = wanted * part // (len(acts) + 1)
                staff.order(end)
                staff.wait_until(lambda end=end: staff.placed >= end, lambda: f"{staff.placed} orders are placed")
                if act is not None:
                    act(self, staff)
            staff.wait_until(lambda: not self.missing(), lambda: "; ".join(self.missing()))
            return staff.killed

    def missing(self) -> list[str]:
        """What is still on its way."""
        placed, effects = check.read(self.shop, self.cart)
        left = [f"{len(placed.keys() - {effect.order for effect in effects})} orders have no effect yet"]
        with self.shop.connect() as connection:
            left.append(f"{connection.scalar(_TO_SEND)} keys are not sent yet")
        with contextlib.closing(compensation.open_sets(self._sets, GROUP)) as sets:
            sizes = sets.sizes()
        left.append(f"{sizes.half} ids are in the half set")
        left.append(f"{sizes.taken} ids are with a scheduler")
        standing = compensation.Journal(self.cart, GROUP).read()
        left.append(f"{int(standing is not None and standing.suspended)} compensation is suspended")
        cases = compensation.count_cases(self.cart, GROUP)
        left.append(f"{sum(count for state, count in cases.items() if state not in _OVER)} cases are open")
        return [text for text in left if not text.startswith("0 ")]

    def tidy(self) -> int:
        """What an operator does now and then: roll back half messages that nobody announced, because their rollback was
        lost; how many."""
        placed, _ = check.read(self.shop, self.cart)
        with mq.connect(self.broker.url) as bus:
            undecided = bus.admin.transactions(state="undecided")
            keys = [bus.admin.transaction(found["id"])["messages"][0]["key"] for found in undecided]
            refused = [found["id"] for found, key in zip(undecided, keys, strict=True) if key not in placed]
            for transaction in refused:
                bus.admin.rollback(transaction)
        return len(refused)

    @property
    def lost(self) -> int:
        """Ends that were lost on the way."""
        return len(self._lost.read_text().split())

    def effects(self) -> list[check.Effect]:
        """All rows of the cart's effects."""
        return check.read(self.shop, self.cart)[1]

    def wrong(self) -> list[str]:
        """What is wrong, by id."""
        return check.wrong(*check.read(self.shop, self.cart))

    def close(self) -> None:
        self.shop.dispose()
        self.cart.dispose()
