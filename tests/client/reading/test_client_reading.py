"""The reader over twins of brokers: places told apart, brokers that are away, positions that follow what is handed
out."""

import threading

import pytest

from escrowmq.client.bus import Bus
from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.model import Message
from escrowmq.testing.link import TwinLink


@pytest.fixture
def twins() -> list[TwinLink]:
    return [TwinLink(shard=11, address="twin:1"), TwinLink(shard=22, address="twin:2")]


def put(twin: TwinLink, *bodies: bytes) -> None:
    with Bus([twin]) as bus:
        bus.producer("p").send_batch([Message("t", body) for body in bodies]).check()
    twin.closed = False


def test_the_same_queue_of_two_brokers_is_two_places(twins, patient):
    put(twins[0], b"a0", b"a1")
    put(twins[1], b"b0", b"b1", b"b2")
    with Bus(twins) as bus, bus.reader("t", start={(22, 0): 1}) as reader:
        assert reader.positions() == {(11, 0): 0, (22, 0): 1}
        found = [(batch.shard, [m.body for m in batch]) for batch in reader.batches(idle_timeout=0)]
        assert sorted(found) == [(11, [b"a0", b"a1"]), (22, [b"b1", b"b2"])]
        assert reader.positions() == {(11, 0): 2, (22, 0): 3}
    with Bus(twins) as bus, bus.reader("t", queues=[(1, 0)]) as reader:  # by the broker's number
        assert reader.positions() == {(22, 0): 0}


def test_a_broker_that_waits_delays_no_other(twins, patient):
    put(twins[0], b"a0")
    put(twins[1], b"b0")
    with Bus(twins) as bus, bus.reader("t", start="latest") as reader:
        batches, found = reader.batches(), []
        thread = threading.Thread(target=lambda: found.extend(m.body for m in next(batches)))
        thread.start()
        put(twins[1], b"b1")
        thread.join(60)
        assert found == [b"b1"]
        thread = threading.Thread(target=lambda: found.extend(m.body for m in next(batches)))
        thread.start()
        put(twins[0], b"a1")
        thread.join(60)
        assert found == [b"b1", b"a1"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_broker_that_is_away_is_waited_for(twins, count, patient):
    links = twins[:count]
    put(links[-1], b"0", b"1")
    for twin in links[:-1]:
        put(twin, b"other")
    with Bus(links) as bus, bus.reader("t") as reader:
        links[-1].away = True
        if count == 2:
            assert [m.body for m in next(reader.batches(idle_timeout=60))] == [b"other"]
        assert not list(reader.batches(idle_timeout=0.2))
        links[-1].away = False
        found = []
        for batch in reader.batches(idle_timeout=60):
            found += [m.body for m in batch]
            if len(found) == 2:
                break
        assert found == [b"0", b"1"]


def test_a_purged_range_is_the_callers_and_it_may_go_on_elsewhere(twins, monkeypatch):
    put(twins[0], b"0", b"1")
    with Bus(twins[:1]) as bus, bus.reader("t") as reader:
        read = twins[0].read

        def purged(request):
            if request["start"] == 0:
                raise error(Code.RANGE_PURGED)
            return read(request)

        monkeypatch.setattr(twins[0], "read", purged)
        for _ in range(2):
            with pytest.raises(EscrowError) as caught:
                list(reader.batches(idle_timeout=0))
            assert caught.value.code is Code.RANGE_PURGED
        reader.seek({(11, 0): 1})
        assert [m.body for batch in reader.batches(idle_timeout=0) for m in batch] == [b"1"]


def test_closing_ends_iteration(twins):
    put(twins[0], b"0")
    with Bus(twins[:1]) as bus:
        reader = bus.reader("t", start="latest")
        thread = threading.Thread(target=lambda: list(reader.batches()))
        thread.start()
        bus.close()
        thread.join(60)
        assert not thread.is_alive()
        with pytest.raises(Misuse):
            reader._reading.partition("x")


def test_threads_that_share_a_reader_get_each_message_once(twins):
    put(twins[0], *(b"%d" % number for number in range(500)))
    with Bus([twins[0]]) as bus, bus.reader("t") as reader:
        found = [[], [], []]

        def read(mine):
            for batch in reader.batches(7, idle_timeout=0.5):
                mine.extend(int(message.body) for message in batch)

        threads = [threading.Thread(target=read, args=(mine,)) for mine in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(number for mine in found for number in mine) == list(range(500))
        assert all(mine == sorted(mine) for mine in found)
        assert reader.positions() == {(11, 0): 500}


def test_what_another_thread_has_taken_is_not_there(twins):
    put(twins[0], b"a0", b"a1", b"a2")
    with Bus([twins[0]]) as bus, bus.reader("t") as reader:
        reading = reader._reading
        assert reading.fill(5)
        assert reading.fill(5), "both threads see the same batch"
        _, batch, _ = reading.take(10)
        assert batch.num_rows == 3
        assert reading.take(10) is None
