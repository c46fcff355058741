"""Half messages that no process will ever decide are rolled back, and no others."""

from pathlib import Path
from random import Random

import escrowmq as mq
from escrowmq import outbox
from escrowmq_lab.chaos.books import Books
from escrowmq_lab.chaos.modes.leftovers import roll_back_leftovers
from escrowmq_lab.chaos.modes.seam import Site
from escrowmq_lab.databases import open_engine


def test_what_has_no_business_is_rolled_back_and_the_rest_stays(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'books.db'}")
    outbox.migrate(engine)
    books = Books(engine)
    books.make()
    with mq.connect(f"file:{tmp_path / 'broker'}") as bus:
        site = Site("producer-1", 1, 1, bus, "", engine, books, tmp_path, Random(0), rate=1.0)
        mine, other = (bus.producer(group, unasked=True) for group in ("mine", "other"))
        begun = {key: mine.prepare("orders", key.encode(), key=key).transaction_id for key in ("a", "b", "c", "d")}
        begun["e"] = other.prepare("orders", b"e", key="e").transaction_id
        mine.commit(begun["d"])
        with engine.begin() as connection:
            books.enter(connection, "compensation", ["b"])
        assert roll_back_leftovers(site, mine) == 2
        states = {key: bus.admin.transaction(identity)["state"] for key, identity in begun.items()}
        assert states == {"a": "rolled_back", "b": "open", "c": "rolled_back", "d": "committed", "e": "open"}
        assert roll_back_leftovers(site, mine) == 0
    engine.dispose()
