"""A message of any client is the same for all other clients, our own, and readers of the topic's columns."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rocketmq_client import Client
from rocketmq_programs import LANGUAGES, command_of
from rocketmq_runs import GatewayProcess

import escrowmq as mq


@pytest.mark.timeout(1200)
def test_all_clients_read_the_same(gateway: GatewayProcess, bus: mq.Bus, topic: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"keys": ["order ä"], "tag": "paid"}
    with ExitStack() as stack:
        clients: dict[str, Client] = {}
        for name in LANGUAGES:
            home = tmp_path / name
            home.mkdir()
            words = (gateway.ready["rocketmq"], topic, f"read-{name}", "commit")
            clients[name] = Client(command_of(name), home, *words)
            stack.callback(clients[name].kill)
        expected = {
            name: {"id": client.ask("send", body=name, properties={"from": name}, **common)["id"].lower(), **common}
            for name, client in clients.items()
        }
        own = bus.producer("shop").send(topic, b"own", key="order ä", tag="paid", properties={"from": "own"})
        expected["own"] = {"id": "01" + own.message_id.hex(), **common}
        for client in clients.values():
            got = {one["body"]: one for one in client.receive(len(expected))}
            for name, fields in expected.items():
                one = got[name]
                assert {"id": one["id"].lower(), "keys": one["keys"], "tag": one["tag"]} == fields
                assert (one["properties"], one["group"] or None) == ({"from": name}, None)
        rows = bus.admin.read(topic).read_all().to_pylist()
        found = {
            row["body"].decode(): {
                "id": "01" + row["message_id"].hex(),
                "keys": [row["key"]],
                "tag": row["tag"],
            }
            for row in rows
            if dict(row["properties"])["from"] == row["body"].decode()
        }
        assert found == expected
