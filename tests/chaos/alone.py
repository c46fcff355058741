"""One delivery mode without faults and without processes of its own: a producer and a consumer as threads of this one,
and two served brokers.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

import escrowmq as mq
from escrowmq import outbox
from escrowmq.errors import EscrowError
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.escrow import EscrowTarget
from escrowmq_lab.chaos.books import Books, body_of, business, confirmed, effects, hash_of, intended
from escrowmq_lab.chaos.modes.seam import Mode, Site
from escrowmq_lab.databases import open_engine
from escrowmq_lab.servers import escrow
from forked import Forked

ENOUGH = 60
"""Business rows of a run."""


@contextlib.contextmanager
def site(folder: Path, url: str, name: str) -> Iterator[Site]:
    """A site whose database is a SQLite file."""
    own = folder / name
    own.mkdir()
    engine = open_engine(f"sqlite:///{own / 'books.db'}")
    outbox.migrate(engine)
    books = Books(engine)
    books.make()
    with mq.connect(url) as bus:
        yield Site(name, 1, 1, bus, url, engine, books, own, Random(name), rate=2000.0)
    engine.dispose()


@contextlib.contextmanager
def two_brokers(folder: Path) -> Iterator[str]:
    """Their URL. Each mode has topics and groups of its own, so several may use them."""
    settings = ("--transaction-timeout", "1s", "--check-interval", "1s")
    with (
        escrow.serving(folder / "east", *settings, launcher=Forked) as east,
        escrow.serving(folder / "west", *settings, launcher=Forked) as west,
    ):
        yield f"{east.url},{west.url.removeprefix('escrow://')}"


def run_alone(
    mode: Mode, folder: Path, url: str, enough: int = ENOUGH, beside: Callable[[Site], Any] | None = None
) -> None:
    """Run it until ``enough`` business rows have their effects, and check by id that each has exactly one (of a mode
    that repeats: at least one), and nothing else any.

    ``url`` names the brokers; ``beside`` runs with the producer's site in a thread of its own until that site has ended
    (a relay).
    """
    with site(folder, url, "producer-1") as there, site(folder, url, "consumer-1") as here:
        problems: list[BaseException] = []
        calls = [(mode.place, there), (mode.take, here), *([(beside, there)] if beside else [])]
        threads = [threading.Thread(target=_guarded, args=(call, one, problems)) for call, one in calls]
        for thread in threads:
            thread.start()
        try:
            while not problems and len(_ids(there.engine, business)) < enough:
                there.pause(0.05)
            there.closing.set()
            here.closing.set()
            while not problems and not there.placed.wait(0.05):
                pass
            while not problems and not _ids(there.engine, business) <= _ids(here.engine, effects):
                there.pause(0.05)
        finally:
            for one in (there, here):
                one.closing.set()
                one.ended.set()
            for thread in threads:
                thread.join()
        assert not problems, problems
        _check(there.engine, here.engine, mode.repeats)


def relay(producer: Site) -> None:
    """The relay of a producer's node."""
    with (
        contextlib.closing(EscrowTarget(producer.url)) as target,
        Relay(producer.engine, target, workers=1, poll_interval=0.05),
    ):
        producer.ended.wait()


def _guarded(call: Callable[[Site], Any], one: Site, problems: list[BaseException]) -> None:
    """Call it again after what a node of the chaos run would call it again after."""
    while not one.ended.is_set():
        try:
            call(one)
        except (EscrowError, DBAPIError):
            one.pause(0.1)
        except BaseException as problem:
            problems.append(problem)
            raise


def _ids(engine: sa.Engine, table: sa.Table) -> set[str]:
    with engine.connect() as connection:
        return set(connection.scalars(sa.select(table.c.id)))


def _check(producer: sa.Engine, consumer: sa.Engine, repeats: bool) -> None:
    with consumer.connect() as connection:
        rows = connection.execute(sa.select(effects.c.id, effects.c.hash)).all()
    times = Counter(row.id for row in rows)
    assert set(times) == _ids(producer, business)
    assert repeats or set(times.values()) == {1}
    assert all(row.hash == hash_of(body_of(row.id)) for row in rows)
    assert _ids(producer, confirmed) <= set(times) <= _ids(producer, intended)
