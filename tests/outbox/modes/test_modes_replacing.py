"""FastMiniMQ's rule where it was chosen: only the last prepare of an id counts, while it is undecided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from modes_roles import identity, note, noted

import escrowmq as mq
from escrowmq.errors import Code, Fenced, Rejected
from escrowmq.outbox.modes import Driven, Redriven
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.tables import trans_driven


class Killed(BaseException):
    """The process is gone: nothing is tidied up."""


@pytest.fixture
def local(make_database: Callable[[str], str]) -> Any:
    engine = sa.create_engine(make_database("local"))
    yield engine
    engine.dispose()


@pytest.fixture(params=["stored", "merged"])
def merged(request: pytest.FixtureRequest) -> bool:
    return request.param == "merged"


def stages(engine: sa.Engine) -> list[Stage]:
    with engine.begin() as connection:
        return [Stage(state) for state in connection.scalars(sa.select(trans_driven.c.state))]


def bodies(bus: mq.Bus, topic: str) -> list[bytes]:
    return sorted(bus.admin.read(topic).read_all().column("body").to_pylist())


def killed_in_business(driven: Driven, message: mq.Message) -> None:
    def die(session: Any) -> None:
        raise Killed

    with pytest.raises(Killed):
        driven.send(message, die)


def killed_before_its_prepare(driven: Driven, message: mq.Message) -> None:
    def die(batch: Any, shards: Any) -> Any:
        raise Killed

    driven._carrier.prepare = die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        driven.send(message, lambda session: None)
    del driven._carrier.prepare


def two(t: str) -> list[mq.Message]:
    return [mq.Message(t, body, message_id=identity(t, 1)) for body in (b"a", b"b")]


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("killed", [killed_in_business, killed_before_its_prepare])
def test_the_business_done_again_with_another_content_is_seen_once(
    bus: mq.Bus, local: sa.Engine, merged: bool, t: str, killed: Callable[..., None]
) -> None:
    a, b = two(t)
    killed(Driven(bus, local, "shop", merged=merged, replaces=True), a)
    again = Driven(bus, local, "shop", merged=merged, replaces=True)
    result = again.send(b, lambda session: note(session, "produced", [identity(t, 1)]))
    assert result.done
    assert (bodies(bus, t), stages(local), noted(local, "produced")) == ([b"b"], [], [identity(t, 1)])
    assert again.redrive() == Redriven()
    assert bus.admin.transactions("open") == []
    assert len(bus.admin.transactions("rolled_back")) == (killed is killed_in_business)


def test_a_second_death_and_the_first_content_again(bus: mq.Bus, local: sa.Engine, merged: bool, t: str) -> None:
    a, b = two(t)
    driven = Driven(bus, local, "shop", merged=merged, replaces=True)
    for message in (a, b, a):
        killed_in_business(driven, message)
    assert driven.send(a, lambda session: None).done
    assert bodies(bus, t) == [b"a"]


@pytest.mark.parametrize("kind", ["plain", "redo"])
def test_what_is_left_of_it_is_redriven_by_its_last_content(bus: mq.Bus, local: sa.Engine, t: str, kind: str) -> None:
    driven = Driven(bus, local, "shop", replaces=True)
    for message in two(t):
        killed_in_business(driven, message)
    done: list[bytes] = []
    redo = None if kind == "plain" else lambda session, messages: done.extend(m.body for m in messages)
    assert driven.redrive(redo) == (Redriven(rolled_back=1) if redo is None else Redriven(committed=1))
    assert done == ([] if redo is None else [b"b"])
    assert stages(local) == []
    assert bodies(bus, t) == done


def test_without_the_choice_such_an_id_is_refused(bus: mq.Bus, local: sa.Engine, merged: bool, t: str) -> None:
    a, b = two(t)
    driven = Driven(bus, local, "shop", merged=merged)
    killed_in_business(driven, a)
    with pytest.raises(Rejected, match="MESSAGE_ID_TAKEN"):
        driven.send(b, lambda session: None)


def test_nothing_is_replaced_after_the_decision(bus: mq.Bus, local: sa.Engine, merged: bool, t: str) -> None:
    a, b = two(t)
    driven = Driven(bus, local, "shop", merged=merged, replaces=True)
    assert driven.send(a, lambda session: None).code is Code.COMMITTED
    assert driven.send(a, lambda session: None).code is Code.ALREADY_COMMITTED
    with pytest.raises(Rejected, match="MESSAGE_ID_TAKEN"):
        driven.send(b, lambda session: note(session, "produced", [identity(t, 1)]))
    assert (bodies(bus, t), stages(local), noted(local, "produced")) == ([b"a"], [], [])


def test_a_message_whose_commit_is_under_way_is_not_replaced(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    a, b = two(t)
    driven = Driven(bus, local, "shop", replaces=True)

    def die(*_: Any) -> Any:
        raise Killed

    driven._carrier.end = die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        driven.send(a, lambda session: None)
    del driven._carrier.end
    with pytest.raises(Rejected, match="MESSAGE_ID_TAKEN"):
        driven.send(b, lambda session: None)
    assert driven.redrive() == Redriven(committed=1)
    assert bodies(bus, t) == [b"a"]


def test_who_was_replaced_is_fenced_and_its_business_undone(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    a, b = two(t)
    older, newer = (Driven(bus, local, "shop", replaces=True) for _ in range(2))
    prepare = older._carrier.prepare

    def prepared(batch: Any, shards: Any) -> Any:
        answer = prepare(batch, shards)
        assert newer.send(b, lambda session: note(session, "produced", [b"b" * 16])).done
        return answer

    older._carrier.prepare = prepared  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        older.send(a, lambda session: note(session, "produced", [b"a" * 16]))
    assert (bodies(bus, t), noted(local, "produced"), stages(local)) == ([b"b"], [b"b" * 16], [])


@pytest.mark.invariant("I24")
def test_who_was_replaced_is_fenced_before_the_newer_one_has_decided(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    """The row is STORED, as the older one left it, but under another stamp and with another content."""
    a, b = two(t)
    older, newer = (Driven(bus, local, "shop", replaces=True) for _ in range(2))
    prepare = older._carrier.prepare

    def prepared(batch: Any, shards: Any) -> Any:
        del older._carrier.prepare
        answer = prepare(batch, shards)
        killed_in_business(newer, b)
        return answer

    older._carrier.prepare = prepared  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        older.send(a, lambda session: note(session, "produced", [b"a" * 16]))
    assert (noted(local, "produced"), stages(local)) == ([], [Stage.STORED])
    assert newer.redrive(lambda session, messages: None) == Redriven(committed=1)
    assert bodies(bus, t) == [b"b"]


@pytest.mark.invariant("I9")
def test_a_prepare_that_comes_late_costs_a_request_and_nothing_else(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    """The older process's prepare reaches the broker when the newer one is about to commit: the row says what
    counts."""
    a, b = two(t)
    older, newer = (Driven(bus, local, "shop", replaces=True) for _ in range(2))
    prepare = older._carrier.prepare
    late: list[Any] = []

    def leave(batch: Any, shards: Any) -> Any:
        late.append((batch, shards))
        raise Killed

    older._carrier.prepare = leave  # type: ignore[method-assign]
    with pytest.raises(Killed):
        older.send(a, lambda session: None)
    result = newer.send(b, lambda session: prepare(*late[0]) and None)
    assert result.done
    assert (bodies(bus, t), stages(local)) == ([b"b"], [])
    assert bus.admin.transactions("open") == []


def test_a_batch_replaces_what_is_there_and_stores_the_rest(
    bus: mq.Bus, local: sa.Engine, merged: bool, t: str
) -> None:
    driven = Driven(bus, local, "shop", merged=merged, replaces=True)
    killed_in_business(driven, mq.Message(t, b"old", message_id=identity(t, 2)))
    batch = [mq.Message(t, bytes([n]), message_id=identity(t, n)) for n in range(4)]
    assert driven.run_batch(batch, lambda session: None).done
    assert bodies(bus, t) == [bytes([n]) for n in range(4)]
