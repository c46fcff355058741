"""Every path of the gateway, over an embedded and over a served broker."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
import pyarrow as pa
import pytest
from gateway_runs import Client, Counted, raw_request

from escrowmq.client.aio import AsyncBus
from escrowmq.gateway import GatewaySettings
from escrowmq.gateway.admission import Admission
from escrowmq.gateway.app import build
from escrowmq.gateway.callers import Callers
from escrowmq.gateway.server import make_server
from escrowmq.model import Act
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange


class Stubborn(TwinLink):
    """A broker that does not take a receive back in time; ``refused`` counts how often it was told to."""

    refused = 0

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: dict[str, Any]) -> Future[pa.RecordBatch]:
        future = super().exchange(kind, batch, options)

        def cancel() -> bool:
            self.refused += 1
            return False

        future.cancel = cancel  # type: ignore[method-assign]
        return future


def test_a_message_is_sent_and_received(client: Client, t: str, g: str) -> None:
    given = {"text": "one böök", "key": "o-1", "tag": "paid", "properties": {"colour": "rot"}, "delay": 0}
    receipt = client.ok(f"/v1/topics/{t}/messages", given)
    assert receipt["topic"] == t
    assert receipt["offset"] == 0
    (message,) = client.receive(g, t, wait=30)
    wanted = {"topic": t, "text": "one böök", "body": None, "key": "o-1", "tag": "paid", "attempt": 1}
    assert {name: message[name] for name in wanted} == wanted
    assert message["properties"] == {"colour": "rot"}
    assert message["message_id"] == receipt["message_id"]
    assert (message["queue"], message["offset"]) == (receipt["queue"], receipt["offset"])
    assert message["transaction_id"] is None


def test_bytes_survive_base64_both_ways(client: Client, t: str, g: str) -> None:
    body = bytes(range(256))
    client.ok(f"/v1/topics/{t}/messages", {"body": base64.b64encode(body).decode()})
    (message,) = client.receive(g, t, wait=30)
    assert message["text"] is None, "not UTF-8"
    assert base64.b64decode(message["body"]) == body


def test_a_raw_body_is_sent_as_it_is(client: Client, t: str, g: str) -> None:
    headers = {"Escrow-Key": "k%C3%B6", "Escrow-Tag": "red", "Escrow-Property-Colour": "r%20t", "Escrow-Queue": "1"}
    client.ok(f"/v1/topics/{t}/messages", b"\x00\xff raw", **headers)
    (message,) = client.receive(g, t, wait=30, as_text=False)
    assert base64.b64decode(message["body"]) == b"\x00\xff raw"
    assert (message["key"], message["tag"], message["properties"]) == ("kö", "red", {"colour": "r t"})
    assert message["queue"] == 1


def test_of_several_each_has_its_own_result(client: Client, t: str, g: str) -> None:
    messages = [{"text": "a", "key": "k"}, {"text": "b", "queue": 4000}, {"text": "c", "key": "k"}]
    status, told = client.post(f"/v1/topics/{t}/messages", {"messages": messages})
    assert (status, told["refused"]) == (207, 1)
    assert told["results"][1]["problem"]["name"] == "BAD_QUEUE"
    assert [message["text"] for message in client.receive(g, t, wait=30)] == ["a", "c"], "in order"
    assert client.ok(f"/v1/topics/{t}/messages", {"messages": [{"text": "d"}]})["refused"] == 0


@pytest.mark.invariant("I9")
def test_a_repeat_by_message_id_or_idempotency_key_makes_nothing_twice(client: Client, t: str, g: str) -> None:
    path = f"/v1/topics/{t}/messages"
    for given, headers in (
        ({"text": "x", "message_id": f"order-{t}"}, {}),
        ({"text": "y"}, {"Idempotency-Key": "key-1"}),
        ({"messages": [{"text": "z1"}, {"text": "z2"}]}, {"Idempotency-Key": "key-2"}),
    ):
        assert client.ok(path, given, **headers) == client.ok(path, given, **headers)
    raw = [client.ok(path, b"raw", **{"Idempotency-Key": "key-3"}) for _ in range(2)]
    assert raw[0] == raw[1]
    found: list[str] = []
    while got := client.receive(g, t, wait=0.2):
        found += [message["text"] for message in got]
    assert sorted(found) == ["raw", "x", "y", "z1", "z2"]


def test_an_id_names_one_message_of_its_topic(client: Client, t: str, g: str) -> None:
    path, other = f"/v1/topics/{t}/messages", f"/v1/topics/{t}-2/messages"
    given = {"text": "x", "message_id": f"order-{t}"}
    first = client.ok(path, given)
    assert client.ok(other, given | {"text": "y"})["offset"] == 0
    keyed = {"Idempotency-Key": f"key-{t}"}
    client.ok(path, {"text": "z"}, **keyed)
    for body, headers in ((given | {"text": "y"}, {}), (given | {"key": "k"}, {}), ({"text": "y"}, keyed)):
        status, problem = client.post(path, body, **headers)
        assert (status, problem["name"]) == (409, "MESSAGE_ID_TAKEN")
    assert client.ok(path, given) == first
    half = {"messages": [{"topic": topic, "text": topic, "message_id": f"half-{t}"} for topic in (t, f"{t}-2")]}
    prepared = client.ok(f"/v1/groups/{g}/transactions", half)
    assert client.ok(f"/v1/groups/{g}/transactions", half) == prepared
    client.ok(f"/v1/groups/{g}/transactions/{prepared['transaction_id']}/commit")
    for topic, texts in ((t, ["x", "z", t]), (f"{t}-2", ["y", f"{t}-2"])):
        found: list[str] = []
        while got := client.receive(f"c-{topic}", topic, wait=0.2):
            found += [message["text"] for message in got]
        assert sorted(found) == sorted(texts)


def test_a_transaction_is_invisible_until_it_is_committed(client: Client, t: str, g: str) -> None:
    points = f"{t}-points"
    half = {"messages": [{"topic": t, "text": "order"}, {"topic": points, "text": "points", "check_immunity": 5}]}
    prepared = client.ok(f"/v1/groups/{g}/transactions", half)
    transaction = prepared["transaction_id"]
    assert [receipt["offset"] for receipt in prepared["messages"]] == [None, None]
    assert client.receive(f"c-{t}", t) == []
    assert client.state(g, transaction) == "open"
    path = f"/v1/groups/{g}/transactions/{transaction}"
    assert client.ok(f"{path}/commit") == {"transaction_id": transaction, "code": "COMMITTED"}
    assert client.ok(f"{path}/commit")["code"] == "ALREADY_COMMITTED"
    status, problem = client.post(f"{path}/rollback")
    assert (status, problem["name"]) == (409, "CONFLICT")
    for topic, text in ((t, "order"), (points, "points")):
        (message,) = client.receive(f"c-{topic}", topic, wait=30)
        assert (message["text"], message["transaction_id"]) == (text, transaction)
    assert client.get(path)[1]["decided_by"] == "producer"


def test_a_transaction_that_is_rolled_back_never_appears(client: Client, t: str, g: str) -> None:
    transaction = client.prepare(g, t)
    path = f"/v1/groups/{g}/transactions/{transaction}/rollback"
    assert [client.ok(path)["code"] for _ in range(2)] == ["ROLLED_BACK", "ALREADY_ROLLED_BACK"]
    assert client.state(g, transaction) == "rolled_back"
    assert client.receive(f"c-{t}", t) == []


def test_1_16_a_transaction_is_ended_by_the_message_id_that_its_producer_chose(client: Client, t: str, g: str) -> None:
    path = f"/v1/groups/{g}/transactions"

    def prepare(*ids: str, group: str = g) -> str:
        half = {"messages": [{"topic": t, "text": "half", "message_id": f"{t}-{one}"} for one in ids]}
        return str(client.ok(f"/v1/groups/{group}/transactions", half)["transaction_id"])

    first, second, third = prepare("o-1"), prepare("o-2"), prepare("o-3")
    assert client.ok(f"{path}/{t}-o-1/commit") == {"transaction_id": first, "code": "COMMITTED"}
    assert client.get(f"{path}/{t}-o-1")[1]["state"] == "committed"
    assert client.ok(f"{path}/{t}-o-2/rollback") == {"transaction_id": second, "code": "ROLLED_BACK"}
    decisions = [{"transaction_id": f"{t}-o-{number}", "outcome": "commit"} for number in (3, 4)]
    status, told = client.post(f"{path}/end", {"decisions": decisions})
    assert (status, told["results"][0]["code"]) == (207, "COMMITTED")
    assert told["results"][1]["problem"]["name"] == "UNKNOWN_TRANSACTION"
    assert client.state(g, third) == "committed"
    theirs = prepare("o-5", group=f"{g}-other")
    status, problem = client.post(f"{path}/{t}-o-5/commit")
    assert (status, problem["name"]) == (404, "UNKNOWN_TRANSACTION")
    assert client.state(f"{g}-other", theirs) == "open"


def test_a_message_joins_a_transaction_by_its_id(client: Client, t: str, g: str) -> None:
    transaction = client.prepare(g, t, "first")
    half = {"messages": [{"topic": t, "text": "second"}], "transaction_id": transaction}
    assert client.ok(f"/v1/groups/{g}/transactions", half)["transaction_id"] == transaction
    client.ok(f"/v1/groups/{g}/transactions/{transaction}/commit")
    found: list[str] = []
    while len(found) < 2:
        found += [message["text"] for message in client.receive(f"c-{t}", t, wait=30)]
    assert sorted(found) == ["first", "second"]
    status, problem = client.post(f"/v1/groups/{g}/transactions", half)
    assert (status, problem["name"]) == (409, "TRANSACTION_DECIDED")
    assert problem["transaction_id"] == transaction


def test_a_repeated_prepare_gets_the_same_transaction_even_after_its_end(client: Client, t: str, g: str) -> None:
    half = {"messages": [{"topic": t, "text": "a", "message_id": f"{t}-1"}, {"topic": t, "text": "b"}]}
    first = client.ok(f"/v1/groups/{g}/transactions", half, **{"Idempotency-Key": t})
    assert client.ok(f"/v1/groups/{g}/transactions", half, **{"Idempotency-Key": t}) == first
    client.ok(f"/v1/groups/{g}/transactions/{first['transaction_id']}/commit")
    again = client.ok(f"/v1/groups/{g}/transactions", half, **{"Idempotency-Key": t})
    assert again["transaction_id"] == first["transaction_id"]
    assert [one["message_id"] for one in again["messages"]] == [one["message_id"] for one in first["messages"]]


def test_many_transactions_at_once_each_with_its_own_result(client: Client, t: str, g: str) -> None:
    one = {"messages": [{"topic": t, "text": "a"}]}
    bad = {"messages": [{"topic": t, "text": "b", "queue": 4000}]}
    status, told = client.post(f"/v1/groups/{g}/transactions/batch", {"transactions": [one, bad, one]})
    assert (status, told["refused"]) == (207, 1)
    assert told["results"][1]["problem"]["name"] == "BAD_QUEUE"
    first, last = (told["results"][at]["transaction"]["transaction_id"] for at in (0, 2))
    assert first != last
    decisions = [
        {"transaction_id": first, "outcome": "commit"},
        {"transaction_id": last, "outcome": "rollback"},
        {"transaction_id": f"{first[:8]}-1-ffffff", "outcome": "commit"},
    ]
    status, told = client.post(f"/v1/groups/{g}/transactions/end", {"decisions": decisions})
    assert (status, told["refused"]) == (207, 1)
    assert [result["code"] for result in told["results"]] == ["COMMITTED", "ROLLED_BACK", None]
    assert told["results"][2]["problem"]["name"] == "UNKNOWN_TRANSACTION"
    assert [message["text"] for message in client.receive(f"c-{t}", t, wait=30)] == ["a"]


@pytest.mark.invariant("I27")
def test_messages_are_settled_by_their_handles_through_any_gateway(
    client: Client, kind: str, brokers: Callable[[str], Any], run_gateway: Callable[..., Client], t: str, g: str
) -> None:
    other = run_gateway(brokers(kind))
    client.ok(f"/v1/topics/{t}/messages", {"messages": [{"text": str(n), "key": "k"} for n in range(4)]})
    handles = [message["handle"] for message in client.receive(g, t, wait=30)]
    assert len(handles) == 4
    path = f"/v1/consumers/{g}"
    told = other.ok(f"{path}/ack", {"handles": handles[:2]})
    assert told["refused"] == 0
    assert other.ok(f"{path}/ack", {"handles": handles[:2]})["refused"] == 0, "repeating is harmless"
    other.ok(f"{path}/extend", {"handles": handles[2:], "seconds": 60})
    other.ok(f"{path}/nack", {"handles": handles[2:], "delay": 0, "cause": "not now"})
    again: list[Any] = []
    while len(again) < 2:
        again += client.receive(g, t, wait=30)
    assert [(message["text"], message["attempt"]) for message in again] == [("2", 2), ("3", 2)]
    status, problem = client.post(f"{path}/ack", {"handles": [handles[2]]})
    assert (status, problem["name"]) == (409, "LEASE_LOST")
    status, told = client.post(f"{path}/ack", {"handles": [handles[3], again[0]["handle"]]})
    assert (status, told["refused"]) == (207, 1)
    assert told["results"][0]["problem"]["name"] == "LEASE_LOST"
    assert told["results"][1]["problem"] is None


def test_neighbours_in_a_lease_have_results_of_their_own(client: Client, t: str, g: str) -> None:
    client.ok(f"/v1/topics/{t}/messages", {"messages": [{"text": str(n), "key": "k"} for n in range(3)]})
    handles = [message["handle"] for message in client.receive(g, t, wait=30)]
    client.ok(f"/v1/consumers/{g}/nack", {"handles": [handles[1]], "delay": 60})
    status, told = client.post(f"/v1/consumers/{g}/ack", {"handles": handles})
    assert (status, told["refused"]) == (207, 1)
    assert [result["problem"] is None for result in told["results"]] == [True, False, True]


def test_a_lease_that_is_not_settled_ends_and_its_message_comes_again(client: Client, t: str, g: str) -> None:
    client.ok(f"/v1/topics/{t}/messages", {"text": "x"})
    (first,) = client.receive(g, t, wait=30, lease=0.05)
    (second,) = client.receive(g, t, wait=30)
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert client.post(f"/v1/consumers/{g}/ack", {"handles": [first["handle"]]})[0] == 409


def test_1_13_the_property_of_rocketmq_travels_over_http_and_is_read(client: Client, t: str, g: str) -> None:
    def half(value: str) -> dict[str, Any]:
        return {"messages": [{"topic": t, "text": "x", "properties": {"CheckImmunityTimeInSeconds": value}}]}

    assert client.ok(f"/v1/groups/{g}/transactions", half("60"))["transaction_id"]
    status, problem = client.post(f"/v1/groups/{g}/transactions", half("soon"))
    assert (status, problem["name"]) == (400, "BAD_IMMUNITY")


def test_tags_order_and_start_make_the_group(client: Client, t: str, g: str) -> None:
    messages = [{"text": "a", "tag": "red"}, {"text": "b", "tag": "blue"}]
    client.ok(f"/v1/topics/{t}/messages", {"messages": messages})
    (message,) = client.receive(g, t, wait=30, tags=["blue"])
    assert message["text"] == "b"
    assert client.receive(f"{g}-late", t, start="latest") == []
    assert len(client.receive(f"{g}-since", t, start="2020-01-01T00:00:00Z", wait=30)) == 2
    status, problem = client.post(f"/v1/consumers/{g}/receive", {"topics": [t], "tags": ["red"]})
    assert (status, problem["name"]) == (409, "SUBSCRIPTION_MISMATCH")
    assert client.ok(f"/v1/consumers/{g}/receive", {"max_messages": 5}) == {"messages": []}, "the group exists"
    status, problem = client.post(f"/v1/consumers/{g}-late/receive", {"topics": [t], "start": "earliest"})
    assert (status, problem["name"]) == (409, "SUBSCRIPTION_MISMATCH")


@pytest.mark.parametrize("redelivery", ["0s, 0s", [0, 0]])
def test_redelivery_makes_the_group(client: Client, t: str, g: str, redelivery: Any) -> None:
    client.ok(f"/v1/topics/{t}/messages", {"text": "x"})
    for attempt in (1, 2, 3):
        (message,) = client.receive(g, t, wait=30, redelivery=redelivery)
        assert message["attempt"] == attempt
        client.ok(f"/v1/consumers/{g}/nack", {"handles": [message["handle"]]})
    assert client.receive(g, t, redelivery=redelivery) == []
    status, problem = client.post(f"/v1/consumers/{g}-2/receive", {"topics": [t], "redelivery": "often"})
    assert (status, "3x5min" in problem["hint"]) == (400, True)


def test_a_long_poll_is_woken_by_a_message(client: Client, t: str, g: str) -> None:
    assert client.receive(g, t) == []
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.extend(client.receive(g, t, wait=30)))
    waiting.start()
    other = Client(client.url)
    other.ok(f"/v1/topics/{t}/messages", {"text": "wake"})
    waiting.join()
    other.http.close()
    assert [message["text"] for message in found] == ["wake"]


def test_a_long_poll_that_nothing_comes_to_ends_empty(client: Client, t: str, g: str) -> None:
    assert client.receive(g, t, wait=0.1) == []


class Late(Counted):
    """A link whose answers to a receive stay under way until ``deliver()``, as long as it ``holds``; ``refused`` as
    above."""

    def __init__(self, link: Any) -> None:
        super().__init__(link)
        self.holds, self.refused = True, 0
        self.under_way: list[tuple[Future[pa.RecordBatch], Future[pa.RecordBatch]]] = []

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: dict[str, Any]) -> Future[pa.RecordBatch]:
        future = super().exchange(kind, batch, options)
        if kind is not Exchange.RECEIVE or not self.holds:
            return future
        held: Future[pa.RecordBatch] = Future()

        def cancel() -> bool:
            self.refused += 1
            return False

        held.cancel = cancel  # type: ignore[method-assign]
        self.under_way.append((future, held))
        return held

    def deliver(self) -> None:
        for future, held in self.under_way:
            held.set_result(future.result(timeout=60))
        self.under_way.clear()


@pytest.mark.parametrize("others", [0, 1])
def test_what_came_for_a_client_that_left_goes_to_another(
    client: Client, t: str, g: str, others: int, eventually: Callable[..., Any]
) -> None:
    assert client.receive(g, t) == []
    host, port = client.url.removeprefix("http://").split(":")
    body = json.dumps({"topics": [t], "wait": 30, "as_text": True}).encode()
    head = f"POST /v1/consumers/{g}/receive HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    request = head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.extend(client.receive(g, t, wait=30))) for _ in range(others)]
    leavers = [socket.create_connection((host, int(port))) for _ in range(3)]
    for leaver in leavers:
        leaver.sendall(request)
    for thread in threads:
        thread.start()
    other = Client(client.url)
    for leaver in leavers:
        leaver.close()
    other.ok(f"/v1/topics/{t}/messages", {"text": "for the living"})
    for thread in threads:
        thread.join()
    found = found or eventually(lambda: other.receive(g, t, wait=1))
    assert [message["text"] for message in found] == ["for the living"]
    other.ok(f"/v1/consumers/{g}/ack", {"handles": [found[0]["handle"]]})
    other.http.close()


def test_a_receive_of_a_client_that_left_waits_no_longer_at_the_broker(
    kind: str, brokers: Callable[[str], Any], run_gateway: Callable[..., Client], t: str, g: str, eventually: Any
) -> None:
    (link,) = brokers(kind)
    client = run_gateway([link], max_wait=600.0)
    client.receive(g, t)
    with raw_request(client.url, f"/v1/consumers/{g}/receive", {"topics": [t], "wait": 600}):
        eventually(lambda: link.action("stats", {}, 60)["parked_receives"] == 1)
    eventually(lambda: link.action("stats", {}, 60)["parked_receives"] == 0)


def test_what_a_broker_gave_too_late_is_given_back(run_gateway: Callable[..., Client], eventually: Any) -> None:
    twin = Stubborn()
    client = run_gateway([twin])
    client.ok("/v1/topics/t/messages", {"text": "x"})
    twin.hold(Exchange.RECEIVE)
    with raw_request(client.url, "/v1/consumers/g/receive", {"topics": ["t"], "wait": 25}):
        eventually(lambda: any(request.kind is Exchange.RECEIVE for request in twin.requests))
    eventually(lambda: twin.refused)
    twin.release(Exchange.RECEIVE)
    eventually(lambda: twin.seen(Exchange.SETTLE))
    (settled,) = twin.seen(Exchange.SETTLE)
    assert (settled.column("act")[0].as_py(), settled.column("delay_us")[0].as_py()) == (Act.RELEASE, 0)
    (message,) = client.receive("g", "t", wait=30)
    assert (message["text"], message["attempt"]) == ("x", 1)


@pytest.mark.invariant("I25")
def test_clients_that_hang_up_never_make_a_dead_letter(
    embedded: Callable[..., Any], run_gateway: Callable[..., Client], eventually: Any
) -> None:
    """Nobody was given the message: none of its attempts is used up."""
    (link,) = embedded(max_attempts=4)
    late = Late(link)
    client = run_gateway([late])
    client.ok("/v1/topics/t/messages", {"text": "x"})
    for number in range(1, 7):
        with raw_request(client.url, "/v1/consumers/g/receive", {"topics": ["t"], "start": "earliest", "wait": 25}):
            eventually(lambda: late.under_way)
        eventually(lambda number=number: late.refused == number)
        late.deliver()
    late.holds = False
    (message,) = client.receive("g", "t", wait=30)
    assert (message["text"], message["attempt"]) == ("x", 1)


def test_a_receive_takes_no_more_than_it_asked_for(client: Client, t: str, g: str) -> None:
    client.ok(f"/v1/topics/{t}/messages", {"messages": [{"text": str(n), "key": "k"} for n in range(5)]})
    taken = [[m["text"] for m in client.receive(g, t, wait=30, max_messages=2)] for _ in range(3)]
    assert taken == [["0", "1"], ["2", "3"], ["4"]]


def test_messages_are_looked_up_by_id_and_by_key(client: Client, t: str, g: str) -> None:
    receipt = client.ok(f"/v1/topics/{t}/messages", {"text": "x", "key": f"k-{t}"})
    transaction = client.ok(
        f"/v1/groups/{g}/transactions", {"messages": [{"topic": t, "text": "half", "key": f"k-{t}"}]}
    )["transaction_id"]
    status, told = client.get("/v1/lookup", key=f"k-{t}")
    assert status == 200
    half, plain = told["messages"]
    assert (half["state"], half["visible"], half["transaction_id"]) == ("open", False, transaction)
    assert (plain["state"], plain["visible"]) == ("plain", True)
    assert client.get("/v1/lookup", message_id=receipt["message_id"])[1]["messages"] == [plain]
    assert client.get("/v1/lookup", message_id="unheard-of")[1] == {"messages": [], "missing": []}
    assert client.get("/v1/view", topic=t, id_or_key=f"k-{t}") == (200, {"message": half})
    assert client.get("/v1/view", topic=t, id_or_key=receipt["message_id"])[1] == {"message": plain}
    assert client.get("/v1/view", topic=t, id_or_key="unheard-of") == (200, {"message": None})
    assert client.get("/v1/view", topic="no/topic", id_or_key="k")[0] == 400
    (topic,) = [topic for topic in client.get("/v1/topics")[1]["topics"] if topic["name"] == t]
    assert sum(queue["end"] - queue["head"] for queue in topic["queues"]) == 1


def test_health_is_told(client: Client) -> None:
    status, told = client.get("/healthz")
    assert (status, told["status"]) == (200, "ok")
    assert [broker["status"] for broker in told["brokers"]] == ["ok"]


def test_the_documents_are_whole_and_load_nothing(client: Client) -> None:
    document = client.get("/openapi.json")[1]
    paths = {
        "/v1/topics/{topic}/messages",
        "/v1/groups/{group}/transactions",
        "/v1/groups/{group}/transactions/batch",
        "/v1/groups/{group}/transactions/end",
        "/v1/groups/{group}/transactions/{transaction_id}",
        "/v1/groups/{group}/transactions/{transaction_id}/commit",
        "/v1/groups/{group}/transactions/{transaction_id}/rollback",
        "/v1/consumers/{group}/receive",
        "/v1/consumers/{group}/ack",
        "/v1/consumers/{group}/nack",
        "/v1/consumers/{group}/extend",
        "/v1/lookup",
        "/v1/view",
        "/v1/topics",
        "/healthz",
    }
    assert set(document["paths"]) == paths
    for path, methods in document["paths"].items():
        for operation in methods.values():
            ends = path.endswith(("/commit", "/rollback"))
            assert set(operation["responses"]) == {"200", "default"} | ({"202"} if ends else set())
            assert operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"].endswith(
                "/Problem"
            )
            assert operation["description"]
    schemas = document["components"]["schemas"]
    assert not {"HTTPValidationError", "ValidationError"} & set(schemas)
    assert all(schema["additionalProperties"] is False for schema in schemas.values())
    page = client.http.get("/docs")
    assert page.status_code == 200
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page.text)
    assert "<script" not in page.text
    assert all(path in page.text for path in paths)
    assert client.http.get("/redoc").status_code == 404


def test_an_end_that_is_not_waited_for(
    kind: str, brokers: Callable[[str], Any], run_gateway: Callable[..., Client], t: str, g: str, eventually: Any
) -> None:
    (link,) = brokers(kind)
    counted = Counted(link)
    client = run_gateway([counted])
    first, second = (client.prepare(g, t, text) for text in ("kept", "dropped"))
    path = f"/v1/groups/{g}/transactions"
    assert client.post(f"{path}/{first}/commit?confirm=answered") == (
        200,
        {"transaction_id": first, "code": "COMMITTED"},
    )
    counted.gate.clear()
    assert client.post(f"{path}/{second}/rollback?confirm=oneway") == (202, {"transaction_id": second, "code": "SENT"})
    assert client.post(f"{path}/{first}/rollback?confirm=oneway")[0] == 202, "nobody is told that it is refused"
    assert client.state(g, second) == "open"
    counted.gate.set()
    eventually(lambda: client.state(g, second) == "rolled_back")
    assert client.state(g, first) == "committed"
    status, problem = client.post(f"{path}/{first}/commit?confirm=later")
    assert (status, problem["name"]) == (400, "BAD_REQUEST")


@pytest.mark.invariant("I48")
def test_one_way_the_copy_is_the_prepared_message_and_a_rolled_back_one_is_received_by_nobody(
    client: Client, t: str, g: str, eventually: Any
) -> None:
    """A group over HTTP without an address to ask has no checker."""
    half = {"topic": t, "text": "book", "key": "o-1", "tag": "paid", "properties": {"shop": "north"}}
    path = f"/v1/groups/{g}/transactions"
    dropped, kept = (client.ok(path, {"messages": [half]}) for _ in range(2))
    assert client.receive(g, t) == []
    assert client.post(f"{path}/{dropped['transaction_id']}/rollback?confirm=oneway")[0] == 202
    assert client.post(f"{path}/{kept['transaction_id']}/commit?confirm=oneway")[0] == 202
    (message,) = client.receive(g, t, wait=30)
    assert {name: message[name] for name in half} == half
    assert message["message_id"] == kept["messages"][0]["message_id"]
    eventually(lambda: client.state(g, dropped["transaction_id"]) == "rolled_back")
    assert client.receive(g, t) == []


async def test_concurrent_requests_share_batches(kind: str, brokers: Callable[[str], Any], t: str, g: str) -> None:
    (link,) = brokers(kind)
    counted, settings = Counted(link), GatewaySettings()
    callers = Callers(None, settings, {}, AsyncBus([counted]), has_credential=False)
    admission = Admission(build(callers), settings, "127.0.0.1", False)
    server = make_server(admission, settings)
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60, limits=limits) as http:
            half = {"messages": [{"topic": t, "text": "x"}]}
            assert (await http.post(f"/v1/groups/{g}/transactions", json=half)).status_code == 200
            counted.forget()
            counted.gate.clear()  # the first batch is held up; whoever comes meanwhile rides in the next
            asking = [asyncio.create_task(http.post(f"/v1/groups/{g}/transactions", json=half)) for _ in range(100)]
            async with asyncio.timeout(60):
                while admission.requests < 100:
                    await asyncio.sleep(0.005)
            counted.gate.set()
            answers = await asyncio.gather(*asking)
        server.should_exit = True
        await serving
        await callers.close()
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["transaction_id"] for answer in answers}) == 100
    assert counted.rows[Exchange.PREPARE] == 100
    assert counted.counts[Exchange.PREPARE] <= 25, f"{counted.counts[Exchange.PREPARE]} exchanges for 100 requests"
