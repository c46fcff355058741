"""What consumers acknowledged, as `%acks` tells it: of an embedded broker, a served one, and a folder at rest."""

import itertools
from datetime import timedelta

import pytest

import escrowmq as mq


def rows(bus, **request):
    return bus.admin.read("%acks", **request).read_all().to_pylist()


def offsets(found):
    """Pairs of queue and offset."""
    return sorted((row["queue"], row["start"] + n) for row in found for n in range(row["count"]))


def test_acknowledgements_are_told_with_whose_they_are(own, kind, t):
    broker = own()
    with broker.connect() as bus:
        bus.admin.create_topic(t, 2)
        bus.producer("p").send_batch([mq.Message(t, b"%d" % n, queue=n % 2) for n in range(10)])
        taken = {"first": [], "second": []}
        with bus.consumer("first", [t]) as consumer:
            for message in itertools.islice(consumer, 10):
                message.ack()
                taken["first"].append((message.queue, message.offset))
        with bus.consumer("second", [t], max_attempts=2) as consumer:
            for message in itertools.islice(consumer, 12):
                if message.body == b"3":
                    message.nack(delay=0)  # twice: a dead letter then
                elif message.body == b"4" and message.attempt == 1:
                    message.nack(delay=0)
                else:
                    message.ack()
                    taken["second"].append((message.queue, message.offset, message.attempt))
        found = rows(bus)
        assert offsets(row for row in found if row["group"] == "first") == sorted(taken["first"])
        later = [(*place, row["attempt"]) for row in found if row["group"] == "second" for place in offsets([row])]
        assert sorted(later) == sorted(taken["second"])
        assert {row["topic"] for row in found} == {t}
        assert rows(bus, group="second") == [row for row in found if row["group"] == "second"]
        assert rows(bus, group="nobody") == []
        middle = found[1]["position"]
        assert rows(bus, start=middle) == found[1:]
        assert rows(bus, start=found[0]["position"], end=middle) == found[:1]
    broker.stop()
    with mq.connect(f"file:{broker.folder}", read_only=True) as offline:
        assert rows(offline) == found
        assert rows(offline, group="second") == [row for row in found if row["group"] == "second"]


def test_times_are_those_of_the_acknowledgements(bus, t, g, drain):
    bus.producer(g).send_batch([mq.Message(t, b"%d" % n) for n in range(5)])
    (first, *_) = drain(bus.consumer(g, [t]), 5)
    acked = rows(bus, group=g)
    assert all(row["acked_us"] >= first.stored.timestamp() * 1e6 for row in acked)
    late = first.stored + timedelta(hours=1)
    assert rows(bus, group=g, stored_from=first.stored, stored_until=late) == acked
    assert rows(bus, group=g, stored_from=late) == []


@pytest.mark.invariant("I22")
def test_it_survives_a_restart(own, t):
    broker = own()
    with broker.connect() as bus:
        bus.producer("p").send_batch([mq.Message(t, b"%d" % n) for n in range(5)])
        with bus.consumer("c", [t]) as consumer:
            for message in itertools.islice(consumer, 5):
                message.ack()
        found = rows(bus)
    broker.restart(kill=broker.is_served)
    with broker.connect() as bus:
        assert rows(bus) == found


def test_a_view_that_is_not_there_is_told_with_the_nearest(bus):
    with pytest.raises(mq.Rejected, match="did you mean '%acks'"):
        bus.admin.read("%ack")
