"""Consumer-side de-duplication: what the consumer stores, skips and does; on EscrowMQ and on Redis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from modes_roles import identity, note, noted, reach_effect, settled

import escrowmq as mq
from escrowmq.errors import Code, Rejected
from escrowmq.outbox.modes import Arrival, BothReachConsumer, BothReachProducer, Prepared, Redriven
from escrowmq.outbox.modes.both_reach import KEY, SIGN, TRANSACTION, Sign, end_id
from escrowmq.outbox.tables import trans_prepared, trans_recv_log


@pytest.fixture
def local(make_database: Callable[[str], str]) -> Any:
    engine = sa.create_engine(make_database("local"))
    yield engine
    engine.dispose()


def prepare(number: int, body: bytes = b"body", topic: str = "t") -> Arrival:
    headers = {SIGN: Sign.PREPARE, TRANSACTION: identity("t", number).hex(), KEY: f"k{number}", "own": "yes"}
    return Arrival(topic, body, headers, "tag")


def end(number: int, sign: Sign = Sign.COMMIT, topic: str = "t") -> Arrival:
    return Arrival(topic, b"", {SIGN: sign, TRANSACTION: identity("t", number).hex()})


def nothing(_: Sequence[int]) -> None:
    """Acknowledge."""


def count(engine: sa.Engine, table: sa.Table) -> int:
    with engine.begin() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


@pytest.mark.parametrize("marks", [True, False], ids=["marks", "no-marks"])
def test_an_effect_only_at_the_commit_and_only_once(database: sa.Engine, marks: bool) -> None:
    seen: list[Prepared] = []

    def effect(session: Any, messages: Sequence[Prepared]) -> None:
        reach_effect(session, messages)
        seen.extend(messages)

    consumer = BothReachConsumer(database, "cart", effect, marks=marks)
    consumer.handle([prepare(1, b"first"), prepare(2)], nothing)
    assert noted(database, "effects") == []
    assert count(database, trans_prepared) == 2
    consumer.handle([prepare(1, b"last"), end(2, Sign.ROLLBACK), end(3)], nothing)
    consumer.handle([end(1), end(1), end(1, Sign.ROLLBACK)], nothing)
    consumer.handle([end(1)], nothing)
    assert noted(database, "effects") == [identity("t", 1)]
    assert seen == [Prepared(identity("t", 1), "t", b"last", "k1", "tag", {"own": "yes"})]
    assert count(database, trans_prepared) == 0
    assert count(database, trans_recv_log) == (2 if marks else 0)
    assert (consumer.counts.effects, consumer.counts.rolled_back, consumer.counts.skipped) == (1, 1, 2)


def test_with_marks_a_late_copy_of_everything_changes_nothing(local: sa.Engine) -> None:
    consumer = BothReachConsumer(local, "cart", reach_effect)
    for _ in range(3):
        consumer.handle([prepare(1)], nothing)
        consumer.handle([end(1)], nothing)
    assert noted(local, "effects") == [identity("t", 1)]
    assert count(local, trans_prepared) == 0


@pytest.mark.parametrize("marks", [True, False], ids=["marks", "no-marks"])
@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("order", ["paired", "crossed", "apart"])
def test_one_id_in_two_topics_has_both_effects(local: sa.Engine, marks: bool, size: int, order: str) -> None:
    seen: list[tuple[bytes, str, bytes]] = []
    consumer = BothReachConsumer(
        local,
        "cart",
        lambda session, messages: seen.extend((m.message_id, m.topic, m.body) for m in messages),
        marks=marks,
    )
    a, b = ([prepare(1, topic.encode(), topic), end(1, topic=topic)] for topic in ("a", "b"))
    stream = {"paired": [a[0], b[0], a[1], b[1]], "crossed": [b[0], a[0], a[1], b[1]], "apart": [*a, *b]}[order]
    for _ in range(2 if marks else 1):  # with marks everything may come again
        for start in range(0, len(stream), size):
            consumer.handle(stream[start : start + size], nothing)
    assert sorted(seen) == [(identity("t", 1), "a", b"a"), (identity("t", 1), "b", b"b")]
    assert count(local, trans_prepared) == 0


def test_a_failed_effect_leaves_everything_where_it_was_and_acknowledges_nothing(database: sa.Engine) -> None:
    acknowledged: list[int] = []

    def fails(session: Any, messages: Sequence[Prepared]) -> None:
        note(session, "effects", [b"x" * 16])
        raise ZeroDivisionError

    BothReachConsumer(database, "cart", reach_effect).handle([prepare(1)], nothing)
    with pytest.raises(ZeroDivisionError):
        BothReachConsumer(database, "cart", fails).handle([end(1)], acknowledged.extend)
    assert acknowledged == []
    assert noted(database, "effects") == []
    assert count(database, trans_prepared) == 1


def test_without_marks_prepares_are_acknowledged_before_any_effect(local: sa.Engine) -> None:
    events: list[Any] = []
    consumer = BothReachConsumer(local, "cart", lambda session, messages: events.append("effect"), marks=False)
    consumer.handle([prepare(1), end(1)], lambda rows: events.append(list(rows)))
    assert events == [[0], "effect", [1]]


def test_groups_are_apart(local: sa.Engine) -> None:
    one, two = BothReachConsumer(local, "one", reach_effect), BothReachConsumer(local, "two", reach_effect)
    for consumer in (one, two):
        consumer.handle([prepare(1)], nothing)
    one.handle([end(1)], nothing)
    assert count(local, trans_prepared) == 1
    two.handle([end(1)], nothing)
    assert noted(local, "effects") == [identity("t", 1)] * 2


def test_forgetting_prepares_whose_end_never_comes(local: sa.Engine) -> None:
    consumer = BothReachConsumer(local, "cart", reach_effect)
    consumer.handle([prepare(1)], nothing)
    assert consumer.forget_prepares(3600.0) == 0
    assert consumer.forget_prepares(-1.0) == 1


@pytest.mark.parametrize("headers", [{}, {SIGN: "x"}, {SIGN: "commit"}, {SIGN: "commit", TRANSACTION: "zz"}])
def test_a_message_of_another_kind_is_named(local: sa.Engine, headers: dict[str, str]) -> None:
    with pytest.raises(Rejected):
        BothReachConsumer(local, "cart", reach_effect).handle([Arrival("t", b"", headers)], nothing)


STREAMS = st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["P", "C", "R"])), max_size=12)


@pytest.mark.invariant("I24")
@given(stream=STREAMS, cuts=st.sets(st.integers(0, 12)), marks=st.booleans())
def test_any_split_into_batches_has_the_effects_of_one_by_one(
    stream: list[tuple[int, str]], cuts: set[int], marks: bool
) -> None:
    """The paper's rule, message by message, is the model: a prepare is kept (the last), the first end removes it."""
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    for table in (trans_prepared, trans_recv_log):
        table.create(engine)
    effects: list[bytes] = []
    consumer = BothReachConsumer(
        engine, "cart", lambda session, messages: effects.extend(m.message_id for m in messages), marks=marks
    )
    legal = _legal(stream)
    batch: list[Arrival] = []
    for at, (number, what) in enumerate(legal):
        batch.append(prepare(number) if what == "P" else end(number, Sign.COMMIT if what == "C" else Sign.ROLLBACK))
        if at in cuts:
            consumer.handle(batch, nothing)
            batch = []
    consumer.handle(batch, nothing)
    engine.dispose()
    assert sorted(effects) == sorted(identity("t", number) for number in _model(legal))


def _legal(stream: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """What a producer can send: no prepare after an end that found one, and always the same end."""
    prepared: set[int] = set()
    ended: dict[int, str] = {}
    legal = []
    for number, what in stream:
        if what == "P":
            if number in ended:
                continue
            prepared.add(number)
        else:
            if number not in prepared:
                continue
            what = ended.setdefault(number, what)
        legal.append((number, what))
    return legal


def _model(stream: list[tuple[int, str]]) -> list[int]:
    prepared, effects = set(), []
    for number, what in stream:
        if what == "P":
            prepared.add(number)
        elif number in prepared:
            prepared.remove(number)
            effects.extend([number] * (what == "C"))
    return effects


# On brokers


def business(topic: str, number: int, *, fails: bool = False) -> Callable[[Any], None]:
    def change(session: Any) -> None:
        note(session, "produced", [identity(topic, number)])
        if fails:
            raise KeyError

    return change


def test_through_escrowmq_as_ordinary_messages(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    way = BothReachProducer(bus.producer("plain"), local, "shop")
    result = way.send(mq.Message(t, b"one", key="o-1", tag="x", message_id=identity(t, 1)), business(t, 1))
    assert result.done
    with pytest.raises(KeyError):
        way.send(mq.Message(t, b"two", message_id=identity(t, 2)), business(t, 2, fails=True))
    way.run_batch([mq.Message(t, b"%d" % n, message_id=identity(t, n)) for n in (3, 4, 5)], business(t, 3))
    stored = bus.admin.read(t).read_all().to_pylist()
    signs = [dict(row["properties"])[SIGN] for row in stored]
    assert (signs.count("prepare"), signs.count("commit"), signs.count("rollback")) == (5, 4, 1)
    assert all(len({row["queue"] for row in stored if row["key"] == key}) == 1 for key in {r["key"] for r in stored})
    seen: list[Prepared] = []
    consumer = BothReachConsumer(local, "cart", lambda session, messages: seen.extend(messages))
    while not settled(consumer, bus, t):
        pass
    assert sorted(m.message_id for m in seen) == sorted(identity(t, n) for n in (1, 3, 4, 5))
    assert {m.key for m in seen if m.body == b"one"} == {"o-1"}
    assert count(local, trans_prepared) == 0


def test_ends_have_ids_of_their_own() -> None:
    """Or a broker that de-duplicates would take the COMMIT for a repeat of the PREPARE."""
    assert len({end_id(b"i" * 16, Sign.COMMIT), end_id(b"i" * 16, Sign.ROLLBACK), b"i" * 16}) == 3


def test_a_delay_is_refused(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    """The COMMIT would overtake its PREPARE."""
    way = BothReachProducer(bus.producer("plain"), local, "shop")
    with pytest.raises(Rejected) as raised:
        way.send(mq.Message(t, b"later", delay=1.0), business(t, 1))
    assert raised.value.code is Code.BAD_DELAY
    assert noted(local, "produced") == []
    assert way.redrive() == Redriven()


def test_through_redis_with_acknowledgements(redis_url: str, local: sa.Engine, t: str) -> None:
    """A consumer that dies before it acknowledges gets everything again; each committed id has one effect."""
    redis = pytest.importorskip("redis")
    from escrowmq.outbox.targets.redis import BODY_FIELD, RedisTarget

    target = RedisTarget(redis_url, durability="memory")
    way = BothReachProducer(target, local, "shop")
    for number in range(6):
        if number == 2:
            with pytest.raises(KeyError):
                way.send(mq.Message(t, b"no", message_id=identity(t, 2)), business(t, 2, fails=True))
        else:
            way.send(mq.Message(t, b"yes", key="k", message_id=identity(t, number)), business(t, number))
    target.close()
    client = redis.Redis.from_url(redis_url)
    client.xgroup_create(t, "cart", "0")
    consumer = BothReachConsumer(local, "cart", reach_effect)

    def read(start: str) -> tuple[list[bytes], list[Arrival]]:
        found = client.xreadgroup("cart", "c", {t: start}, count=4)
        entries = found[0][1] if found else []
        texts = [{name.decode(): value for name, value in fields.items()} for _, fields in entries]
        bodies = [fields.pop(BODY_FIELD) for fields in texts]
        headers = [{name: value.decode() for name, value in fields.items()} for fields in texts]
        return [i for i, _ in entries], [Arrival(t, body, h) for body, h in zip(bodies, headers, strict=True)]

    class Died(Exception):
        pass

    def dies(_: Sequence[int]) -> None:
        raise Died

    while True:
        _, arrivals = read(">")
        if not arrivals:
            break
        with pytest.raises(Died):
            consumer.handle(arrivals, dies)
        ids, again = read("0")  # what was delivered and not acknowledged
        consumer.handle(again, lambda rows, ids=ids: client.xack(t, "cart", *[ids[row] for row in rows]))
    assert sorted(noted(local, "effects")) == sorted(noted(local, "produced"))
    assert len(noted(local, "effects")) == 5
    client.close()
