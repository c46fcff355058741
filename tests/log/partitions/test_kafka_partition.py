"""The partition of a real Kafka: sending, reading, its ends, deleting; the channel over it; topics that are made, and
refused.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic
from partition_scripts import frame, send_frames

from escrowmq.errors import Code, Corrupt, EscrowError, Fenced, Misuse, Rejected, Unknown
from escrowmq.log.kafka.channel import claim
from escrowmq.log.kafka.cluster.address import KafkaAddress
from escrowmq.log.kafka.cluster.opening import create_topics, open_partitions
from escrowmq.log.kafka.fold import Fold
from escrowmq.log.kafka.partition import Partition
from escrowmq_lab.servers.process import Server, free_port

Opener = Callable[[], Partition]


@pytest.fixture
def address(kafka_url: str) -> str:
    """Of a log whose topics are there."""
    url = f"{kafka_url}/log-{uuid.uuid4().hex}?replication=1"
    parsed = KafkaAddress.parse(url)
    assert create_topics(url) == [parsed.topic, parsed.base_topic]
    return url


@pytest.fixture
def opener(address: str) -> Iterator[Opener]:
    opened: list[Partition] = []

    def open_one() -> Partition:
        opened.append(open_partitions(address).log())
        return opened[-1]

    yield open_one
    for partition in opened:
        partition.close()
        partition.close()


@contextmanager
def refused(error: type[EscrowError], code: Code, words: str = "") -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    assert caught.value.code is code
    assert words in str(caught.value)


def stored(partition: Partition, records: list[bytes]) -> list[int]:
    """Send records; their offsets."""
    for number, record in enumerate(records):
        partition.produce(number, record)
    found: dict[int, int] = {}
    while len(found) < len(records):
        found |= dict(partition.acknowledged(60))
    return [offset for _, offset in sorted(found.items())]


def everything(partition: Partition, start: int, end: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    while start + len(found) < end:
        found += partition.read(start + len(found), end, 60)
    return found


def test_records_are_kept_in_order_and_read_from_anywhere(opener: Opener) -> None:
    sender, reader = opener(), opener()
    records = [b"%d" % n * 1000 for n in range(300)]
    assert stored(sender, records) == list(range(300))
    assert sender.acknowledged(0) == []
    assert reader.ends(60) == sender.ends(60) == (0, 300)
    assert everything(reader, 0, 300) == list(enumerate(records))
    assert everything(reader, 7, 9) == [(7, records[7]), (8, records[8])]
    assert everything(reader, 9, 12) == list(enumerate(records))[9:12], "goes on"
    assert everything(reader, 3, 4) == [(3, records[3])], "goes back"
    assert reader.read(5, 5) == []
    assert reader.read(300, timeout=0.05) == []
    assert stored(sender, [b"more"]) == [300]
    assert everything(reader, 300, 301) == [(300, b"more")]


def test_nothing_is_read_ahead_while_it_rests(opener: Opener) -> None:
    sender, reader = opener(), opener()
    records = [b"%d" % n * 1000 for n in range(30)]
    stored(sender, records)
    assert everything(reader, 0, 5) == list(enumerate(records))[:5]
    assert reader._consumer.assignment()
    reader.rest()
    assert not reader._consumer.assignment()
    assert everything(reader, 5, 9) == list(enumerate(records))[5:9], "goes on where it is asked to"
    assert reader._consumer.assignment()


class Counting:
    """A client of Kafka whose ``poll`` is counted."""

    def __init__(self, client: object) -> None:
        self._client = client
        self.polls = 0

    def poll(self, timeout: float) -> object:
        self.polls += 1
        return self._client.poll(timeout)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)


def test_who_waits_does_not_ask_again_and_again(opener: Opener) -> None:
    """The client waits for whole milliseconds: told less it returns at once, a hundred times until the last one is
    over."""
    partition = opener()
    partition._consumer = reading = Counting(partition._consumer)
    partition._producer = sending = Counting(partition._producer)
    for _ in range(20):
        assert partition.read(0, timeout=0.0105) == []
    before = sending.polls
    for _ in range(20):
        assert partition.acknowledged(0.0105) == []
    assert reading.polls <= 80
    assert sending.polls - before <= 80


def test_a_partition_of_bases_connects_no_producer_until_it_sends(address: str) -> None:
    partition = open_partitions(address).base()
    assert partition.read(0) == []
    assert partition._producer is None
    assert stored(partition, [b"chunk"]) == [0]
    partition.close()
    with refused(Unknown, Code.CLOSED):
        partition.produce(1, b"late")


def test_what_was_deleted_and_what_is_not_there(opener: Opener) -> None:
    sender, reader = opener(), opener()
    stored(sender, [b"x"] * 10)
    assert len(everything(reader, 0, 10)) == 10
    sender.delete_before(6)
    assert sender.ends(60) == (6, 10)
    with refused(Rejected, Code.RANGE_PURGED, "begins at offset 6, not 5"):
        reader.read(5, timeout=60)
    assert [offset for offset, _ in everything(reader, 6, 10)] == [6, 7, 8, 9]
    with refused(Corrupt, Code.DAMAGED, "ends at offset 10; it was read up to 12"):
        reader.read(12, timeout=60)
    assert [offset for offset, _ in everything(reader, 9, 10)] == [9]


def test_the_channel_over_a_real_partition(opener: Opener) -> None:
    """An owner, its frames of all sizes, another claims, the first is fenced and what it sent late is void."""
    first = claim(opener(), Fold(), url="escrow://a")
    salt, sizes = first.standing.salt, [20, 20, 2_000_000, 20]
    data = [frame(n, n, epoch=0, salt=salt, body=size) for n, size in enumerate(sizes)]
    rounds = [send_frames(first, data[0]), send_frames(first, data[1] + data[2]), first.send_act(b"an act\n")]
    assert [r.wait().sequence for r in rounds] == [1, 3, 3]
    assert first.gaps == 0
    fold, got = Fold(), list[bytes]()
    second = claim(
        opener(), fold, url="escrow://b", on_record=lambda t: got.append(bytes(t.content)) if t.frames else None
    )
    assert b"".join(got) == b"".join(data[:3])
    assert (fold.standing.sequence, fold.standing.act_bytes, fold.standing.epoch) == (3, 7, 2)
    late = send_frames(first, data[3])
    with refused(Fenced, Code.FENCED, "escrow://b"):
        late.wait()
    assert send_frames(second, data[3]).wait().sequence == 4
    assert second.gaps == 1
    first.close()
    second.release(60)
    second.close()


def test_two_that_claim_an_empty_partition_at_once(opener: Opener) -> None:
    ready = threading.Barrier(4)
    folds = [Fold() for _ in range(4)]

    def work(fold: Fold, partition: Partition) -> None:
        ready.wait()
        claim(partition, fold, url="escrow://x").close()

    threads = [threading.Thread(target=work, args=(fold, opener())) for fold in folds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({(fold.standing.shard, fold.standing.salt) for fold in folds}) == 1
    assert sorted(fold.standing.epoch for fold in folds) == [1, 2, 3, 4]


def test_a_node_that_stands_still(opener: Opener, kafka_server: Server) -> None:
    """Questions end in time, what was sent counts when the node goes on, and closing does not wait for it."""
    asking, closing = opener(), opener()
    channel = claim(opener(), Fold(), url="escrow://a")
    closing.produce(0, b"x")
    kafka_server.pause()
    try:
        sent = send_frames(channel, frame(0, 0, epoch=0, salt=channel.standing.salt))
        with refused(Unknown, Code.TIMED_OUT):
            asking.ends(0.3)
        with refused(Unknown, Code.TIMED_OUT):
            sent.wait(0.1)
        assert asking.read(0, timeout=0.1) == []
        closing.close()
        with refused(Unknown, Code.CLOSED):
            closing.acknowledged(60)
    finally:
        kafka_server.resume()
    assert sent.wait(60).sequence == 1
    channel.close()


def test_a_transaction_of_a_stranger_is_noticed(opener: Opener, address: str) -> None:
    """Its end takes an offset that nobody can read: a hole."""
    parsed = KafkaAddress.parse(address)
    partition = opener()
    channel = claim(partition, Fold(), url="escrow://a")
    producer = Producer({"bootstrap.servers": parsed.servers[0], "transactional.id": uuid.uuid4().hex})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(parsed.topic, b"not ours", partition=0)
    producer.commit_transaction(60)
    with refused(Corrupt, Code.DAMAGED, "no other writers"):
        for number in itertools.count():  # the end may be written some records later
            send_frames(channel, frame(number, number, epoch=0, salt=channel.standing.salt)).wait()
    channel.close()


def test_records_as_large_as_they_may_be(opener: Opener) -> None:
    from escrowmq.log.kafka.records import LARGEST_RECORD

    sender = opener()
    assert stored(sender, [bytes(LARGEST_RECORD)] * 12) == list(range(12))
    found = everything(opener(), 0, 12)
    assert {len(record) for _, record in found} == {LARGEST_RECORD}


# Topics


def test_a_topic_is_made_once_and_right(address: str) -> None:
    open_partitions(address).check()
    assert create_topics(address) == []
    assert create_topics(f"{address}", partitions=1) == []
    with refused(Misuse, Code.BAD_SETTING, "none with the number 3"):
        create_topics(address.replace("?", "/3?"))


def test_a_topic_that_would_lose_data_is_refused(address: str) -> None:
    parsed = KafkaAddress.parse(address)
    admin = AdminClient({"bootstrap.servers": parsed.servers[0]})
    change = ConfigEntry("retention.ms", "604800000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, parsed.base_topic, incremental_configs=[change])
    admin.incremental_alter_configs([resource])[resource].result(60)
    with refused(Misuse, Code.BAD_SETTING, "retention.ms is 604800000") as _:
        open_partitions(address).check()
    with refused(Misuse, Code.BAD_SETTING, "--add-config retention.ms=-1"):
        create_topics(address)


def test_a_topic_with_the_clusters_defaults_is_refused(kafka_url: str) -> None:
    parsed = KafkaAddress.parse(f"{kafka_url}/plain-{uuid.uuid4().hex}?replication=1")
    with refused(Rejected, Code.UNKNOWN_TOPIC, "escrowmq log create"):
        open_partitions(parsed).check()
    admin = AdminClient({"bootstrap.servers": parsed.servers[0]})
    admin.create_topics([NewTopic(parsed.topic, 1, 1)])[parsed.topic].result(60)
    with refused(Misuse, Code.BAD_SETTING, "Kafka deletes the log by its age"):
        create_topics(parsed)


def test_more_replicas_than_nodes(address: str, kafka_url: str) -> None:
    with refused(Misuse, Code.BAD_SETTING, "?replication=1"):
        create_topics(f"{kafka_url}/three-{uuid.uuid4().hex}")
    with refused(Misuse, Code.BAD_SETTING, "min.insync.replicas is 1"):
        open_partitions(address.replace("?replication=1", "")).check()


def test_nobody_there() -> None:
    partitions = open_partitions(f"kafka://127.0.0.1:{free_port()}/t")
    with refused(Unknown, Code.TIMED_OUT):
        partitions.check(0.3)
    partition = partitions.log()
    with refused(Unknown, Code.TIMED_OUT):
        partition.ends(0.3)
    partition.produce(0, b"x")
    assert partition.acknowledged(0.1) == []
    partition.close()
    with refused(Unknown, Code.CLOSED):
        partition.read(0)
