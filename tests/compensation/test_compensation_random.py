"""Any interleaving of producers, consumers and schedulers, with deaths between any two steps and a store that goes away
or is emptied.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from compensation_world import World, business
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import escrowmq as mq
from escrowmq.compensation import Journal
from escrowmq.platform import failpoints

PLACES = (
    "taken",
    "handled",
    "case-written",
    "settled",
    "settled-known",
    "suspended",
    "marks-read",
    "keys-read",
    "recovering",
)
lives = st.one_of(st.none(), st.sampled_from(PLACES))


class Died(BaseException):
    """The process dies here."""


def die() -> None:
    raise Died


def until(place: str | None, act: Callable[[], Any]) -> None:
    """Do it in a process that dies at ``place``, if it comes there."""
    if place is not None:
        failpoints.arm(failpoints.Failpoint(f"compensation.{place}", 1, die))
    try:
        with suppress(Died):
            act()
    finally:
        failpoints.arm()


class Story(RuleBasedStateMachine):
    """One compensation; at the end of each story it is drained and judged."""

    bus: mq.Bus
    database: Any

    @initialize()
    def begin(self) -> None:
        self.world = World(self.bus, self.database, limit=2, max_attempts=1_000)
        self.expected: list[bytes] = []
        self.unended: list[bytes] = []

    @rule(confirmed=st.booleans())
    def order(self, confirmed: bool) -> None:
        """A local transaction that commits; its confirm comes, or is late or lost."""
        identity = self.world.prepare()
        self.world.announce(identity)
        self.expected.append(identity)
        if confirmed:
            self.world.confirm(identity)
        else:
            self.unended.append(identity)

    @rule()
    def failed_order(self) -> None:
        """A local transaction that rolls back is not announced."""
        self.world.producer.rollback(self.world.sent[self.world.prepare()])

    @rule()
    def late_confirm(self) -> None:
        if self.unended:
            self.world.confirm(self.unended.pop())

    @rule(dies=st.booleans())
    def keys(self, dies: bool) -> None:
        until("halves-added" if dies else None, self.world.consume_keys)

    @rule(dies=st.booleans())
    def messages(self, dies: bool) -> None:
        until("effect-committed" if dies else None, self.world.consume_messages)

    @rule(place=lives, grace=st.sampled_from([0.0, 2e9]))
    def scheduler(self, place: str | None, grace: float) -> None:
        until(place, lambda: self.world.schedule(grace=grace))

    @rule()
    def leases_end(self) -> None:
        self.world.sets.end_leases()

    @rule()
    def emptied(self) -> None:
        self.world.sets.lose()

    @rule()
    def away_or_back(self) -> None:
        self.world.sets.away = not self.world.sets.away

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            standing = Journal(self.database, self.world.name).read()
            assert (self.world.faults(self.expected), self.world.open(), self.world.cases()) == ([], [], {})
            assert standing is not None
            assert not standing.suspended


@pytest.mark.invariant("I48")
def test_any_interleaving_ends_in_one_effect_each(tmp_path_factory: Any) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path_factory.mktemp("random")))
    database = business(folder)
    with mq.connect(f"file:{folder / 'broker'}", retry_backoff=0.02) as bus:

        class Here(Story):
            pass

        Here.bus, Here.database = bus, database
        run_state_machine_as_test(Here, settings=settings(max_examples=12, stateful_step_count=12, deadline=None))
    database.dispose()
