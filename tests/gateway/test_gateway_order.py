"""Ordered groups by HTTP: the messages of a key come one after another, also after one failed, whoever asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gateway_runs import Client


def send(client: Client, t: str, names: str, size: int = 2) -> None:
    messages = [{"key": name[0], "queue": 0, "text": name.ljust(size)} for name in names.split()]
    assert client.ok(f"/v1/topics/{t}/messages", {"messages": messages})["refused"] == 0


def found(messages: list[dict[str, Any]]) -> list[str]:
    return [message["text"].strip() for message in messages]


def test_after_a_nack_its_key_waits_and_other_keys_go_on(client: Client, t: str, g: str) -> None:
    path = f"/v1/consumers/{g}"
    assert client.receive(g, t, ordered=True) == []
    send(client, t, "a0 a1 b0 a2 b1")
    messages = client.receive(g, t, wait=30, ordered=True)
    handles = {message["text"]: message["handle"] for message in messages}
    assert list(handles) == ["a0", "a1", "b0", "a2", "b1"]
    client.ok(f"{path}/ack", {"handles": [handles["a0"]]})
    client.ok(f"{path}/nack", {"handles": [handles["a1"]], "delay": 0.3})
    status, told = client.post(f"{path}/ack", {"handles": [handles[name] for name in ("b0", "a2", "b1")]})
    assert (status, told["refused"]) == (207, 1)
    assert [line["problem"] and line["problem"]["name"] for line in told["results"]] == [None, "LEASE_LOST", None]
    again = client.receive(g, t, wait=30, ordered=True)
    assert [(message["text"], message["attempt"]) for message in again] == [("a1", 2), ("a2", 2)]


@pytest.mark.invariant("I20")
def test_two_clients_never_work_on_one_key_at_once(
    kind: str, brokers: Callable[[str], Any], run_gateway: Callable[..., Client], t: str, g: str
) -> None:
    """What did not fit into the first one's answer is not the second one's."""
    client = run_gateway(brokers(kind), max_receive_bytes=1000)
    assert client.receive(g, t, ordered=True) == []
    send(client, t, "a0 a1 a2 a3", size=2000)
    seen = []
    for _ in range(4):
        messages = client.receive(g, t, wait=30, ordered=True)
        assert client.receive(g, t, wait=0, ordered=True) == []
        seen += found(messages)
        client.ok(f"/v1/consumers/{g}/ack", {"handles": [message["handle"] for message in messages]})
    assert seen == ["a0", "a1", "a2", "a3"]


def test_a_handle_that_is_none_refuses_no_neighbour(client: Client, t: str, g: str) -> None:
    assert client.receive(g, t) == []
    send(client, t, "a0 a1")
    handles = [message["handle"] for message in client.receive(g, t, wait=30)]
    given = [handles[0], "nonsense", handles[1]]
    status, told = client.post(f"/v1/consumers/{g}/ack", {"handles": given})
    assert (status, told["refused"]) == (207, 1)
    assert [line["handle"] for line in told["results"]] == given
    assert [line["problem"] and line["problem"]["name"] for line in told["results"]] == [None, "BAD_ARGUMENT", None]
    assert client.post(f"/v1/consumers/{g}/ack", {"handles": ["nonsense"]})[0] == 400
