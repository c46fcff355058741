"""What waits in a database, summed up, against plain loops over the rows; counts end at a bound and say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

import escrowmq as mq
from escrowmq import outbox
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.tables import State, trans_driven, trans_message
from escrowmq.overview import Cause, waiting
from escrowmq.overview.waits import databases

ASIDE = st.tuples(
    st.sampled_from([State.WAITING, State.RETRYING, State.HELD, State.PENDING, State.SENT]), st.integers(1, 50)
)
DRIVEN = st.tuples(st.sampled_from(["shop", "cart", "bank"]), st.sampled_from([Stage.STUCK, Stage.STORED]),
st.integers(1, 50))  # fmt: skip


@contextmanager
def filled(rows: list[tuple[State, int]], driven: list[tuple[str, Stage, int]]) -> Iterator[sa.Engine]:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    outbox.migrate(engine)
    common = {"topic": "orders", "body": b"", "delay_us": 0, "attempts": 1}
    messages = [
        {**common, "id": b"m%15d" % n, "lane": n % 64, "state": state.value, "due_us": 0, "created_us": made,
        "error": "full"}
        for n, (state, made) in enumerate(rows)
    ]  # fmt: skip
    others = [
        {**common, "id": b"d%15d" % n, "producer_group": group, "state": stage.value, "created_us": made}
        for n, (group, stage, made) in enumerate(driven)
    ]
    with engine.begin() as connection:
        for table, these in ((trans_message, messages), (trans_driven, others)):
            if these:
                connection.execute(sa.insert(table), these)
    yield engine
    engine.dispose()


def told(bus: mq.Bus, engine: sa.Engine, most: int) -> list[Cause]:
    with mock.patch.multiple(databases, COUNTED=most, COUNTED_ONE_BY_ONE=most, LISTED=most):
        return waiting(bus, [engine])


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mq.Bus]:
    with mq.connect(f"file:{tmp_path_factory.mktemp('nothing') / 'data'}") as made:
        yield made


@settings(max_examples=25, deadline=None)
@given(st.lists(ASIDE, max_size=12), st.lists(DRIVEN, max_size=12), st.integers(2, 20))
def test_a_sum_is_what_the_rows_are_up_to_its_bound(bus, rows, driven, most):
    with filled(rows, driven) as engine:
        found: Counter[tuple[str, str]] = Counter()
        for cause in told(bus, engine, most):
            kind = cause.selection.get("state") if cause.kind == "outbox" and cause.selection else cause.kind
            kind = "pending" if kind == "outbox" else kind
            found[kind, cause.of] += cause.count
            if cause.at_least:
                assert found[kind, cause.of] == most
    expected: Counter[tuple[str, str]] = Counter()
    for state, _ in rows:
        if state is not State.SENT:
            expected[state.name.lower(), "outbox"] += 1
    for group, stage, _ in driven:
        expected["stuck" if stage is Stage.STUCK else "unfinished", group] += 1
    assert found == {what: min(count, most) for what, count in expected.items()}


def test_more_than_the_bound_are_at_least_so_many(bus):
    with filled([(State.PENDING, n + 1) for n in range(5)], []) as engine:
        (cause,) = told(bus, engine, 3)
        assert (cause.count, cause.at_least, cause.oldest_us) == (3, True, 1)
        assert cause.sentence.startswith("At least 3 rows of the outbox wait to be sent")
        (cause,) = told(bus, engine, 5)
        assert (cause.count, cause.at_least) == (5, False)


def test_producer_groups_beyond_the_bound_are_not_left_out_silently(bus):
    with filled([], [(f"g{n}", Stage.STUCK, 1) for n in range(4)]) as engine, mock.patch.object(databases, "GROUPS", 3):
        causes = told(bus, engine, 9)
        assert [(cause.of, cause.count) for cause in causes if cause.kind == "stuck"] == [
            ("g0", 1),
            ("g1", 1),
            ("g2", 1),
        ]
        (others,) = (cause for cause in causes if cause.kind == "unfinished")
        assert others.at_least
        assert "more than 3 producer-driven groups" in others.sentence
