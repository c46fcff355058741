"""Planted bugs: each scenario is sound with the real code and finds its bug in code that has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from compensation_world import MemorySets, World

from escrowmq.compensation import HalfSetConsumer, Scheduler, effects
from escrowmq.compensation.recovery import Recovery
from escrowmq.compensation.sets.seam import Run
from escrowmq.outbox import inbox

Plant = Callable[[pytest.MonkeyPatch], None]


class Died(BaseException):
    """The process dies here."""


def die(*_: Any, **__: Any) -> Any:
    raise Died


def first(thing: Any, name: str, act: Callable[..., object]) -> None:
    """The first call of a method is preceded by ``act``, which may die."""
    real, left = getattr(thing, name), [act]

    def called(*given: Any, **named: Any) -> Any:
        if left:
            left.pop()()
        return real(*given, **named)

    setattr(thing, name, called)


def lost_confirms(w: World, count: int = 1) -> list[bytes]:
    """Prepared and announced, and their confirm was lost."""
    ids = [w.prepare() for _ in range(count)]
    for identity in ids:
        w.announce(identity)
    return ids


# The scenarios: each gives what must have had its effect


def a_key_comes_while_the_difference_is_taken(w: World) -> list[bytes]:
    before = lost_confirms(w)
    w.consume_keys()
    later = lost_confirms(w)
    gap = [w.consume_keys]
    w.sets.gap = lambda: gap.pop()() if gap else 0
    w.schedule()
    return before + later


def death_at_the_store_while_keys_are_taken(w: World) -> list[bytes]:
    ids = lost_confirms(w, 3)
    first(w.sets, "add_halves", die)
    with suppress(Died):
        w.consume_keys()
    return ids


def a_handler_that_fails_for_good_in_the_consumer(w: World) -> list[bytes]:
    [identity] = lost_confirms(w)
    w.confirm(identity)
    w.consume_keys()

    def fails(session: Any, message: Any) -> None:
        raise ZeroDivisionError

    with w.bus.consumer(w.name, w.topic, max_attempts=1) as consumer:
        while w.waits(w.topic, w.name) and not w.bus.admin.dead_letters(w.name):
            effects.consume(consumer, w.database, w.sets, fails, idle_timeout=0.05)
    return [identity]


def death_in_the_handler_of_the_scheduler(w: World) -> list[bytes]:
    ids = lost_confirms(w, 2)
    w.consume_keys()
    with suppress(Died):
        w.schedule(handler=die)
    return ids


def emptied_while_a_key_waits_out_its_grace(w: World) -> list[bytes]:
    w.schedule()
    ids = lost_confirms(w)
    w.consume_keys()
    w.schedule(grace=3600.0)
    w.sets.lose()
    return ids


def a_key_is_consumed_while_settled_us_is_computed(w: World) -> list[bytes]:
    w.schedule()
    ids = lost_confirms(w)
    with w.scheduler(grace=3600.0) as scheduler:
        first(scheduler._feed, "acknowledged_us", w.consume_keys)
        scheduler.run_once()
    w.sets.lose()
    return ids


def emptied_while_settled_us_is_computed(w: World) -> list[bytes]:
    w.schedule()
    ids = lost_confirms(w)
    w.consume_keys()
    with w.scheduler(grace=3600.0) as scheduler:
        first(w.sets, "sizes", w.sets.lose)
        scheduler.run_once()
    return ids


def death_in_the_middle_of_a_recovery(w: World) -> list[bytes]:
    w.schedule()
    ids = lost_confirms(w)
    w.consume_keys()
    w.sets.lose()
    with w.scheduler() as scheduler, suppress(Died):
        first(scheduler._feed, "read_again", die)
        scheduler.run_once()
    return ids


def handled_and_delivered(w: World) -> list[bytes]:
    ids = lost_confirms(w, 2)
    w.consume_keys()
    w.schedule()
    w.consume_messages()
    return ids


# The bugs


def difference_and_removal_in_two_steps(patch: pytest.MonkeyPatch) -> None:
    def take(self: MemorySets, before_us: int, limit: int, lease: float) -> Run | None:
        kept = {identity: us for identity, us in self.half.items() if identity not in self.commits}
        getattr(self, "gap", lambda: 0)()
        self.half.clear()
        self.commits.clear()
        return self._leased(kept) if kept else None

    patch.setattr(MemorySets, "take", take)


def keys_acknowledged_before_they_are_recorded(patch: pytest.MonkeyPatch) -> None:
    def some(self: HalfSetConsumer, consumer: Any, wait: float) -> int:
        for batch in consumer.batches(100, idle_timeout=wait):
            batch.ack()
            self._record(batch)
            return len(batch)
        return 0

    patch.setattr(HalfSetConsumer, "_receive", some)


def entries_before_their_effect(patch: pytest.MonkeyPatch) -> None:
    def consume(consumer: Any, database: Any, sets: Any, handler: Any, **options: Any) -> int:
        def early(session: Any, message: Any) -> None:
            sets.add_commits([message.message_id], 1)
            handler(session, message)

        return inbox.consume(consumer, database, early, **options)

    patch.setattr(effects, "consume", consume)


def settled_before_the_handler(patch: pytest.MonkeyPatch) -> None:
    def work(self: Scheduler, run: Run, counts: Any, stop: Any) -> None:
        self._sets.settle(run.name, run.ids)
        self._process(run.ids, counts)

    patch.setattr(Scheduler, "_process_run", work)


def settled_us_is_what_the_group_has_acknowledged(patch: pytest.MonkeyPatch) -> None:
    def raise_settled(self: Scheduler) -> None:
        seen = self._journal.read()
        assert seen is not None
        self._journal.raise_settled(seen, self._feed.acknowledged_us() or 0)

    patch.setattr(Scheduler, "_raise_settled", raise_settled)


def the_store_is_asked_before_the_group(patch: pytest.MonkeyPatch) -> None:
    def raise_settled(self: Scheduler) -> None:
        seen = self._journal.read()
        assert seen is not None
        oldest_us = self._sets.sizes().oldest_us
        acknowledged_us = self._feed.acknowledged_us() or 0
        self._journal.raise_settled(seen, acknowledged_us if oldest_us is None else min(oldest_us, acknowledged_us))

    patch.setattr(Scheduler, "_raise_settled", raise_settled)


def nobody_looks_whether_it_is_the_same_store(patch: pytest.MonkeyPatch) -> None:
    def raise_settled(self: Scheduler) -> None:
        seen = self._journal.read()
        assert seen is not None
        acknowledged_us = self._feed.acknowledged_us() or 0
        oldest_us = self._sets.sizes().oldest_us
        self._journal.raise_settled(seen, acknowledged_us if oldest_us is None else min(oldest_us, acknowledged_us))

    patch.setattr(Scheduler, "_raise_settled", raise_settled)


def not_suspended_before_all_is_read_again(patch: pytest.MonkeyPatch) -> None:
    real = Recovery._recover

    def recover(self: Recovery, seen: Any, epoch: str) -> bool:
        self._journal.resume(seen, epoch)
        return real(self, seen, epoch)

    patch.setattr(Recovery, "_recover", recover)


def marks_of_a_group_of_its_own(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler.__init__

    def init(self: Scheduler, *given: Any, **named: Any) -> None:
        real(self, *given, **{**named, "group": "somebody-else"})

    patch.setattr(Scheduler, "__init__", init)


PLANTED: list[tuple[Plant, Callable[[World], list[bytes]]]] = [
    (difference_and_removal_in_two_steps, a_key_comes_while_the_difference_is_taken),
    (keys_acknowledged_before_they_are_recorded, death_at_the_store_while_keys_are_taken),
    (entries_before_their_effect, a_handler_that_fails_for_good_in_the_consumer),
    (settled_before_the_handler, death_in_the_handler_of_the_scheduler),
    (settled_us_is_what_the_group_has_acknowledged, emptied_while_a_key_waits_out_its_grace),
    (the_store_is_asked_before_the_group, a_key_is_consumed_while_settled_us_is_computed),
    (nobody_looks_whether_it_is_the_same_store, emptied_while_settled_us_is_computed),
    (not_suspended_before_all_is_read_again, death_in_the_middle_of_a_recovery),
    (marks_of_a_group_of_its_own, handled_and_delivered),
]


def found(w: World, scenario: Callable[[World], list[bytes]]) -> list[str]:
    expected = scenario(w)
    w.drain()
    return w.faults(expected) + w.open() + [state.name for state in w.cases().values()]


@pytest.mark.invariant("I48")
@pytest.mark.parametrize("scenario", [scenario for _, scenario in PLANTED], ids=lambda one: one.__name__)
def test_the_real_code_is_sound(world: Callable[..., World], scenario: Any) -> None:
    assert found(world(), scenario) == []


@pytest.mark.invariant("I48")
@pytest.mark.parametrize(("plant", "scenario"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_bug_is_caught(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, plant: Plant, scenario: Any
) -> None:
    plant(monkeypatch)
    assert found(world(), scenario)
