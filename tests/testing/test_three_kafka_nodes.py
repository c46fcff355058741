"""Three Kafka nodes for tests: what a killed one had acknowledged is with the others, and it comes back."""

from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from escrowmq_lab.servers import kafka
from escrowmq_lab.servers.seam import Absent


@pytest.mark.long
def test_a_cluster_outlives_the_node_that_leads_a_partition(tmp_path: Path) -> None:
    try:
        made = kafka.cluster(tmp_path, settings={"broker.session.timeout.ms": "3000"})
        with made as cluster:
            _outlives(cluster)
    except Absent as problem:
        pytest.skip(str(problem))


def _outlives(cluster: kafka.Cluster) -> None:
    where = {"bootstrap.servers": cluster.url.removeprefix("kafka://")}
    admin, producer = AdminClient(where), Producer({**where, "acks": "all", "enable.idempotence": True})
    admin.create_topics([NewTopic("t", 1, 3, config={"min.insync.replicas": "2"})])["t"].result()
    _send(producer, b"before")
    leader = admin.list_topics("t").topics["t"].partitions[0].leader
    struck = cluster.nodes[leader - 1]
    struck.kill()
    _send(producer, b"without it")
    struck.start()
    _send(producer, b"after")
    reader = Consumer({**where, "group.id": "g", "auto.offset.reset": "earliest"})
    reader.assign([TopicPartition("t", 0, 0)])
    read = []
    while len(read) < 3:
        if (found := reader.poll(1.0)) and not found.error():
            read.append(found.value())
    reader.close()
    assert read == [b"before", b"without it", b"after"]
    assert leader != admin.list_topics("t").topics["t"].partitions[0].leader


def _send(producer: Producer, value: bytes) -> None:
    """Send, and wait until it is acknowledged."""
    problems: list[object] = []
    producer.produce("t", value, partition=0, on_delivery=lambda problem, _: problems.append(problem))
    producer.flush()
    assert problems == [None]
