"""What a mode notices by itself: a refusal of what the database decided, a decision taken twice, a receipt that
changed, a key out of order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import escrowmq as mq
from escrowmq import outbox
from escrowmq_lab.chaos.books import Books
from escrowmq_lab.chaos.modes.barrier import check_decided, check_opposite_rejected
from escrowmq_lab.chaos.modes.offsets import OffsetsMode
from escrowmq_lab.chaos.modes.seam import Contradiction, KeyOrder, Site, key_of
from escrowmq_lab.databases import open_engine


@pytest.mark.parametrize("code", [mq.Code.CONFLICT, mq.Code.UNKNOWN_TRANSACTION, mq.Code.EXPIRED, mq.Code.WRONG_GROUP])
def test_a_decision_of_the_database_that_the_broker_refuses(code: mq.Code) -> None:
    with pytest.raises(Contradiction, match=code.name):
        check_decided(np.array([mq.Code.COMMITTED, code], np.uint8))


def test_what_a_fault_explains_is_no_contradiction_and_stands_for_nothing() -> None:
    codes = [mq.Code.COMMITTED, mq.Code.TIMED_OUT, mq.Code.BROKER_AWAY, mq.Code.ALREADY_COMMITTED, mq.Code.LOG_FAILED]
    assert check_decided(np.array(codes, np.uint8)).tolist() == [True, False, False, True, False]


def test_a_broker_that_takes_the_other_decision(tmp_path: Path) -> None:
    with mq.connect(f"file:{tmp_path}") as bus:
        producer = bus.producer("p", unasked=True)
        transactions = producer.prepare_batch([mq.Message("t", b"1"), mq.Message("t", b"2")]).transactions
        assert producer.end_batch(transactions.slice(0, 1), mq.COMMIT).ok
        check_opposite_rejected(producer, transactions.slice(0, 1), mq.ROLLBACK)
        with pytest.raises(Contradiction, match="ROLLED_BACK"):
            check_opposite_rejected(producer, transactions, mq.ROLLBACK)


def id_of_number(number: int) -> str:
    return f"offsets.producer-1.abcd.{number}.1"


def test_a_message_whose_receipt_changed(tmp_path: Path) -> None:
    mode, ids = OffsetsMode(), [id_of_number(number) for number in range(3)]
    with mq.connect(f"file:{tmp_path}") as bus:
        producer = bus.producer("p", qos=2)
        positions = producer.send_batch(mode.addressed(ids)).positions.tolist()
        mode._send_again(producer, ids, positions)
        with pytest.raises(Contradiction, match="taken twice"):
            mode._send_again(producer, ids, [*positions[:2], positions[2] + 1])


def test_a_refusal_of_a_pledged_message(tmp_path: Path) -> None:
    mode, one = OffsetsMode(), id_of_number(0)
    with mq.connect(f"file:{tmp_path}") as bus:
        producer = bus.producer("p", qos=2)
        producer.send(mode.topic(1), b"another body", key=mode.key(one), message_id=mode.addressed([one])[0].message_id)
        with pytest.raises(Contradiction, match="MESSAGE_ID_TAKEN"):
            mode._send_batch(producer, [one])


def test_a_key_out_of_order() -> None:
    order, same = KeyOrder(), [number for number in range(40) if key_of(id_of_number(number)).endswith(".3")]
    order.see(map(id_of_number, [same[0], same[0] + 1, same[1]]))
    order.see(["no id of a mode", id_of_number(same[0] - 1), "offsets.producer-2.abcd.0.1"])
    with pytest.raises(Contradiction, match="later in its key"):
        order.see([id_of_number(same[1])])


def test_what_an_earlier_process_owes_is_sent_first_and_in_its_order(tmp_path: Path) -> None:
    """It was killed after it had pledged twelve messages, and had been told of two."""
    engine = open_engine(f"sqlite:///{tmp_path / 'books.db'}")
    outbox.migrate(engine)
    books, ids = Books(engine), [id_of_number(number) for number in range(12)]
    books.make()
    books.intend("offsets", ids)
    with engine.begin() as connection:
        books.enter(connection, "offsets", ids)
    books.confirm("offsets", ids[:2])
    with mq.connect(f"file:{tmp_path / 'data'}") as bus:
        site = Site("producer-1", 1, 1, bus, "", engine, books, tmp_path, Random(1), rate=1e6)
        assert OffsetsMode()._read_pending(site) == ids[2:]
        sent: list[list[str]] = []

        class Noting(OffsetsMode):
            def _send_batch(self, producer: mq.Producer, ids: Sequence[str]) -> Any:
                sent.append(list(ids))
                return super()._send_batch(producer, ids)

            def _send(self, *given: Any) -> Any:
                done = super()._send(*given)
                site.ended.set()
                return done

        site.closing.set()
        Noting().place(site)
        assert sent == [ids[2:]]
        assert OffsetsMode()._read_pending(site) == []
    engine.dispose()
