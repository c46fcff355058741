"""A message of any client is the same for all other clients, our own, and Spark; and a message of Spark for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rocketmq_client import Client
from rocketmq_programs import LANGUAGES, command_of
from rocketmq_runs import GatewayProcess

import escrowmq as mq

COMMON: dict[str, Any] = {"keys": ["order ä"], "tag": "paid"}
pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]


@pytest.fixture
def spark() -> Iterator[Any]:
    session = pytest.importorskip("escrowmq.pipeline.session")
    from escrowmq.spark.source import register

    with session.local_session("tests", cores=2, rows=1000) as made:
        register(made)
        yield made


@pytest.fixture
def clients(gateway: GatewayProcess, topic: str, tmp_path: Path) -> Iterator[dict[str, Client]]:
    """The programs of all languages, each with a consumer group of its own."""
    with ExitStack() as stack:
        made: dict[str, Client] = {}
        for name in LANGUAGES:
            home = tmp_path / name
            home.mkdir()
            words = (gateway.ready["rocketmq"], topic, f"read-{name}", "commit")
            made[name] = Client(command_of(name), home, *words)
            stack.callback(made[name].kill)
        yield made


def fields_of(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row as a client of RocketMQ shows them; what only the gateway reads is left out."""
    properties = {name: value for name, value in dict(row["properties"]).items() if not name.startswith("rocketmq.")}
    identity = "01" + bytes(row["message_id"]).hex()
    return {"id": identity, "keys": [row["key"]], "tag": row["tag"], "properties": properties}


def test_all_clients_and_spark_read_the_same(
    clients: dict[str, Client], spark: Any, broker: str, bus: mq.Bus, topic: str
) -> None:
    sent = {
        name: client.ask("send", body=name, properties={"from": name}, **COMMON)["id"]
        for name, client in clients.items()
    }
    own = bus.producer("shop").send(topic, b"own", key="order ä", tag="paid", properties={"from": "own"})
    sent["own"] = "01" + own.message_id.hex()
    row = ("order ä", "paid", {"from": "spark"}, b"spark")
    frame = spark.createDataFrame([row], "key STRING, tag STRING, properties MAP<STRING, STRING>, body BINARY")
    frame.write.format("escrow").mode("append").option("topic", topic).save(broker)

    read = spark.read.format("escrow").option("topic", topic).load(broker).toArrow().to_pylist()
    seen = {bytes(one["body"]).decode(): fields_of(one) for one in read}
    sent["spark"] = seen["spark"]["id"]
    expected = {name: {"id": id.lower(), **COMMON, "properties": {"from": name}} for name, id in sent.items()}
    assert seen == expected
    columns = bus.admin.read(topic).read_all().to_pylist()
    assert {one["body"].decode(): fields_of(one) for one in columns} == expected
    for client in clients.values():
        got = client.receive(len(expected))
        assert {one["group"] or None for one in got} == {None}
        shown = {one["body"]: {name: one[name] for name in ("id", "keys", "tag", "properties")} for one in got}
        assert {body: {**one, "id": one["id"].lower()} for body, one in shown.items()} == expected
