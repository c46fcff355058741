"""Refusals: the right status, and a problem that says what to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_runs import Client
from hypothesis import given
from hypothesis import strategies as st

import escrowmq as mq
from damaging import flip
from escrowmq.connecting import links
from escrowmq.errors import Code, Misuse, Overloaded, Rejected, Unknown, error
from escrowmq.gateway.problems import problem_response, status_of, to_problem
from escrowmq.gateway.settling import LeaseHandle
from escrowmq.model import message_id
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange

RunGateway = Callable[..., Client]


@pytest.mark.parametrize("code", [code for code in Code if code >= 16], ids=lambda code: code.name)
def test_every_code_has_a_status_of_its_branch(code: Code) -> None:
    problem = error(code)
    status = status_of(problem)
    if isinstance(problem, Unknown):
        assert status == 504
    elif isinstance(problem, Overloaded):
        assert status in (429, 503)
        assert problem_response(problem).headers["retry-after"] == "1"
    else:
        assert 400 <= status < 500 or code in (Code.DAMAGED, Code.NEWER_FORMAT, Code.LOG_FAILED)
    told = to_problem(problem)
    assert (told.code, told.name, told.message) == (int(code), code.name, problem.message)


@pytest.mark.parametrize(
    ("path", "content", "status", "name"),
    [
        ("/v1/topics/a%20b/messages", {"text": "x"}, 400, "BAD_TOPIC_NAME"),
        ("/v1/topics/t/messages?group=%25x", {"text": "x"}, 400, "BAD_GROUP_NAME"),
        ("/v1/topics/t/messages", {}, 400, "BAD_REQUEST"),
        ("/v1/topics/t/messages", {"text": "x", "body": "eA=="}, 400, "BAD_REQUEST"),
        ("/v1/topics/t/messages", {"body": "***"}, 400, "BAD_REQUEST"),
        ("/v1/topics/t/messages", {"text": 1}, 400, "BAD_REQUEST"),
        ("/v1/topics/t/messages", {"text": "x", "unheard": 1}, 400, "BAD_REQUEST"),
        ("/v1/topics/t/messages", {"text": "x", "delay": 1e8}, 400, "BAD_DELAY"),
        ("/v1/topics/t/messages", {"text": "x", "key": "k" * 2000}, 413, "KEY_TOO_LARGE"),
        ("/v1/topics/t/messages", {"text": "x" * (5 << 20)}, 413, "BODY_TOO_LARGE"),
        ("/v1/topics/t/messages", b"x" * (5 << 20), 413, "BODY_TOO_LARGE"),
        ("/v1/topics/t/messages", {"messages": [{"text": ""}] * 1001}, 413, "BATCH_TOO_LARGE"),
        ("/v1/topics/t/messages?group=transactional", {"text": "x"}, 409, "GROUP_KIND"),
        ("/v1/groups/transactional/transactions", {"messages": []}, 400, "BAD_REQUEST"),
        ("/v1/groups/transactional/transactions/1-1-1/commit", None, 404, "WRONG_SHARD"),
        ("/v1/groups/transactional/transactions/what/commit", None, 404, "UNKNOWN_TRANSACTION"),
        ("/v1/groups/other/transactions/OPEN/commit", None, 403, "WRONG_GROUP"),
        ("/v1/consumers/unheard-of/receive", {}, 404, "UNKNOWN_GROUP"),
        ("/v1/consumers/c/receive", {"topics": ["t"], "start": "2020-01-01T00:00:00"}, 400, "BAD_REQUEST"),
        ("/v1/consumers/c/receive", {"topics": ["t"], "max_messages": 0}, 400, "BAD_REQUEST"),
        ("/v1/consumers/c/ack", {"handles": ["nonsense"]}, 400, "BAD_ARGUMENT"),
        ("/v1/consumers/c/ack", {"handles": ["00000001-1-1"]}, 404, "WRONG_SHARD"),
        ("/v1/nothing", {}, 404, "NOT_FOUND"),
        ("/v1/consumers/c/receive/", {}, 404, "NOT_FOUND"),
        ("/healthz", {}, 405, "BAD_REQUEST"),
    ],
)
def test_what_is_wrong_is_refused_with_its_status(
    refusing: tuple[Client, str], path: str, content: Any, status: int, name: str
) -> None:
    client, transaction = refusing
    given, told = client.post(path.replace("OPEN", transaction), content)
    assert (given, told["name"]) == (status, name), told
    assert told["code"] == int(Code[name])
    assert told["message"]


@pytest.fixture(scope="module")
def refusing(brokers: Callable[[str], Any]) -> Any:
    """A client, and a transaction of the group "transactional"."""
    from escrowmq.gateway import beside

    with beside(lambda _: brokers("embedded"), listen="127.0.0.1:0") as ready:
        client = Client(ready["http"])
        yield client, client.prepare("transactional", "t")
        client.http.close()


def test_too_many_open_transactions_are_429_with_retry_after(
    embedded: Callable[..., Any], run_gateway: RunGateway
) -> None:
    client = run_gateway(embedded(max_open_transactions=1))
    client.prepare("g", "t")
    answer = client.http.post("/v1/groups/g/transactions", json={"messages": [{"topic": "t", "text": "x"}]})
    assert (answer.status_code, answer.json()["name"]) == (429, "TOO_MANY_OPEN")
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["retry_after"] > 0
    assert answer.headers["content-type"] == "application/problem+json"


def test_no_permission_is_403(embedded: Callable[..., Any], run_gateway: RunGateway) -> None:
    client = run_gateway(embedded(reject_transactional=True))
    status, told = client.post("/v1/groups/g/transactions", {"messages": [{"topic": "t", "text": "x"}]})
    assert (status, told["name"]) == (403, "NO_PERMISSION")


def test_no_answer_in_time_is_504_with_the_ids_to_repeat_with(
    run_gateway: RunGateway, eventually: Callable[..., Any]
) -> None:
    twin = TwinLink()
    patient, client = run_gateway([twin]), run_gateway([twin], timeout=0.3)
    eventually(lambda: client.post("/v1/topics/other/messages", {"text": "x"})[0] == 200)  # opens the session
    twin.hold(Exchange.SEND)
    status, told = client.post("/v1/topics/t/messages", {"text": "x"})
    assert (status, told["name"]) == (504, "TIMED_OUT")
    twin.release(Exchange.SEND)  # it was applied after all
    receipt = patient.ok("/v1/topics/t/messages", {"text": "x", "message_id": told["message_id"]})
    assert receipt["message_id"] == told["message_id"]
    assert len(twin.topics["t"]) == 1, "and is there once"


def test_a_prepare_without_an_answer_says_what_is_there(run_gateway: RunGateway) -> None:
    twin = TwinLink()
    patient, client = run_gateway([twin]), run_gateway([twin], timeout=2.0)
    path, half = "/v1/groups/g/transactions", {"messages": [{"topic": "t", "text": text} for text in "abc"]}
    twin.refuse(Exchange.PREPARE, Overloaded(Code.DISK_FULL, retry_after=7.2))
    answer = patient.http.post(path, json=half)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "8")
    held: list[int] = []

    def hold_second(kind: Exchange, batch: Any, options: Any) -> Any:
        if kind is Exchange.PREPARE and (held.append(1) or len(held) == 2):
            twin.hold(Exchange.PREPARE)
        return original(kind, batch, options)

    original, twin.exchange = twin.exchange, hold_second  # type: ignore[method-assign]
    status, told = client.post(path, half)
    assert status == 504
    assert all(told["message_ids"])
    again = [
        {**one, "message_id": identity} for one, identity in zip(half["messages"], told["message_ids"], strict=True)
    ]
    twin.release(Exchange.PREPARE)
    assert patient.ok(path, {"messages": again})["transaction_id"] == told["transaction_id"]
    assert len(twin.transactions) == 1


def test_an_answer_that_was_lost_is_asked_for_again_by_the_gateway(run_gateway: RunGateway) -> None:
    twin = TwinLink()
    client = run_gateway([twin])
    twin.lose(Exchange.PREPARE, applied=True)
    transaction = client.prepare("g", "t")
    twin.lose(Exchange.END, applied=True)
    assert client.ok(f"/v1/groups/g/transactions/{transaction}/commit")["code"] == "COMMITTED"
    assert len(twin.topics["t"]) == 1


@pytest.mark.invariant("I9")
def test_a_keyless_repeat_goes_to_the_broker_that_knows_its_id(run_gateway: RunGateway) -> None:
    twins = [TwinLink(1, "twin:1"), TwinLink(2, "twin:2")]
    client = run_gateway(twins)
    half = {"messages": [{"topic": "t", "text": "x"}]}
    for number in range(8):
        answers = {client.prepare("g", "t", **{"Idempotency-Key": str(number)}) for _ in range(4)}
        assert len(answers) == 1
    assert sum(len(twin.transactions) for twin in twins) == 8
    assert all(twin.transactions for twin in twins), "both brokers have their share"
    assert client.ok("/v1/groups/g/transactions", half)


def test_a_broker_that_is_away_is_told(run_gateway: RunGateway) -> None:
    twin = TwinLink()
    twin.away = True
    client = run_gateway([twin], timeout=0.3)
    assert client.get("/healthz")[0] == 503
    assert client.post("/v1/topics/t/messages", {"text": "x"})[0] == 504
    assert client.get("/v1/topics")[0] == 504


def test_a_damaged_message_is_told_as_such(run_gateway: RunGateway, tmp_path: Path) -> None:
    url, settings = f"file:{tmp_path / 'data'}", {"segment_bytes": 1 << 12, "default_queues": 1}
    with mq.connect(url, **settings) as bus:
        messages = [mq.Message("t", b"content %d." % n, key=f"k{n}") for n in range(3)]
        bus.producer("p").send_batch(messages).check()
        bus.producer("p").send("filler", bytes(5000))
    segment, _ = flip(tmp_path / "data", b"content 1.")
    client = run_gateway(links(url, settings))
    assert client.get("/healthz")[1]["status"] == "ok", "nobody has met it"
    (found,) = client.get("/v1/lookup", key="k1")[1]["messages"]
    assert (found["body"], found["key"], found["damaged"].startswith(segment)) == (None, "k1", True)
    (other,) = client.get("/v1/lookup", key="k2")[1]["messages"]
    assert (other["damaged"], bool(other["body"])) == (None, True)
    status, told = client.get("/healthz")
    assert (status, told["status"], told["brokers"][0]["status"]) == (200, "damaged", "damaged")
    assert segment in told["brokers"][0]["reason"]


def test_a_receive_that_the_broker_refuses_is_refused(run_gateway: RunGateway) -> None:
    twin = TwinLink()
    client = run_gateway([twin])
    client.ok("/v1/topics/t/messages", {"text": "x"})
    twin.refuse(Exchange.RECEIVE, Rejected(Code.UNKNOWN_GROUP))
    status, told = client.post("/v1/consumers/g/receive", {"topics": ["t"]})
    assert (status, told["name"]) == (404, "UNKNOWN_GROUP")
    twin.lose(Exchange.RECEIVE, applied=False)
    assert len(client.receive("g", "t")) == 1, "a connection that broke is tried again"


def test_a_receive_that_no_broker_answers_ends(run_gateway: RunGateway) -> None:
    client = run_gateway([TwinLink()], timeout=0.3)  # a twin holds what it cannot answer
    status, told = client.post("/v1/consumers/g/receive", {"topics": ["t"]})
    assert (status, told["name"]) == (504, "TIMED_OUT")


def test_too_many_receives_are_refused(run_gateway: RunGateway, eventually: Callable[..., Any]) -> None:
    twin = TwinLink()
    client = run_gateway([twin], max_receives=1)
    found: list[Any] = []
    first = threading.Thread(target=lambda: found.extend(client.receive("g", "t", wait=30)))
    first.start()
    eventually(lambda: any(request.kind is Exchange.RECEIVE for request in twin.requests))
    other = Client(client.url)
    status, told = other.post("/v1/consumers/g/receive", {"topics": ["t"]})
    assert (status, told["name"]) == (503, "QUEUE_FULL")
    other.ok("/v1/topics/t/messages", {"text": "x"})
    first.join()
    assert len(found) == 1
    other.http.close()


@given(st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 63) - 1))
def test_handles_are_read_as_they_were_written(shard: int, lease: int, offset: int) -> None:
    handle = LeaseHandle(shard, lease, offset)
    assert LeaseHandle.parse(str(handle)) == handle
    assert len(str(handle)) <= 64


@given(st.text(max_size=80))
def test_whatever_is_no_handle_is_refused(text: str) -> None:
    try:
        handle = LeaseHandle.parse(text)
    except Misuse:
        return
    assert LeaseHandle.parse(str(handle)) == handle


def test_ids_of_idempotency_keys_are_digests() -> None:
    assert len(message_id("idempotency /v1/x 1 0")) == 16
