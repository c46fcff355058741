"""A broker lets go of what is beyond the retention of its topic, and the disk has the space back."""

from broker_bench import Bench, send

from escrowmq.errors import Code
from escrowmq.ledger.commands import AlterTopic, CreateTopic, DeleteTopic, TopicRules
from escrowmq.ledger.queues.queues import ROW_BYTES
from escrowmq.model import COMMIT

SECOND = 1_000_000
BODY = 10_000


def fill(bench: Bench, topic: str, count: int = 20) -> None:
    for _ in range(count):
        bench.clock.advance(0.01)
        bench.do(send(0, {"topic": topic, "queue": 0, "body": bytes(BODY)}))


def segment_bytes(bench: Bench) -> int:
    return bench.engine.log.stored_bytes()


def upkeep(bench: Bench, seconds: float = 0.0, times: int = 5) -> None:
    """Mark, save, drop."""
    for step in range(times):
        bench.pass_time(seconds if step == 0 else 0.1)
        bench.await_save()


def heads(bench: Bench, *topics: str) -> list[int]:
    ledger = bench.engine.shard.ledger
    return [ledger.queue(ledger.queue_id(topic, 0)).head for topic in topics]


def made(**settings: float) -> Bench:
    bench = Bench(**{"retention": 3600.0, "dedup_window": 100.0, "segment_bytes": 1 << 16, **settings})
    for topic in ("short", "other"):
        bench.do(CreateTopic(topic, 1))
    return bench


def test_a_topic_is_cut_every_ten_seconds_and_nothing_is_done_where_no_topic_has_a_retention():
    bench = made()
    fill(bench, "short", 2)
    upkeep(bench, 2)
    quiet = bench.engine.upkeep.wake_us
    assert quiet >= bench.engine.shard.time_us + 50 * SECOND
    bench.do(AlterTopic("short", None, TopicRules(retention_us=15 * SECOND)))
    upkeep(bench)
    assert heads(bench, "short") == [0]
    assert bench.engine.upkeep.wake_us <= bench.engine.shard.time_us + 10 * SECOND
    bench.pass_time(11)
    assert heads(bench, "short") == [0]
    bench.pass_time(11)
    assert heads(bench, "short") == [2]
    bench.do(AlterTopic("short", None, TopicRules(), ["retention_us"]))
    upkeep(bench)
    fill(bench, "short", 1)
    bench.pass_time(61)
    assert heads(bench, "short") == [2]


def test_the_bytes_of_what_no_topic_keeps_come_back():
    bench = made()
    fill(bench, "short")
    full = segment_bytes(bench)
    assert full > 20 * BODY
    upkeep(bench, 50)
    bench.do(AlterTopic("short", None, TopicRules(retention_bytes=2 * (BODY + ROW_BYTES))))
    upkeep(bench)
    assert heads(bench, "short") == [18]
    assert segment_bytes(bench) >= full, "repeats of its ids are recognised for the window of de-duplication"
    upkeep(bench, 61)
    assert segment_bytes(bench) < full / 3
    kept = bench.engine.log.first_position
    assert kept > 0
    bench.restart(clean=False)
    assert (heads(bench, "short"), bench.engine.log.first_position) == ([18], kept)


def test_another_topics_messages_hold_the_segments_until_they_are_let_go_of():
    bench = made()
    bench.do(send(0, {"topic": "other", "queue": 0, "body": b"kept"}))
    fill(bench, "short")
    bench.do(AlterTopic("short", None, TopicRules(retention_us=SECOND)))
    full = segment_bytes(bench)
    upkeep(bench, 400)
    assert (heads(bench, "short", "other"), segment_bytes(bench) >= full) == ([20, 0], True)
    assert bench.do(DeleteTopic("other"))["messages"] == 1
    upkeep(bench)
    assert segment_bytes(bench) < full / 3


def test_deleting_gives_the_space_back_at_once_if_it_is_old_enough():
    bench = made()
    fill(bench, "short")
    bench.do(send(0, {"topic": "other", "queue": 0}))
    full = segment_bytes(bench)
    upkeep(bench, 200)
    assert segment_bytes(bench) == full
    bench.do(DeleteTopic("short"))
    upkeep(bench)
    assert segment_bytes(bench) < full / 3
    bench.restart(clean=False)
    assert heads(bench, "other") == [0]
    assert not bench.engine.shard.ledger.topics.has("short")
    bench.do(CreateTopic("short", 1))
    assert heads(bench, "short") == [21]


def test_a_topic_that_keeps_longer_than_the_broker():
    bench = made(retention=300.0)
    fill(bench, "short", 1)
    bench.do(AlterTopic("short", None, TopicRules(retention_us=1000 * SECOND)))
    fill(bench, "other")
    full = segment_bytes(bench)
    upkeep(bench, 400)
    assert (heads(bench, "short", "other"), segment_bytes(bench) >= full) == ([0, 20], True)
    upkeep(bench, 700)
    assert (heads(bench, "short"), segment_bytes(bench) < full / 3) == ([1], True)


def test_an_undecided_message_of_a_short_topic_is_asked_about_until_the_brokers_retention():
    bench = made(half_retention=50.0)
    session = bench.session()
    bench.do(AlterTopic("short", None, TopicRules(retention_us=SECOND)))
    (half,) = bench.prepare(session, {"topic": "short", "queue": 0})
    fill(bench, "short")
    upkeep(bench, 1000)
    assert bench.engine.log.first_position <= half["position"]
    assert bench.end(session, COMMIT, half["transaction"]) == [Code.COMMITTED]
    assert heads(bench, "short") == [20]
    upkeep(bench, 11)
    assert heads(bench, "short") == [21]
    (lost,) = bench.prepare(session, {"topic": "short", "queue": 0})
    fill(bench, "short")
    upkeep(bench, 3601)
    upkeep(bench, 61)
    assert bench.engine.log.first_position > lost["position"]
    assert bench.end(session, COMMIT, lost["transaction"]) == [Code.EXPIRED]
