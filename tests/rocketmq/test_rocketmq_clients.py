"""Published RocketMQ clients, unchanged: the same cases with each of them (clients/README.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rocketmq_client import PATIENCE, Client
from rocketmq_programs import LANGUAGES, command_of
from rocketmq_runs import GatewayProcess, Start

import escrowmq as mq
from escrowmq_lab.servers import escrow

NO_STREAM_AFTER_A_RESTART = ("go", "rust")
"""Clients that do not open their stream again within PATIENCE after a restart (docs/rocketmq.md)."""
WITHOUT_RUST = pytest.mark.parametrize("run", [one for one in LANGUAGES if one != "rust"], indirect=True)
"""For what the Rust client does not have."""
pytestmark = pytest.mark.timeout(1200)  # the first test of a language builds its program


@pytest.fixture(params=LANGUAGES)
def run(request: pytest.FixtureRequest, tmp_path: Path, gateway: GatewayProcess, topic: str) -> Iterator[Any]:
    """Start the program of a language: ``run(group="cart", check="commit")``."""
    command = command_of(request.param)
    started: list[Client] = []

    def start(group: str = "cart", check: str = "commit", address: str | None = None) -> Client:
        home = tmp_path / f"home{len(started)}"
        home.mkdir()
        client = Client(command, home, address or gateway.ready["rocketmq"], topic, group, check)
        client.language = request.param
        started.append(client)
        return client

    yield start
    for client in started:
        client.kill()


Run = Callable[..., Client]


def test_it_sends_and_receives_with_keys_tags_and_properties(run: Run, bus: mq.Bus, topic: str) -> None:
    client = run()
    sent = client.ask("send", body="one ä", keys=["k1", "k2"], tag="paid", properties={"a": "b", "c": "ü"})
    (got,) = client.receive(1)
    assert got["id"] == sent["id"]
    assert (got["body"], got["keys"], got["tag"]) == ("one ä", ["k1", "k2"], "paid")
    assert (got["properties"], got["attempt"]) == ({"a": "b", "c": "ü"}, 1)
    (own,) = bus.consumer(f"own-{topic}", topic).receive(1, wait=60.0)
    assert (own.body.decode(), own.tag) == ("one ä", "paid")
    assert own.key in ("k1", "k2")  # the Python client keeps keys as a set
    assert "01" + own.message_id.hex() == sent["id"].lower()
    bus.producer("shop").send(topic, b"two", key="k", tag="t", properties={"e": "f"})
    (got,) = client.receive(1)
    assert (got["body"], got["keys"], got["tag"], got["properties"]) == ("two", ["k"], "t", {"e": "f"})
    assert client.ask("stop") == {"ok": True}
    assert client.process.wait(PATIENCE) == 0


def test_messages_of_a_group_come_in_order(run: Run) -> None:
    client = run("fifo-cart")
    for number in range(8):
        client.ask("send", body=str(number), group="ab"[number % 2])
    got = client.receive(8)
    for group in "ab":
        bodies = [one["body"] for one in got if one["group"] == group]
        assert bodies == [str(number) for number in range(8) if "ab"[number % 2] == group]


def test_a_delayed_message_comes_later(run: Run) -> None:
    client = run()
    client.ask("send", body="late", delay=4.0)
    client.ask("send", body="now")
    assert [one["body"] for one in client.receive(2)] == ["now", "late"]


def test_transactions_are_committed_and_rolled_back(run: Run) -> None:
    client = run(check="unknown")
    good = client.ask("half", body="good", keys=["k"], tag="t", properties={"a": "b"})
    assert client.ask("commit") == {"ok": True}
    client.ask("half", body="bad")
    assert client.ask("rollback") == {"ok": True}
    client.ask("send", body="last")
    got = client.receive(2)
    assert {one["body"] for one in got} == {"good", "last"}
    (first,) = [one for one in got if one["body"] == "good"]
    assert (first["id"], first["keys"], first["tag"], first["properties"]) == (good["id"], ["k"], "t", {"a": "b"})
    assert client.is_empty()


@pytest.mark.parametrize("answer", ["commit", "rollback"])
def test_another_process_answers_for_one_that_was_killed_before_its_commit(run: Run, answer: str) -> None:
    # The sender knows nothing of its transaction, so a check that comes before it dies decides nothing.
    sender = run("", check="unknown")
    half = sender.ask("half", body="decided by another")
    sender.kill()
    other = run(check=answer)
    assert other.checks.get(timeout=PATIENCE) == half["id"]
    if answer == "commit":
        assert [one["id"] for one in other.receive(1)] == [half["id"]]
    assert other.is_empty()


@WITHOUT_RUST
def test_a_delayed_message_is_recalled(run: Run, bus: mq.Bus) -> None:
    def delayed() -> float:
        return float(bus.admin.stats()[0]["delayed_waiting"])

    client = run()
    before = delayed()
    sent = client.ask("send", body="recalled", delay=3600.0)
    assert delayed() == before + 1
    assert client.ask("recall", handle=sent["handle"])["id"] == sent["id"]
    assert delayed() == before
    assert client.is_empty()
    client.request("recall", handle="00" * 16)
    refused = client.answer()
    assert "error" in refused or not refused["id"]  # the Python client returns an empty id


@WITHOUT_RUST
def test_a_push_consumer_gets_a_message_again_that_it_failed(
    run: Run, bus: mq.Bus, topic: str, eventually: Any
) -> None:
    client = run("")
    client.ask("push", group="pushed", failures=1)
    sent = client.ask("send", body="push", keys=["k"], tag="t", properties={"a": "b"})
    for attempt in (1, 2):
        got = client.pushed.get(timeout=PATIENCE)
        assert (got["id"], got["attempt"], got["body"]) == (sent["id"], attempt, "push")
        assert (got["keys"], got["tag"], got["properties"]) == (["k"], "t", {"a": "b"})
    eventually(lambda: is_settled(bus, topic), PATIENCE)
    assert client.pushed.empty()


@WITHOUT_RUST
def test_a_message_that_a_push_consumer_fails_becomes_a_dead_letter(
    run: Run, bus: mq.Bus, topic: str, eventually: Any
) -> None:
    client = run("")
    client.ask("push", group="pushed", failures=99)
    eventually(lambda: [one for one in bus.admin.groups() if one["name"] == f"pushed.{topic}"], PATIENCE)
    bus.admin.alter_group(f"pushed.{topic}", max_attempts=2)
    sent = client.ask("send", body="never")
    assert [client.pushed.get(timeout=PATIENCE)["attempt"] for _ in range(2)] == [1, 2]
    eventually(lambda: is_settled(bus, topic), PATIENCE)
    (letter,) = bus.admin.dead_letters(f"pushed.{topic}")
    assert (letter["attempts"], f"01{letter['message_id']}") == (2, sent["id"].lower())
    assert client.pushed.empty()


def is_settled(bus: mq.Bus, topic: str) -> bool:
    """Return whether the group of push consumers has no unfinished message."""
    (group,) = [one for one in bus.admin.groups() if one["name"] == f"pushed.{topic}"]
    return not any(queue[name] for queue in group["queues"] for name in ("waiting", "leased", "retrying"))


def restart(start: Start, gateway: GatewayProcess) -> None:
    gateway.kill()
    start("--fifo", "fifo-*", listen=gateway.ready["rocketmq"], second=gateway.ready["second"])


def test_it_goes_on_after_the_gateway_was_killed(run: Run, start: Start) -> None:
    gateway = start("--fifo", "fifo-*")
    client = run(address=gateway.ready["rocketmq"])
    before = client.ask("send", body="before")
    restart(start, gateway)
    after = client.insist("send", body="after")
    assert {one["id"] for one in client.receive(2)} == {before["id"], after["id"]}


def test_it_answers_check_backs_after_the_gateway_was_killed(run: Run, start: Start) -> None:
    gateway = start()
    client = run(check="commit", address=gateway.ready["rocketmq"])
    restart(start, gateway)
    half = client.insist("half", body="asked after the restart")
    # Of a client that does not open its stream again, another process is asked.
    asked = run(address=gateway.ready["rocketmq"]) if client.language in NO_STREAM_AFTER_A_RESTART else client
    assert asked.checks.get(timeout=PATIENCE) == half["id"]
    assert [one["id"] for one in asked.receive(1)] == [half["id"]]


def test_what_is_not_acknowledged_comes_again_and_becomes_a_dead_letter(run: Run, bus: mq.Bus, topic: str) -> None:
    client = run()
    assert client.is_empty()  # which makes the group
    bus.admin.alter_group(f"cart.{topic}", max_attempts=2)
    sent = client.ask("send", body="never", keys=["k"], tag="t", properties={"a": "b"})
    found: list[Any] = []
    while not (letters := list(bus.admin.dead_letters(f"cart.{topic}"))):
        found += client.ask("receive", max=16, invisible=2)["messages"]
    assert [(one["attempt"], one["id"]) for one in found] == [(1, sent["id"]), (2, sent["id"])]
    (letter,) = letters
    assert (letter["attempts"], letter["cause"]) == (2, "lease expired, attempt 2 of 2")
    (dead,) = bus.admin.read(f"%dead-letters.cart.{topic}").read_all().to_pylist()
    assert "01" + dead["message_id"].hex() == sent["id"].lower()
    assert (dead["body"], dead["key"], dead["tag"]) == (b"never", "k", "t")
    assert {name: value for name, value in dead["properties"] if not name.startswith("rocketmq.")} == {"a": "b"}
    assert client.is_empty()


def test_it_goes_on_after_the_broker_was_killed(run: Run, start: Start, topic: str, tmp_path: Path) -> None:
    with escrow.serving(tmp_path) as broker:
        client = run(address=start(url=broker.url).ready["rocketmq"])
        for number in range(40):
            client.request("send", body=str(number))
            if number % 10 == 9:
                client.request("receive", max=16, invisible=10)
                client.request("ack")
        answers = [client.answer() for _ in range(15)]
        broker.kill()  # while it works off the rest
        broker.start()
        answers += [client.answer() for _ in range(33)]
        last = client.insist("send", body="last")
        sent = {one["id"] for one in answers if "id" in one} | {last["id"]}
        got = [message for one in answers for message in one.get("messages", ())]
        while not sent <= {one["id"] for one in got}:
            got += client.receive(1)
        assert len({one["id"] for one in got}) == len({one["body"] for one in got})
        assert {one["body"] for one in got} <= {*map(str, range(40)), "last"}
