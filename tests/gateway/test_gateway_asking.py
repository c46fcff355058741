"""Check-back over HTTP: three answers count, everything else is "in progress", and one address delays no other."""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from gateway_runs import Asked, Client, Receiver

from escrowmq.errors import Denied
from escrowmq.gateway import Address, beside, sign_answer, verify
from escrowmq.gateway.asking import ANSWER_BASE, ANSWER_EACH

SECRET = b"0123456789abcdef0123"
RunGateway = Callable[..., Client]
Wait = Callable[..., Any]


@pytest.fixture
def asking(embedded: Callable[..., Any], run_gateway: RunGateway, receiver: Receiver, g: str) -> Client:
    """A gateway whose group ``g`` is asked for at the receiver, without a secret."""
    return run_gateway(embedded(), {g: Address(g, receiver.url, timeout=60.0)})


@pytest.mark.parametrize(("word", "state"), [("committed", "committed"), ("rolled back", "rolled_back")])
def test_the_address_decides(
    brokers: Callable[[str], Any],
    run_gateway: RunGateway,
    kind: str,
    receiver: Receiver,
    t: str,
    g: str,
    word: str,
    state: str,
    eventually: Wait,
) -> None:
    client = run_gateway(brokers(kind), {g: Address(g, receiver.url)})
    receiver.answer = lambda asked: (200, {}, asked.all(word))
    half = {"messages": [{"topic": t, "text": "böök", "key": "k", "tag": "x", "properties": {"a": "b"}}]}
    transaction = client.ok(f"/v1/groups/{g}/transactions", half)["transaction_id"]
    eventually(lambda: client.state(g, transaction) == state)
    path = f"/v1/groups/{g}/transactions/{transaction}"
    assert client.get(path)[1]["decided_by"] == "check"
    (asked,) = receiver.asked[0].transactions
    assert (asked["transaction_id"], asked["attempt"]) == (transaction, 1)
    (message,) = asked["messages"]
    assert base64.b64decode(message["body"]).decode() == "böök"
    assert (message["topic"], message["key"], message["tag"], message["properties"]) == (t, "k", "x", {"a": "b"})
    assert len(client.receive(f"c-{t}", t, wait=30 if state == "committed" else 0)) == (state == "committed")
    other = {"committed": "rollback", "rolled_back": "commit"}[state]
    status, problem = client.post(f"{path}/{other}")
    assert (status, problem["name"]) in [(409, "CONFLICT"), (409, "LATE_COMMIT")]


def _garbage(asked: Asked) -> list[tuple[int, dict[str, str], bytes]]:
    good = asked.all("committed")
    other = json.dumps({"outcomes": {"00000001-1-1": "committed"}}).encode()
    return [
        (200, {}, b"not json"),
        (200, {}, b"[" * 100_000),
        (200, {}, b"[]"),
        (200, {}, b'{"outcomes": []}'),
        (200, {}, asked.all("COMMITTED")),
        (200, {}, json.dumps({"outcomes": dict.fromkeys(asked.ids, 1)}).encode()),
        (200, {}, other),
        (200, {"content-encoding": "gzip"}, good),
        (200, {}, good + b" " * (ANSWER_BASE + len(asked.ids) * ANSWER_EACH)),
        (201, {}, good),
        (500, {}, good),
        (204, {}, b""),
        (200, {"content-length": "1000000"}, good),
    ]


@pytest.mark.invariant("I46")
def test_nothing_but_a_clear_answer_decides(
    asking: Client, receiver: Receiver, t: str, g: str, eventually: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    turns: list[int] = []

    def answer(asked: Asked) -> tuple[int, dict[str, str], bytes]:
        answers = _garbage(asked)
        turns.append(len(turns))
        return answers[turns[-1]] if turns[-1] < len(answers) else (200, {}, asked.all("committed"))

    receiver.answer = answer
    with caplog.at_level(logging.DEBUG, "escrowmq.gateway.asking"):
        transaction = asking.prepare(g, t)
        eventually(lambda: asking.state(g, transaction) == "committed", 60)
    assert len(turns) > 13, "each kind of garbage was asked again about"
    assert "answers again" in caplog.text
    assert "status 500" in caplog.text


@pytest.mark.invariant("I15")
@pytest.mark.parametrize("word", ["COMMIT", "commit", True, None, 1])
def test_a_word_that_is_no_outcome_decides_nothing_and_is_said_once(
    asking: Client, receiver: Receiver, t: str, g: str, eventually: Wait, caplog: pytest.LogCaptureFixture, word: Any
) -> None:
    receiver.answer = lambda asked: (200, {}, json.dumps({"outcomes": dict.fromkeys(asked.ids, word)}).encode())
    transaction = asking.prepare(g, t)
    eventually(lambda: len(receiver.asked) >= 3)
    assert asking.state(g, transaction) == "open"
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and g in r.getMessage()]
    assert len(said) == 1
    assert f"{word!r} is no outcome" in said[0]


@pytest.mark.invariant("I47")
def test_a_redirect_is_not_followed(asking: Client, receiver: Receiver, t: str, g: str, eventually: Wait) -> None:
    elsewhere = Receiver()
    elsewhere.answer = lambda asked: (200, {}, asked.all("committed"))
    receiver.answer = lambda asked: (307, {"location": elsewhere.url}, b"")
    transaction = asking.prepare(g, t)
    eventually(lambda: len(receiver.asked) >= 3 or elsewhere.asked)
    assert elsewhere.asked == []
    assert asking.state(g, transaction) == "open"
    elsewhere.close()


def test_in_progress_is_asked_again_with_a_higher_attempt(asking: Client, receiver: Receiver, t: str, g: str) -> None:
    transaction = asking.prepare(g, t)
    receiver.wait(3)
    attempts = [asked.transactions[0]["attempt"] for asked in receiver.asked[:3]]
    assert attempts[0] == 1
    assert attempts == sorted(set(attempts)), "counted up, whatever became of a question on its way"
    assert asking.state(g, transaction) == "open"


def test_transactions_asked_about_together_come_together(asking: Client, receiver: Receiver, t: str, g: str) -> None:
    half = {"messages": [{"topic": t, "text": "x"}]}
    told = asking.ok(f"/v1/groups/{g}/transactions/batch", {"transactions": [half] * 20})
    wanted = {result["transaction"]["transaction_id"] for result in told["results"]}
    receiver.answer = lambda asked: (200, {}, asked.all("committed"))
    receiver.wait(1)
    seen: set[str] = set()
    with receiver.came:
        assert receiver.came.wait_for(lambda: {i for asked in receiver.asked for i in asked.ids} >= wanted, 60)
        seen = {identity for asked in receiver.asked[:8] for identity in asked.ids}
    assert len(seen) > 8, "more transactions than questions"


@pytest.mark.invariant("I13")
def test_a_slow_address_delays_no_other_group(
    embedded: Callable[..., Any], run_gateway: RunGateway, receiver: Receiver, t: str, eventually: Wait
) -> None:
    hold = threading.Event()
    slow = Receiver()
    slow.answer = lambda asked: (200, {}, asked.all("committed") if hold.wait(120) else b"")
    receiver.answer = lambda asked: (200, {}, asked.all("committed"))
    addresses = {"slow": Address("slow", slow.url, timeout=60.0), "quick": Address("quick", receiver.url)}
    client = run_gateway(embedded(), addresses)
    stuck = [client.prepare("slow", t) for _ in range(12)]
    slow.wait(1)
    quick = client.prepare("quick", t)
    eventually(lambda: client.state("quick", quick) == "committed")
    assert {client.state("slow", transaction) for transaction in stuck} == {"open"}
    hold.set()
    eventually(lambda: {client.state("slow", transaction) for transaction in stuck} == {"committed"})
    slow.close()


def test_an_address_that_does_not_answer_in_time_is_in_progress(
    embedded: Callable[..., Any], run_gateway: RunGateway, receiver: Receiver, t: str, g: str, eventually: Wait
) -> None:
    hold = threading.Event()

    def answer(asked: Asked) -> tuple[int, dict[str, str], bytes]:
        if len(receiver.asked) == 1:
            hold.wait(120)
        return 200, {}, asked.all("committed" if len(receiver.asked) > 1 else "rolled back")

    receiver.answer = answer
    client = run_gateway(embedded(), {g: Address(g, receiver.url, timeout=0.2)})
    transaction = client.prepare(g, t)
    eventually(lambda: client.state(g, transaction) == "committed")
    hold.set()


@pytest.mark.invariant("I11")
def test_a_receiver_that_is_down_spends_no_attempts_and_is_asked_when_it_is_up(
    embedded: Callable[..., Any], run_gateway: RunGateway, t: str, g: str, eventually: Wait
) -> None:
    """Once the gateway has noticed, it is not among those to ask, so an outage parks nothing."""
    late = Receiver(listens=False)
    (link,) = embedded(check_interval=0.01, check_max=20_000)
    client = run_gateway([link], {g: Address(g, late.url)})
    members = lambda: {one["group"]: one["members"] for one in link.action("producers.list", {}, 60)["producers"]}  # noqa: E731
    path = f"/v1/groups/{g}/transactions/{client.prepare(g, t)}"
    eventually(lambda: client.get(path)[1]["checks"] >= 1 and members()[g] == 0)
    asked = client.get(path)[1]["checks"]
    time.sleep(0.3)  # thirty intervals in which nothing may happen
    told = client.get(path)[1]
    assert (told["state"], told["checks"]) == ("open", asked)
    late.answer = lambda asked: (200, {}, asked.all("committed"))
    late.listen()
    eventually(lambda: client.get(path)[1]["state"] == "committed")
    assert members()[g] == 1
    late.close()


@pytest.mark.invariant("I11")
def test_a_group_without_an_address_is_not_asked_and_waits_for_its_end(
    embedded: Callable[..., Any], run_gateway: RunGateway, receiver: Receiver, t: str, eventually: Wait
) -> None:
    receiver.answer = lambda asked: (200, {}, asked.all("committed"))
    with beside(
        lambda _: embedded(), listen="127.0.0.1:0", addresses={"asked": Address("asked", receiver.url)}
    ) as ready:
        client = Client(ready["http"])
        alone, asked = client.prepare("alone", t), client.prepare("asked", t)
        eventually(lambda: client.state("asked", asked) == "committed")
        told = client.get(f"/v1/groups/alone/transactions/{alone}")[1]
        assert (told["state"], told["checks"]) == ("open", 0), "nobody to ask costs no attempt"
        client.http.close()
    client = run_gateway(embedded(half_retention=1.0))
    eventually(lambda: client.state("alone", alone) == "parked")
    assert client.get(f"/v1/groups/alone/transactions/{alone}")[1]["checks"] == 0
    assert client.ok(f"/v1/groups/alone/transactions/{alone}/commit")["code"] == "COMMITTED"
    assert all(identity != alone for one in receiver.asked for identity in one.ids)


@pytest.mark.invariant("I15")
def test_questions_and_answers_are_signed(
    embedded: Callable[..., Any], run_gateway: RunGateway, receiver: Receiver, t: str, g: str, eventually: Wait
) -> None:
    refused: list[str] = []
    forged: list[Callable[[Asked, bytes], dict[str, str]]] = [
        lambda asked, body: {},
        lambda asked, body: sign_answer(b"not the secret, but long", asked.headers, body),
        lambda asked, body: sign_answer(SECRET, asked.headers, body, now=1_000_000.0),
        lambda asked, body: sign_answer(SECRET, {**asked.headers, "webhook-id": "msg_other"}, body),
        lambda asked, body: sign_answer(SECRET, receiver.asked[0].headers, body),
        lambda asked, body: sign_answer(SECRET, asked.headers, body + b"x"),
    ]

    def answer(asked: Asked) -> tuple[int, dict[str, str], bytes]:
        assert verify(SECRET, asked.headers, asked.body).startswith("msg_")
        with pytest.raises(Denied):
            verify(b"not the secret, but long", asked.headers, asked.body)
        turn = len(receiver.asked) - 1
        if turn < len(forged):
            refused.append(asked.headers["webhook-id"])
            body = asked.all("rolled back")
            return 200, forged[turn](asked, body), body
        body = asked.all("committed")
        return 200, sign_answer(SECRET, asked.headers, body), body

    receiver.answer = answer
    client = run_gateway(embedded(), {g: Address(g, receiver.url, (SECRET,))})
    transaction = client.prepare(g, t)
    eventually(lambda: client.state(g, transaction) in ("committed", "rolled_back"))
    assert client.state(g, transaction) == "committed", "no forged answer counted"
    assert len(set(refused)) == len(forged), "every question has an id of its own"


@pytest.mark.invariant("I47")
def test_proxies_of_the_environment_are_not_used(
    embedded: Callable[..., Any],
    run_gateway: RunGateway,
    receiver: Receiver,
    t: str,
    g: str,
    eventually: Wait,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy = Receiver()
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    receiver.answer = lambda asked: (200, {}, asked.all("committed"))
    client = run_gateway(embedded(), {g: Address(g, receiver.url)})
    transaction = client.prepare(g, t)
    eventually(lambda: client.state(g, transaction) == "committed" or proxy.asked)
    assert proxy.asked == []
    proxy.close()


@pytest.mark.invariant("I47")
def test_an_address_in_a_message_is_never_asked(
    embedded: Callable[..., Any], run_gateway: RunGateway, receiver: Receiver, t: str, g: str, eventually: Wait
) -> None:
    """Nothing that a message says changes where questions go."""
    elsewhere = Receiver()
    client = run_gateway(embedded(), {g: Address(g, receiver.url)})
    named = dict.fromkeys(("check_back", "url", "callback", "webhook", "CHECK_BACK_URL"), elsewhere.url)
    half = {"messages": [{"topic": t, "text": elsewhere.url, "key": elsewhere.url, "properties": named}]}
    client.ok(f"/v1/groups/{g}/transactions", half)
    eventually(lambda: len(receiver.asked) >= 3 or elsewhere.asked)
    assert elsewhere.asked == []
    elsewhere.close()
