"""CloudEvents over HTTP: in by binary and structured mode, out as a batch."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cloudevents.core.bindings import http
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from gateway_runs import Client

from escrowmq.model import message_id


@pytest.fixture
def client(embedded: Callable[..., Any], run_gateway: Callable[..., Client]) -> Client:
    return run_gateway(embedded())


def event(**attributes: Any) -> CloudEvent:
    given = {"id": "o-1", "source": "/shop", "type": "shop.paid", "partitionkey": "k-1", "subject": "grün"}
    return CloudEvent({**given, "datacontenttype": "application/json", **attributes}, {"sum": 17})


def post(client: Client, topic: str, made: http.HTTPMessage, **more: str) -> tuple[int, Any]:
    answer = client.http.post(f"/v1/topics/{topic}/messages", content=made.body, headers={**made.headers, **more})
    return answer.status_code, answer.json()


def receive(client: Client, group: str, topic: str) -> list[dict[str, Any]]:
    answer = client.http.post(
        f"/v1/consumers/{group}/receive",
        json={"topics": [topic], "wait": 30},
        headers={"Accept": "application/cloudevents-batch+json"},
    )
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/cloudevents-batch+json"
    return list(answer.json())


@pytest.mark.parametrize("mode", [http.to_binary, http.to_structured])
def test_an_event_comes_out_as_it_came_in(mode: Any, client: Client, t: str, g: str) -> None:
    sent = event()
    made = mode(sent, JSONFormat())
    status, receipt = post(client, t, made)
    assert (status, receipt["message_id"]) == (200, message_id("o-1").hex())
    assert post(client, t, made)[1] == receipt, "the same id is the same message"
    (found,) = receive(client, g, t)
    handle = found.pop("escrowhandle")
    assert found.pop("escrowattempt") == 1
    again = JSONFormat().read(None, json.dumps(found))
    assert again.get_attributes() == sent.get_attributes()
    assert again.get_data() == {"sum": 17}
    assert client.ok(f"/v1/consumers/{g}/ack", {"handles": [handle]})["refused"] == 0


def test_an_event_is_a_message_like_others(client: Client, t: str, g: str) -> None:
    """Its bytes are not changed, its attributes are properties as in Kafka's binding."""
    body = b'{ "sum":17 }'
    assert post(client, t, http.HTTPMessage({**http.to_binary(event(), JSONFormat()).headers}, body))[0] == 200
    (message,) = client.receive(g, t, wait=30)
    assert (message["text"].encode(), message["key"]) == (body, "k-1")
    assert message["properties"]["ce_type"] == "shop.paid"
    assert message["properties"]["ce_subject"] == "grün"
    assert message["properties"]["content-type"] == "application/json"


def test_a_repeat_without_a_time_is_a_repeat(client: Client, t: str, g: str) -> None:
    headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "t", "content-type": "text/plain"}
    first = post(client, t, http.HTTPMessage(headers, b"x"), **{"Escrow-Tag": "red"})
    assert first[0] == 200
    assert post(client, t, http.HTTPMessage(headers, b"x"), **{"Escrow-Tag": "red"}) == first
    (found,) = receive(client, g, t)
    assert "time" not in found
    status, problem = post(client, t, http.HTTPMessage(headers, b"y"), **{"Escrow-Tag": "red"})
    assert (status, problem["name"]) == (409, "MESSAGE_ID_TAKEN")


@pytest.mark.parametrize("data", ["text", ["a", 1, None], 17, True, None, {"a": {"b": "ü"}}])
def test_data_of_every_type_survives(data: Any, client: Client, t: str, g: str) -> None:
    text = json.dumps({"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": data})
    assert post(client, t, http.HTTPMessage({"content-type": "application/cloudevents+json"}, text.encode()))[0] == 200
    (found,) = receive(client, g, t)
    assert found.get("data") == data


def test_a_message_that_is_no_event_becomes_one(client: Client, t: str, g: str) -> None:
    receipt = client.ok(f"/v1/topics/{t}/messages", b"\xff\x00", **{"Escrow-Key": "k"})
    client.ok(f"/v1/topics/{t}/messages", {"text": "x", "properties": {"ce_specversion": "1.0", "ce_time": "never"}})
    first, second = sorted(receive(client, g, t), key=lambda one: "data" in one)
    assert (first["id"], first["source"]) == (receipt["message_id"], f"/topics/{t}")
    assert (first["type"], first["partitionkey"], first["data_base64"]) == ("escrowmq.message", "k", "/wA=")
    assert (second["type"], second["data"]) == ("escrowmq.message", "x"), "invalid attributes stop nobody"


@pytest.mark.parametrize("body", [b"[" * 100_000, b"NaN", b'{"a": Infinity}', b"\xff", b"{"])
def test_data_that_is_not_the_json_that_it_claims_stops_nobody(body: bytes, client: Client, t: str, g: str) -> None:
    headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "t", "content-type": "text/json"}
    assert post(client, t, http.HTTPMessage(headers, body))[0] == 200
    (found,) = receive(client, g, t)
    assert (base64.b64decode(found["data_base64"]), found["type"]) == (body, "t")


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"ce-specversion": "1.0", "ce-id": "1"}, b""),
        ({"ce-specversion": "9", "ce-id": "1", "ce-source": "/s", "ce-type": "t"}, b""),
        ({"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "t", "ce-time": "never"}, b""),
        ({"content-type": "application/cloudevents+json"}, b"[]"),
        ({"content-type": "application/cloudevents+json"}, b"{"),
        ({"content-type": "application/cloudevents+json"}, b'{"id": 1}'),
    ],
)
def test_what_is_no_event_is_refused(headers: dict[str, str], body: bytes, client: Client, t: str) -> None:
    status, problem = post(client, t, http.HTTPMessage(headers, body))
    assert status == 400, problem
    assert problem["name"] in ("BAD_ARGUMENT", "BAD_REQUEST")
    assert all(topic["name"] != t for topic in client.get("/v1/topics")[1]["topics"])


def test_the_page_shows_its_commands() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cloudevents.md").read_text()
    assert "application/cloudevents-batch+json" in text
