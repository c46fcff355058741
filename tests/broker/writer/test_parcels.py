"""Parcels in a round: answered as their batches would be, refused alone, and once."""

import logging
from typing import Any

import pytest
from broker_bench import Bench, end, prepare

from escrowmq.broker.calls import Calls
from escrowmq.broker.writer import shard
from escrowmq.broker.writer.rounds import PLAIN_ROWS
from escrowmq.broker.writer.shard import PACKED_BYTES, PACKED_ROWS
from escrowmq.errors import Code, EscrowError
from escrowmq.ledger.commands import CreateTopic, Receive
from escrowmq.log.frames import pack
from escrowmq.message.row import OutgoingRow
from escrowmq.model import COMMIT, Act, DecidedBy, message_id
from escrowmq.schemas import Kind
from escrowmq.wire import Exchange, Parcel
from escrowmq.wire.parcels import Answer

HALF_CHARACTER = "\ud800"  # half a character: no Unicode text


def row(topic: str = "orders", **given: Any) -> OutgoingRow:
    empty: dict[str, Any] = {
        "body": b"b",
        "key": None,
        "tag": None,
        "properties": None,
        "message_id": None,
        "queue": -1,
    }
    empty |= {"born_us": 1, "delay_us": 0, "immunity_us": 0, "transaction": None}
    return OutgoingRow(topic, **{**empty, **given})


class Mailer:
    """Sends parcels to the engine of a bench, and keeps what they are answered."""

    def __init__(self, **settings: Any) -> None:
        self.bench = Bench(**settings)
        self.calls = Calls(self.bench.engine)
        self.bench.do(CreateTopic("orders", 2))
        self.session = self.bench.session()
        self._sequence = 0

    def post(self, kind: Exchange, *rows: Any, options: Any = None, first_id: Any = None) -> list[Answer | EscrowError]:
        """The list into which the answer comes with the next round."""
        self._sequence += 100
        answers: list[Answer | EscrowError] = []
        session = 0 if kind is Exchange.SEND else self.session
        given = {"session": session} if options is None else options
        parcel = Parcel(kind, rows, given, first_id or (9, self._sequence))
        self.calls.parcel(parcel, answers.append)
        return answers

    def ask(self, kind: Exchange, *rows: Any, **given: Any) -> Any:
        answers = self.post(kind, *rows, **given)
        self.bench.engine.step()
        (answer,) = answers
        return answer


def refusal(answers: list[Answer | EscrowError]) -> Code:
    (answer,) = answers
    assert isinstance(answer, EscrowError)
    return answer.code


def test_a_transaction_by_parcels_alone():
    mailer = Mailer()
    mailer.bench.subscribe()
    plain = mailer.ask(Exchange.SEND, row(key="k"), row(delay_us=5))
    assert [(code, offset) for code, _, _, offset, _ in plain] == [(Code.OK, 0), (Code.OK, -1)]
    half = mailer.ask(Exchange.PREPARE, row(tag="t", properties=[("a", "b")]))
    transaction = half[0][4]
    (joined,) = mailer.ask(Exchange.PREPARE, row(transaction=transaction))
    assert joined[4] == transaction
    assert mailer.ask(Exchange.END, (transaction, COMMIT)) == bytes([Code.COMMITTED])
    leased = mailer.bench.do(Receive("c", 1, 10, 60_000_000))
    assert set(leased.positions.tolist()) == {plain[0][1], half[0][1], joined[1]}
    acks = [
        (lease, at, 1, Act.ACK, -1, None)
        for lease, at in zip(leased.leases.tolist(), leased.offsets.tolist(), strict=True)
    ]
    assert mailer.ask(Exchange.SETTLE, *acks, options={"group": "c"}) == bytes(3)


@pytest.fixture(autouse=True)
def _no_bug_is_hidden(caplog):
    """What a bug of the rows' way raises is logged, and decided as columns: here it fails."""
    yield
    assert not [record for record in caplog.records if record.message.startswith("deciding")]


def test_neighbours_among_parcels_and_batches_each_get_their_own_rows():
    mailer = Mailer()
    first = mailer.post(Exchange.PREPARE, row(), row())
    batch = mailer.bench.engine.submit(prepare(mailer.session, {}, {}, {}))
    last = mailer.post(Exchange.PREPARE, row())
    mailer.bench.engine.step()
    positions = [r[1] for r in first[0]] + batch.result(timeout=0)["position"].to_pylist() + [r[1] for r in last[0]]
    assert positions == list(range(positions[0], positions[0] + 6))


def test_more_rows_than_go_as_rows_are_one_frame_too():
    mailer = Mailer()
    sequence = mailer.bench.engine.log.next_sequence
    answers = [mailer.post(Exchange.SEND, row(), row()) for _ in range(PLAIN_ROWS // 2 + 1)]
    mailer.bench.engine.step()
    assert mailer.bench.engine.log.next_sequence == sequence + 1
    positions = [r[1] for (answer,) in answers for r in answer]
    assert positions == list(range(positions[0], positions[0] + PLAIN_ROWS + 2))


@pytest.mark.parametrize(
    "bad",
    [
        ("orders",),
        list(row()),
        row(body="text"),
        row(key=b"k"),
        row(tag=1),
        row(queue=True),
        row(delay_us=1.0),
        row(message_id=b"short"),
        row(transaction=b"short"),
        row(properties=[("a", None)]),
        row(properties=["ab"]),
        row(properties={"a": "b"}),
        row(key=HALF_CHARACTER),
        row(topic=HALF_CHARACTER),
        row(properties=[("a", HALF_CHARACTER)]),
        row(queue=1 << 31),
        row(born_us=1 << 63),
        row(delay_us=1 << 70),
        7,
    ],
)
@pytest.mark.parametrize("kind", [Exchange.SEND, Exchange.PREPARE])
def test_a_malformed_parcel_is_refused_alone(kind, bad):
    mailer = Mailer()
    before, wrong, after = (mailer.post(kind, one) for one in (row(), bad, row()))
    mailer.bench.engine.step()
    assert refusal(wrong) in (Code.BAD_BATCH, Code.BAD_DELAY)
    assert [before[0][0][0], after[0][0][0]] == [Code.OK, Code.OK]
    assert mailer.bench.engine.status == "ok"


@pytest.mark.parametrize(
    ("kind", "rows", "options", "code"),
    [
        (Exchange.END, [(bytes(15), 1)], None, Code.BAD_BATCH),
        (Exchange.END, [(bytes(16), "1")], None, Code.BAD_BATCH),
        (Exchange.END, [(bytes(16), 300)], None, Code.BAD_BATCH),
        (Exchange.END, [(bytes(16), 1)], {}, Code.UNKNOWN_SESSION),
        (Exchange.END, [(bytes(16), 1)], {"session": 1, "by": 7}, Code.BAD_REQUEST),
        (Exchange.END, [(bytes(16), 1)], {"session": True}, Code.BAD_REQUEST),
        (Exchange.END, [(bytes(16), 1)], {"session": []}, Code.BAD_REQUEST),
        (Exchange.SETTLE, [(1, 0, 1, 0, 0, None)], {}, Code.BAD_REQUEST),
        (Exchange.SETTLE, [(1 << 64, 0, 1, 0, 0, None)], {"group": "c"}, Code.BAD_BATCH),
        (Exchange.SETTLE, [(1, 0, 1, 0, 0, HALF_CHARACTER)], {"group": "c"}, Code.BAD_BATCH),
        (Exchange.RECEIVE, [], {"group": "c", "member": 1}, Code.BAD_REQUEST),
        (Exchange.SEND, [row()] * 257, None, Code.BATCH_TOO_LARGE),
    ],
)
def test_what_is_no_parcel_is_refused(kind, rows, options, code):
    mailer = Mailer()
    mailer.ask(Exchange.END, (bytes(16), 1), options={"session": 1})  # options that are equal to wrong ones
    answers = mailer.post(kind, *rows, options=options)
    mailer.bench.engine.step()
    assert refusal(answers) == code
    assert mailer.bench.engine.status == "ok"


@pytest.mark.parametrize("first_id", [(1 << 64, 0), (-1, 0), (0, (1 << 64) - 1), (0, -1)])
def test_ids_that_are_none_are_refused(first_id):
    mailer = Mailer()
    assert refusal(mailer.post(Exchange.SEND, row(), row(), first_id=first_id)) == Code.BAD_BATCH


def test_an_empty_parcel_is_answered_at_once():
    mailer = Mailer()
    assert mailer.post(Exchange.SEND) == [[]]
    assert mailer.post(Exchange.END) == [b""]


def test_an_early_send_names_no_place_and_is_answered_once():
    mailer = Mailer()
    mailer.bench.disk.fail_next_sync = True
    answers = mailer.post(Exchange.SEND, row(), options={"flush": "async"})
    mailer.bench.engine.step()
    ((code, position, queue, offset, transaction),) = answers[0]
    assert (code, position, offset, transaction) == (Code.OK, -1, -1, None)
    assert queue >= 0
    assert len(answers) == 1, "not again, though the sync failed"


def test_a_prepare_replaces_as_its_batch_would():
    mailer = Mailer()
    options = {"session": mailer.session, "replace": True}
    one = mailer.ask(Exchange.PREPARE, row(message_id=message_id("a")), options=options)
    two = mailer.ask(Exchange.PREPARE, row(message_id=message_id("a"), body=b"new"), options=options)
    assert two[0][4] != one[0][4]
    assert mailer.ask(Exchange.END, (one[0][4], COMMIT)) == bytes([Code.CONFLICT])


def test_an_answer_to_a_check_closes_the_question():
    mailer = Mailer(transaction_timeout=1, checks_in_flight=1)
    member = mailer.bench.engine.listeners.join("g", mailer.session)
    transactions = [mailer.ask(Exchange.PREPARE, row())[0][4] for _ in range(2)]
    mailer.bench.pass_time(1.5)
    asked = [q for _ in range(member.waiting) for q in member.batches_of(member.take())]
    assert [batch.num_rows for batch in asked] == [1], "one question is out at a time"
    options = {"session": mailer.session, "by": DecidedBy.CHECK}
    first = asked[0].column("transaction")[0].as_py()
    assert mailer.ask(Exchange.END, (first, COMMIT), options=options) == bytes([Code.COMMITTED])
    mailer.bench.engine.step()
    (other,) = [q for _ in range(member.waiting) for q in member.batches_of(member.take())]
    assert other.column("transaction").to_pylist() == [t for t in transactions if t != first]


def test_too_much_that_waits_is_refused_at_once():
    mailer = Mailer(max_waiting_bytes=1 << 20)
    mailer.post(Exchange.SEND, row(body=bytes(1 << 19)))
    assert refusal(mailer.post(Exchange.SEND, row(body=bytes(1 << 20)))) == Code.QUEUE_FULL


def test_a_failed_sync_answers_every_parcel_with_an_error():
    """I34"""
    mailer = Mailer()
    mailer.bench.disk.fail_next_sync = True
    answers = [mailer.post(Exchange.PREPARE, row()), mailer.post(Exchange.SEND, row())]
    mailer.bench.engine.step()
    assert [refusal(one) for one in answers] == [Code.SHARD_STOPPED] * 2
    later = mailer.post(Exchange.SEND, row())
    mailer.bench.engine.step()
    assert refusal(later) == Code.SHARD_STOPPED


def test_a_callback_that_raises_keeps_nobody_from_an_answer(caplog):
    mailer = Mailer()

    def raising(answer: object) -> None:
        raise RuntimeError("a caller's mistake")

    mailer.calls.parcel(Parcel(Exchange.SEND, [row()], {}, (1, 1)), raising)
    after = mailer.post(Exchange.SEND, row())
    with caplog.at_level(logging.CRITICAL):
        mailer.bench.engine.step()
    assert after[0][0][0] == Code.OK


def test_batches_and_parcels_of_one_lane_are_one_command():
    mailer = Mailer()
    (one,) = mailer.ask(Exchange.PREPARE, row())
    (two,) = mailer.ask(Exchange.PREPARE, row())
    sequence = mailer.bench.engine.log.next_sequence
    parcel = mailer.post(Exchange.END, (one[4], COMMIT))
    batch = mailer.bench.engine.submit(end(mailer.session, COMMIT, two[4]))
    mailer.bench.engine.step()
    assert parcel == [bytes([Code.COMMITTED])]
    assert batch.result(timeout=0)["code"].to_pylist() == [Code.COMMITTED]
    assert mailer.bench.engine.log.next_sequence == sequence + 1


@pytest.mark.parametrize(
    ("rows", "body", "packed"),
    [
        (PACKED_ROWS, b"b", True),
        (PACKED_ROWS + 1, b"b", False),
        (2, b"b" * (PACKED_BYTES // 2), True),
        (2, b"b" * (PACKED_BYTES // 2 + 1), False),
    ],
    ids=["rows", "a row more", "bytes", "a byte more"],
)
def test_rounds_too_large_to_be_packed_are_made_by_arrow(monkeypatch, rows, body, packed):
    mailer = Mailer()
    seen = []
    monkeypatch.setattr(shard, "pack", lambda kind, columns: seen.append(kind) or pack(kind, columns))
    sequence = mailer.bench.engine.log.next_sequence
    answers = [mailer.post(Exchange.PREPARE, row(body=body, key=str(number))) for number in range(rows)]
    mailer.bench.engine.step()
    assert seen == [Kind.HALF] * packed
    frame = next(frame for frame in mailer.bench.engine.log.frames(sequence) if frame.kind == Kind.HALF)
    assert frame.batch.column("key").to_pylist() == [str(number) for number in range(rows)]
    assert frame.batch.column("body").to_pylist() == [body] * rows
    assert [answer[0][0] for (answer,) in answers] == [Code.OK] * rows
