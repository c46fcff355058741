"""Half messages without check-back whose one-way ends get lost, repaired by two sets of ids (docs/compensation.md)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from escrowmq import compensation
from escrowmq.compensation import Announced, Announcing
from escrowmq.errors import Code, EscrowError, Rejected
from escrowmq.model import COMMIT, Message
from escrowmq_lab.chaos.books import business, intended
from escrowmq_lab.chaos.modes.inboxes import consumer_of
from escrowmq_lab.chaos.modes.leftovers import roll_back_leftovers
from escrowmq_lab.chaos.modes.seam import POLL_SECONDS, Contradiction, Mode, Regret, Site

_log = logging.getLogger(__name__)

LOST = 0.1
"""Share of batches whose ends are lost."""
QUICK: dict[str, Any] = {"grace": 2.0, "lease": 5.0, "retry_after": 1.0, "max_attempts": 1000}
"""Shorter times than in production; and a disk that is full for seconds creates no case for an operator."""
GIVEN = "-given"
"""Suffix of ids that determine the message id, so that they may be sent again."""
MOST_LEFT = 20
"""Maximum number of ids that a process resends at its start: the youngest. A rolled back id is rejected for ever."""


class CompensationMode(Mode):
    """``Announcing`` by the outbox, ``compensation.consume``, a ``HalfSetConsumer`` and one or two ``Scheduler``; the
    sets are in the consumer's database."""

    name = "compensation"
    promise = (
        "each effect exactly once: the producer's database holds the announcement (outbox row with the change), "
        "the consumer's the mark, whether the consumer or a scheduler made the effect"
    )

    def place(self, site: Site) -> None:
        """Place messages: one business in ten is rolled back, the ends of one batch in ten are lost, and three in ten
        have the caller's ids, some of which are resent. The relay of the node sends the keys. Transactions left
        undecided and never announced, by a killed process or a lost rollback, are rolled back at the end."""
        group = f"chaos-compensation-{site.name}"
        with site.bus.producer(group, instance=site.name, timeout=5.0, unasked=True, confirm="oneway") as producer:
            ways = {
                number: Announcing(producer, self._keys(number), database=site.engine)
                for number in range(1, site.peers + 1)
            }
            self._resend_unfinished(site, ways)
            while not site.closing.is_set():
                consumer, ids = self.batch(site, 40)
                self._place_some(site, ways[consumer], consumer, ids)
            producer.flush()
            site.placed.set()
            while not site.ended.is_set():
                roll_back_leftovers(site, producer)
                site.pause(POLL_SECONDS)

    def _place_some(self, site: Site, way: Announcing, consumer: int, ids: list[str]) -> None:
        """Run one local transaction."""
        dooms = site.chance.random() < 0.1
        given = site.chance.random() < 0.3
        if given:
            ids = [f"{one}{GIVEN}" for one in ids]
        site.books.intend(self.name, ids, dooms=dooms)
        messages = self.messages(consumer, ids)
        if not given:
            messages = [Message(one.topic, one.body, key=one.key) for one in messages]

        def change(session: Session) -> None:
            site.books.enter(session, self.name, ids)
            if dooms:
                raise Regret

        if site.chance.random() < LOST:
            committed = self._place_and_lose(site, way, messages, change)
        else:
            sent = way.send(messages, change)
            committed = sent.outcome is COMMIT
            _check(sent)
        if committed:
            site.books.confirm(self.name, ids)
        if given and site.chance.random() < 0.3:
            self._send_again(way, messages, change, committed)

    def _resend_unfinished(self, site: Site, ways: Mapping[int, Announcing]) -> None:
        """Resend, one by one, messages with own ids that an earlier process of this node did not finish."""
        begun = sa.select(intended.c.id).where(
            intended.c.mode == self.name,
            intended.c.id.like(f"%{GIVEN}"),
            ~intended.c.dooms,
            intended.c.id.not_in(sa.select(business.c.id)),
        )
        with site.engine.connect() as connection:
            ids = list(connection.scalars(begun.order_by(intended.c.at_us.desc()).limit(MOST_LEFT)))
        for one in ids:
            consumer = int(one.removesuffix(GIVEN).rpartition(".")[2])
            try:
                sent = ways[consumer].send(
                    self.messages(consumer, [one]),
                    lambda session, one=one: site.books.enter(session, self.name, [one]),  # type: ignore[misc]
                )
            except Rejected as problem:
                if problem.code is not Code.CONFLICT:  # it was rolled back, and its id is used up
                    raise
                continue
            _check(sent)
            if sent.outcome is COMMIT and not sent.repeated:
                site.books.confirm(self.name, [one])

    def _place_and_lose(
        self, site: Site, way: Announcing, messages: Sequence[Message], change: Callable[[Session], object]
    ) -> bool:
        """Send, but lose the ends of these transactions. Returns whether the local transaction committed."""
        prepared = way.prepare(messages)
        try:
            with Session(site.engine) as session, session.begin():
                way.announce_tx(session, prepared)
                change(session)
        except Regret:
            return False
        return True

    def _send_again(
        self, way: Announcing, messages: Sequence[Message], change: Callable[[Session], object], committed: bool
    ) -> None:
        """Send a request a second time under its ids. After a commit its business must not be repeated."""
        try:
            again = way.send(messages, change)
        except Rejected as problem:
            if committed or problem.code is not Code.CONFLICT:
                raise Contradiction(f"sent again, committed before: {committed}") from problem
            return
        _check(again)
        if committed and not (again.repeated and again.outcome is COMMIT):
            raise Contradiction(f"sent again after a commit, it was done again: {again}")

    def take(self, site: Site) -> None:
        """Consume, and run the key reader and the schedulers in separate threads."""
        topic = self.topic(site.number)

        def effect(session: Any, message: Any) -> None:
            site.books.effect(session, self.name, [message.body])

        with (
            closing(compensation.open_sets(site.engine, topic)) as sets,
            consumer_of(site, topic, topic) as consumer,
        ):
            crew = Crew(consumer.close)
            site.at_end(crew.stop)
            keys = compensation.HalfSetConsumer(site.bus, self._keys(site.number), site.engine, sets)

            def repair() -> None:
                work = compensation.Scheduler(
                    site.bus, site.engine, sets, topics=topic, keys=self._keys(site.number), handler=effect, **QUICK
                )
                with work:
                    work.run(POLL_SECONDS, crew.stopping)

            calls = [lambda: keys.run(crew.stopping), repair]
            if site.chance.random() < 0.5:
                calls.append(repair)
            with crew.at_work(calls):
                compensation.consume(consumer, site.engine, sets, effect)

    def _keys(self, consumer: int) -> str:
        return f"{self.topic(consumer)}-keys"


class Crew:
    """Threads beside a consumer. After an error of the product or the database a thread restarts; any other error stops
    all, and :meth:`at_work` raises it."""

    def __init__(self, close: Callable[[], object]) -> None:
        self.stopping = threading.Event()
        self._close = close
        self._problems: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def stop(self) -> None:
        """Stop all threads and the consumer."""
        self.stopping.set()
        self._close()

    def at_work(self, calls: Sequence[Callable[[], object]]) -> Crew:
        """Prepare the threads for a ``with`` block, which starts and ends them."""
        self._threads = [
            threading.Thread(target=self._run_repeatedly, args=(call,), name="compensation", daemon=True)
            for call in calls
        ]
        return self

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()
        if self._problems:
            raise self._problems[0]

    def _run_repeatedly(self, call: Callable[[], object]) -> None:
        while not self.stopping.is_set():
            try:
                call()
            except (EscrowError, DBAPIError) as problem:
                _log.warning("begins anew: %s", problem)
                self.stopping.wait(0.2)
            except BaseException as problem:
                self._problems.append(problem)
                self.stop()


def _check(sent: Announced) -> None:
    """Raise the error of the local change, unless it was a planned rollback."""
    if not isinstance(sent.error, Regret):
        sent.check()
