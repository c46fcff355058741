"""The calls on an embedded broker: actions, views, look-ups, deliveries, sharing of one engine."""

import base64
from concurrent.futures import Future

import pyarrow as pa
import pytest

import escrowmq as mq
from escrowmq.broker.embedded import open_embedded
from escrowmq.errors import Code, EscrowError, Misuse, Rejected
from escrowmq.model import Act, DecidedBy, TransactionId
from escrowmq.schemas import DELIVERY, ENDING, HALF_VIEW, OP_VIEW, SETTLING
from escrowmq.settings import BrokerSettings
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import Exchange

SETTINGS = BrokerSettings(segment_bytes=1 << 22, transaction_timeout=0.05, default_queues=2)


@pytest.fixture
def link(tmp_path):
    opened = open_embedded(tmp_path / "data", SETTINGS)
    yield opened
    opened.close()


def produce(link, kind, rows, session):
    return link.exchange(kind, outgoing(rows), {"session": session}).result(60).to_pylist()


def end(link, session, pairs, by=DecidedBy.PRODUCER):
    columns = [pa.array([p[0] for p in pairs], pa.binary(16)), pa.array([p[1] for p in pairs], pa.uint8())]
    batch = pa.RecordBatch.from_arrays(columns, schema=ENDING)
    return link.exchange(Exchange.END, batch, {"session": session, "by": int(by)}).result(60)["code"].to_pylist()


def open_session(link, group="g", transactional=True):
    return link.action("session.open", {"group": group, "instance": "i", "transactional": transactional}, 60)["session"]


def receive(link, group="c", wait_ms=0, **options):
    options = {"group": group, "member": 1, "max_messages": 100, "wait_ms": wait_ms, **options}
    return link.exchange(Exchange.RECEIVE, None, options).result(60)


def settle(link, delivery, act, cause=None, delay_us=-1):
    rows = [
        {"lease": lease, "start": offset, "count": 1, "act": int(act), "delay_us": delay_us, "cause": cause}
        for lease, offset in zip(delivery["lease"].to_pylist(), delivery["offset"].to_pylist(), strict=True)
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=SETTLING)
    return link.exchange(Exchange.SETTLE, batch, {"group": "c"}).result(60)["code"].to_pylist()


def read(link, source, **request):
    return link.read({"source": source, **request}).read_all()


def test_the_views_tell_half_messages_and_decisions(link):
    """systems.md 1.5"""
    session = open_session(link)
    rows = produce(link, Exchange.PREPARE, [{"body": b"1"}, {"body": b"2"}, {"body": b"3"}], session)
    end(link, session, [(rows[0]["transaction"], 1), (rows[1]["transaction"], 2)])
    halves, decisions = read(link, "%half"), read(link, "%op")
    assert halves.schema.equals(HALF_VIEW)
    assert decisions.schema.equals(OP_VIEW)
    assert halves["state"].to_pylist() == [1, 2, 0]
    assert halves["transaction"].to_pylist() == [r["transaction"] for r in rows]
    assert decisions["half_position"].to_pylist() == [r["position"] for r in rows[:2]]
    assert decisions["transaction"].to_pylist() == [r["transaction"] for r in rows[:2]]
    undecided = set(halves["position"].to_pylist()) - set(decisions["half_position"].to_pylist())
    assert undecided == {rows[2]["position"]}, "what is undecided = half minus op"
    part = read(link, "%half", start=rows[1]["position"], end=rows[2]["position"], columns=["body", "state"])
    assert part.to_pydict() == {"body": [b"2"], "state": [2]}


@pytest.mark.invariant("I3", "I41")
def test_a_topic_is_browsed_by_offsets_and_hides_what_is_not_committed(link):
    """I3"""
    session = open_session(link)
    rows = produce(link, Exchange.PREPARE, [{"body": bytes([n]), "queue": 1} for n in range(10)], session)
    assert read(link, "orders", queue=1).num_rows == 0
    end(link, session, [(r["transaction"], 2 if n == 4 else 1) for n, r in enumerate(rows)])
    table = read(link, "orders", queue=1)
    assert table.schema.equals(DELIVERY)
    assert [b[0] for b in table["body"].to_pylist()] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert set(table["lease"].to_pylist()) == {-1}
    assert set(table["attempt"].to_pylist()) == {0}
    assert table["transaction"].to_pylist() == [r["transaction"] for n, r in enumerate(rows) if n != 4]
    assert read(link, "orders", queue=1, start=2, end=5)["offset"].to_pylist() == [2, 3, 4]
    assert read(link, "orders", queue=1, start=2, max_rows=1)["offset"].to_pylist() == [2]
    assert read(link, "orders", queue=1, start=100).num_rows == 0
    with pytest.raises(Rejected):
        link.read({"source": "orders", "queue": 9})


def test_a_joined_message_carries_the_id_of_its_transaction_also_from_another_session(link):
    first = open_session(link)
    (one,) = produce(link, Exchange.PREPARE, [{"body": b"1", "queue": 0}], first)
    second = link.action("session.open", {"group": "g", "instance": "2", "transactional": True}, 60)["session"]
    produce(link, Exchange.PREPARE, [{"body": b"2", "queue": 0, "transaction": one["transaction"]}], second)
    end(link, second, [(one["transaction"], 1)])
    table = read(link, "orders", queue=0)
    assert table["body"].to_pylist() == [b"1", b"2"]
    assert set(table["transaction"].to_pylist()) == {one["transaction"]}


def test_a_transaction_is_shown_with_its_timeline(link):
    session = open_session(link)
    asked: Future[pa.RecordBatch] = Future()
    watch = link.watch(session, lambda batch: asked.done() or asked.set_result(batch))
    (row,) = produce(link, Exchange.PREPARE, [{"body": b"1", "key": "k"}], session)
    assert asked.result(60)["transaction"].to_pylist() == [row["transaction"]]
    assert end(link, session, [(row["transaction"], 1)], DecidedBy.CHECK) == [Code.COMMITTED]
    watch.close()
    shown = link.action("transactions.show", {"id": str(TransactionId.from_bytes(row["transaction"]))}, 60)
    assert shown["state"] == "committed"
    assert shown["checks"] == 1
    assert [m["key"] for m in shown["messages"]] == ["k"]
    assert [(e["event"], e.get("attempt"), e.get("by")) for e in shown["timeline"]] == [
        ("prepared", None, None),
        ("checked", 1, None),
        ("committed", None, "check"),
    ]
    times = [e["time_us"] for e in shown["timeline"]]
    assert times == sorted(times)


def test_operators_settle_and_recheck(link):
    session = open_session(link)
    rows = produce(link, Exchange.PREPARE, [{}, {}], session)
    ids = [str(TransactionId.from_bytes(r["transaction"])) for r in rows]
    assert link.action("transactions.recheck", {"ids": ids}, 60)["codes"] == ["OK", "OK"]
    answer = link.action("transactions.settle", {"ids": [*ids, ids[0]], "outcome": "commit"}, 60)
    assert answer["codes"] == ["COMMITTED", "COMMITTED", "ALREADY_COMMITTED"]
    assert link.action("transactions.recheck", {"ids": ids[:1]}, 60)["codes"] == ["TRANSACTION_DECIDED"]
    assert read(link, "%op")["decided_by"].to_pylist() == [DecidedBy.OPERATOR] * 2


def test_transactions_are_listed_in_pages(link):
    session = open_session(link)
    rows = produce(link, Exchange.PREPARE, [{} for _ in range(5)], session)
    seen, after = [], None
    while True:
        request = {"limit": 2, "state": "open", **({"after": after} if after is not None else {})}
        page = link.action("transactions.list", request, 60)
        seen += [t["position"] for t in page["transactions"]]
        if (after := page.get("next")) is None:
            break
    assert seen == [r["position"] for r in rows]
    assert link.action("transactions.list", {"older_than": 3600}, 60)["transactions"] == []


def test_messages_are_found_by_id_and_key_whatever_became_of_them(link):
    """systems.md 2.1"""
    session = open_session(link)
    rows = [{"body": b"a", "key": "k", "message_id": "order-1"}, {"body": b"b", "key": "k", "message_id": "order-2"}]
    made = produce(link, Exchange.PREPARE, rows, session)
    end(link, session, [(made[1]["transaction"], 1)])
    (found,) = link.action("lookup", {"message_id": "order-1"}, 60)["messages"]
    assert (found["state"], found["visible"], base64.b64decode(found["body_base64"])) == ("open", False, b"a")
    states = [(m["state"], m["visible"]) for m in link.action("lookup", {"key": "k"}, 60)["messages"]]
    assert states == [("committed", True), ("open", False)], "newest first"
    assert link.action("lookup", {"key": "k", "topic": "other"}, 60)["messages"] == []
    assert len(link.action("lookup", {"key": "k", "limit": 1}, 60)["messages"]) == 1


@pytest.mark.invariant("I25")
def test_dead_letters_are_listed_read_retried_and_discarded(link):
    """I25"""
    link.action("groups.subscribe", {"group": "c", "topics": ["orders"], "max_attempts": 1}, 60)
    produce(link, Exchange.SEND, [{"body": b"1", "key": "k"}, {"body": b"2", "key": "k"}], 0)
    delivery = receive(link, wait_ms=60_000)
    assert settle(link, delivery, Act.NACK, "cannot do it") == [Code.OK, Code.OK]
    letters = link.action("dead_letters.list", {"group": "c"}, 60)["dead_letters"]
    assert [(d["cause"], d["key"], d["attempts"]) for d in letters] == [("cannot do it, attempt 1 of 1", "k", 1)] * 2
    assert read(link, "%dead-letters.c")["body"].to_pylist() == [b"1", b"2"]
    item = {name: letters[0][name] for name in ("topic", "queue", "offset")}
    answer = link.action("dead_letters.settle", {"group": "c", "items": [item], "act": "retry"}, 60)
    assert answer["codes"] == ["OK"]
    again = receive(link, wait_ms=60_000)
    assert (again["body"].to_pylist(), again["attempt"].to_pylist()) == ([b"1"], [1])
    answer = link.action("dead_letters.settle", {"group": "c", "all": True, "act": "discard"}, 60)
    assert answer["codes"] == ["OK"]
    assert link.action("dead_letters.list", {"group": "c"}, 60)["dead_letters"] == []


def test_a_waiting_receive_gets_what_comes(link):
    link.action("groups.subscribe", {"group": "c", "topics": ["orders"]}, 60)
    options = {"group": "c", "member": 1, "wait_ms": 60_000}
    waiting = link.exchange(Exchange.RECEIVE, None, options)
    produce(link, Exchange.SEND, [{"body": b"x", "properties": [("a", "b")]}], 0)
    assert waiting.result(60)["body"].to_pylist() == [b"x"]


def test_qos_0_names_no_place(link):
    answer = link.exchange(Exchange.SEND, outgoing([{}]), {"flush": "async"}).result(60).to_pylist()
    assert [(a["code"], a["position"], a["offset"]) for a in answer] == [(Code.OK, -1, -1)]
    problem = link.exchange(Exchange.SEND, outgoing([{}]), {"flush": "never"}).exception(60)
    assert problem.code == Code.BAD_REQUEST


def test_an_end_needs_a_session(link):
    with pytest.raises(Rejected) as caught:
        end(link, 0, [(bytes(16), 1)])
    assert caught.value.code == Code.UNKNOWN_SESSION


def test_links_to_one_folder_share_one_engine(tmp_path):
    one = open_embedded(tmp_path / "data", SETTINGS)
    other = open_embedded(tmp_path / "data" / ".." / "data", SETTINGS)
    said, again = ({**link.action("hello", {}, 60)} for link in (one, other))
    assert 0 <= again.pop("time_us") - said.pop("time_us") < 600e6
    assert said == again
    with pytest.raises(Misuse) as caught:
        open_embedded(tmp_path / "data", BrokerSettings(check_max=3))
    assert caught.value.code == Code.BAD_SETTING
    one.close()
    one.close()
    assert other.action("health", {}, 60)["status"] == "ok"
    with pytest.raises(EscrowError) as closed:
        one.action("health", {}, 60)
    assert closed.value.code == Code.CLOSED
    other.close()
    with open_embedded_again(tmp_path / "data") as epoch:
        assert epoch == 2


class open_embedded_again:
    def __init__(self, folder):
        self.link = open_embedded(folder, SETTINGS)

    def __enter__(self):
        return self.link.action("hello", {}, 60)["epoch"]

    def __exit__(self, *_):
        self.link.close()


def test_closing_a_link_withdraws_its_receives_and_ends_its_watch(tmp_path):
    one, other = (open_embedded(tmp_path / "data", SETTINGS) for _ in range(2))
    session = open_session(one)
    one.action("groups.subscribe", {"group": "c", "topics": ["orders"]}, 60)
    watch = one.watch(session, lambda _: None)
    waiting = one.exchange(Exchange.RECEIVE, None, {"group": "c", "member": 1, "wait_ms": 60_000})
    assert other.action("producers.list", {}, 60)["producers"][0]["members"] == 1
    one.close()
    assert waiting.cancelled()
    assert not watch.broken
    assert other.action("producers.list", {}, 60)["producers"][0]["members"] == 0
    produce(other, Exchange.SEND, [{"body": b"x"}], 0)
    assert receive(other, wait_ms=60_000)["attempt"].to_pylist() == [1]
    other.close()


def test_a_checker_that_raises_breaks_its_watch_and_nothing_else(link):
    session = open_session(link)

    class Reported(Exception):
        pass

    import threading

    raised = threading.Event()
    before, threading.excepthook = threading.excepthook, lambda _: raised.set()
    try:

        def on_checks(_):
            raise Reported

        watch = link.watch(session, on_checks)
        produce(link, Exchange.PREPARE, [{}], session)
        assert raised.wait(60)
        watch._thread.join(60)
        assert watch.broken
    finally:
        threading.excepthook = before
    assert link.action("producers.list", {}, 60)["producers"][0]["members"] == 0


def test_a_torn_tail_is_cut_off_and_told(tmp_path, caplog):
    folder = tmp_path / "data"
    with mq.connect(f"file:{folder}") as bus:
        bus.producer("p").send("t", b"one")
    (segment,) = folder.glob("*.segment")
    size = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(b"EMQF and what a crash left of a frame")
    with caplog.at_level("INFO", "escrowmq.events"), mq.connect(f"file:{folder}") as bus:
        assert bus.producer("p").send("t", b"two").position > 0
    (told,) = [record.facts for record in caplog.records if record.facts["event"] == "recovered"]
    assert (told["file"], told["offset"], told["bytes"]) == (segment.name, size, 37)
    assert told["what"]
