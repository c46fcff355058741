"""Repeats are held against the log before they are answered: within a round, over restarts, beside damage, after
retention.
"""

import numpy as np
import pytest
from broker_bench import Bench, prepare, send

from escrowmq.broker.writer.repeats import judge
from escrowmq.errors import Code, error
from escrowmq.ledger.commands import Prepare
from escrowmq.ledger.events import Repeats
from escrowmq.model import COMMIT
from escrowmq.schemas import Kind
from escrowmq.testing.ledgers import outgoing


def codes(*futures):
    return [[Code(c).name for c in future.result(timeout=0)["code"].to_pylist()] for future in futures]


@pytest.mark.invariant("I9")
def test_repeats_within_one_round_are_compared_too():
    bench = Bench()
    rows = [{"message_id": "a", "body": b"a"}, {"message_id": "a", "body": b"b"}, {"message_id": "b"}]
    futures = [bench.engine.submit(send(0, row)) for row in [*rows, rows[0]]]
    bench.engine.step()
    assert codes(*futures) == [["OK"], ["MESSAGE_ID_TAKEN"], ["OK"], ["OK"]]
    assert futures[0].result() == futures[3].result()


def test_an_early_answer_is_compared_too():
    bench = Bench()
    rows = {"message_id": "a", "body": b"a"}, {"message_id": "a", "body": b"b"}
    futures = [bench.engine.submit(send(0, row), early=True) for row in rows]
    bench.engine.step()
    assert codes(*futures) == [["OK"], ["MESSAGE_ID_TAKEN"]]


def test_the_parts_of_a_merged_command_get_their_own_verdicts():
    bench = Bench()
    first = bench.do(send(0, *({"message_id": f"{n}", "body": b"a"} for n in range(9))))
    sizes = (2, 1, 3)
    bodies = iter([b"a", b"x", b"a", b"a", b"a", b"x"])
    numbers = iter(range(6))
    futures = [
        bench.engine.submit(send(0, *({"message_id": f"{next(numbers)}", "body": next(bodies)} for _ in range(size))))
        for size in sizes
    ]
    bench.engine.step()
    assert codes(*futures) == [["OK", "MESSAGE_ID_TAKEN"], ["OK"], ["OK", "OK", "MESSAGE_ID_TAKEN"]]
    assert futures[2].result()["position"].to_pylist() == [*first["position"].to_pylist()[3:5], -1]


def test_repeats_of_one_round_come_in_one_read(monkeypatch):
    bench = Bench()
    rows = [{"message_id": f"{n}"} for n in range(2000)]
    bench.do(send(0, *rows))
    reads = []
    read = bench.engine.log.salvage
    monkeypatch.setattr(bench.engine.log, "salvage", lambda *wanted: reads.append(wanted) or read(*wanted))
    assert bench.do(send(0, *rows[::-1]))["code"].to_pylist() == [Code.OK] * 2000
    assert len(reads) == 1


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("code", [Code.DAMAGED, Code.RANGE_PURGED])
def test_a_message_that_cannot_be_read_says_nothing_of_the_others(monkeypatch, code):
    """Damaged: nobody can say whether the repeat is the same. Gone with retention since: its id was the same."""
    bench = Bench()
    first = [bench.do(send(0, {"message_id": name}))["position"][0].as_py() for name in "abc"]
    read = bench.engine.log.salvage

    def damaged(positions, *columns):
        if first[1] in positions:
            raise error(code)
        return read(positions, *columns)

    monkeypatch.setattr(bench.engine.log, "salvage", damaged)
    repeated = [{"message_id": "a"}, {"message_id": "b"}, {"message_id": "c", "body": b"x"}]
    answers = bench.do(send(0, *repeated))["code"].to_pylist()
    assert answers == [Code.OK, Code.DAMAGED if code is Code.DAMAGED else Code.OK, Code.MESSAGE_ID_TAKEN]


def test_repeats_in_any_order_and_several_of_one_message():
    bench = Bench()
    places = [bench.do(send(0, {"message_id": name, "body": name.encode()}))["position"][0].as_py() for name in "abc"]
    batch = outgoing([{"body": b"c"}, {"body": b"a"}, {"body": b"x"}, {"body": b"b"}])
    repeats = Repeats(np.array([0, 1, 2, 3]), np.array(places)[[2, 0, 0, 1]])
    assert judge(bench.engine.log, batch, repeats).tolist() == [0, 0, Code.MESSAGE_ID_TAKEN, 0]


def replacing(session, *rows):
    batch = outgoing(rows)
    return Prepare(batch, np.full(batch.num_rows, session), replace=True)


def test_what_replaces_is_not_merged_and_the_same_again_is_a_repeat():
    bench = Bench()
    session = bench.session()
    rows = [{"message_id": "x", "body": body} for body in (b"a", b"b", b"b", b"c")]
    futures = [bench.engine.submit(replacing(session, row)) for row in rows]
    bench.engine.step()
    assert codes(*futures) == [["OK"]] * 4
    a, b, again, c = (future.result()["transaction"][0].as_py() for future in futures)
    assert b == again
    assert len({a, b, c}) == 3
    assert bench.end(session, COMMIT, a, b, c) == [Code.CONFLICT, Code.CONFLICT, Code.COMMITTED]


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("clean", [True, False])
def test_a_replacement_is_durable_before_its_answer(clean):
    bench = Bench()
    session = bench.session()
    [a] = bench.prepare(session, {"message_id": "x", "body": b"a"})
    [b] = bench.do(replacing(session, {"message_id": "x", "body": b"b"})).to_pylist()
    bench.restart(clean=clean)
    assert bench.end(session, COMMIT, a["transaction"], b["transaction"]) == [Code.CONFLICT, Code.COMMITTED]
    kinds = [frame.kind for frame in bench.engine.log.frames(0, [Kind.HALF, Kind.DECIDED])]
    assert kinds == [Kind.HALF, Kind.DECIDED, Kind.HALF, Kind.DECIDED]
    assert bench.do(prepare(session, {"message_id": "x", "body": b"a"}))["code"].to_pylist() == [Code.MESSAGE_ID_TAKEN]
