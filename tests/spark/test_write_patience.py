"""A process that never saw the broker decides a batch while the broker is away: it waits, as for everything else."""

import threading

import pytest
from killing import Broker

import escrowmq as mq
from escrowmq.errors import Code


@pytest.mark.invariant("I42")
def test_a_commit_from_a_new_process_waits_for_the_broker(tmp_path):
    broker = Broker(tmp_path / "data")
    try:
        with mq.connect(broker.url) as bus:
            producer = bus.producer("job", timeout=60, checker=lambda check: mq.UNKNOWN)
            prepared = producer.prepare("t", b"x")
        broker.kill()
        with mq.connect(broker.url) as bus:
            said = []

            def commit():
                producer = bus.producer("job", checker=lambda check: mq.UNKNOWN, timeout=120)
                said.append(producer.commit_batch("query", 0, [prepared.transaction_id]).status)

            away = threading.Thread(target=commit)
            away.start()
            broker.start()
            away.join()
            assert said == [Code.COMMITTED]
    finally:
        broker.kill()
