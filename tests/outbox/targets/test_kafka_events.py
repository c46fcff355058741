"""A CloudEvent that is relayed to Kafka is one by Kafka's binding, for any reader."""

from __future__ import annotations

import contextlib
from pathlib import Path

import confluent_kafka
import sqlalchemy as sa
from cloudevents.core.bindings import kafka
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent

from escrowmq import cloudevents, outbox
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.opening import open_target


def test_an_event_arrives_at_kafka_as_one(kafka_url: str, tmp_path: Path, t: str) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    outbox.migrate(engine)
    event = CloudEvent({"id": "o-1", "source": "/shop", "type": "shop.paid", "partitionkey": "k"}, {"sum": 17})
    with engine.begin() as connection:
        outbox.send_tx(connection, cloudevents.to_message(t, event))
    with contextlib.closing(open_target(kafka_url)) as target:
        assert Relay(engine, target).drain(60)
    engine.dispose()
    address = kafka_url.removeprefix("kafka://")
    reader = confluent_kafka.Consumer(
        {"bootstrap.servers": address, "group.id": t, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    )
    reader.subscribe([t])
    record = None
    while record is None or record.error():
        record = reader.poll(1.0)
    headers = dict(record.headers() or [])
    found = kafka.from_binary(kafka.KafkaMessage(headers, record.key(), record.value() or b""), JSONFormat())
    reader.close()
    assert found.get_attributes() == event.get_attributes()
    assert found.get_data() == {"sum": 17}
