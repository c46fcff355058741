"""Guesses of tokens are slowed down by every way in."""

import json
import time

import httpx
import pytest
from guarded_broker import RightsFile, guarded
from test_matrix_http import fetch

from escrowmq.broker.serving.http import HttpServer
from escrowmq.connecting import links
from escrowmq.console import ConsoleSettings
from escrowmq.console import beside as console_beside
from escrowmq.errors import Overloaded
from escrowmq.gateway import beside
from escrowmq.rights import failures
from escrowmq.rights.failures import Failures


def test_five_failures_within_a_minute_are_free(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: clock[0])
    found = Failures()
    for _ in range(failures.FREE_FAILURES):
        found.note("a")
        assert found.delay("a") == 0.0
    found.note("a")
    assert (found.delay("a"), found.delay("b")) == (failures.DELAY_SECONDS, 0.0)
    clock[0] += failures.FAILURE_SECONDS
    assert found.delay("a") == 0.0
    found.note("a")
    assert found.delay("a") == 0.0, "a new minute begins"


def test_suspects_are_unread_while_too_many_failures_are_delayed(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(failures, "MOST_WAITING", 2)
    found = Failures()
    for _ in range(failures.FREE_FAILURES + 1):
        found.note("a")
    assert not found.is_unread("a"), "one is delayed"
    clock[0] += failures.DELAY_SECONDS / 2
    found.note("a")
    assert (found.is_unread("a"), found.is_unread("b")) == (True, False)
    clock[0] += failures.DELAY_SECONDS / 2
    assert not found.is_unread("a"), "the first was refused"
    found.note("a")
    assert found.is_unread("a")


def test_the_oldest_addresses_are_forgotten(monkeypatch):
    monkeypatch.setattr(failures, "MOST_ADDRESSES", 2)
    found = Failures()
    for source in "abc":
        for _ in range(failures.FREE_FAILURES + 1):
            found.note(source)
    assert [found.delay(source) > 0 for source in "abc"] == [False, True, True]


@pytest.fixture
def rights(tmp_path):
    file = RightsFile(tmp_path)
    file.add("known", "view")
    file.add("new", "view")
    return file


@pytest.fixture
def broker(tmp_path, rights, monkeypatch):
    monkeypatch.setattr(failures, "DELAY_SECONDS", 0.01)
    monkeypatch.setattr(failures, "FAILURE_SECONDS", 3600.0)  # no new minute begins within a test
    with guarded(tmp_path, rights) as served:
        yield lambda token: links(f"escrow://127.0.0.1:{served.port}", {"token": token or ""})


def test_the_gateway_does_not_pass_guesses_on_that_must_wait(broker, rights, monkeypatch):
    with beside(broker, listen="127.0.0.1:0", rights=True) as at:
        address = f"{at['http']}/v1/topics"
        assert fetch(address, rights.tokens["known"])[0] == 200
        for number in range(failures.FREE_FAILURES + 2):
            assert fetch(address, f"emq_{number}")[0] == 401
        monkeypatch.setattr(failures, "MOST_WAITING", 0)
        for unknown in ("emq_wrong", None, rights.tokens["new"]):
            status, text = fetch(address, unknown)
            assert (status, json.loads(text)["name"]) == (503, "QUEUE_FULL")
        assert fetch(address, rights.tokens["known"])[0] == 200
        monkeypatch.setattr(failures, "MOST_WAITING", 1)
        assert fetch(address, rights.tokens["new"])[0] == 200


def test_the_console_checks_no_guess_that_must_wait(broker, rights, monkeypatch):
    with (
        console_beside(broker, listen="127.0.0.1:0", settings=ConsoleSettings(), rights=True) as at,
        httpx.Client(base_url=at["console"], trust_env=False, timeout=60.0) as browser,
    ):

        def log_in(token):
            page = browser.get("/login").text
            form = {"token": page.partition('name="token" value="')[2][:64], "access_token": token}
            answer = browser.post("/login", data=form, headers={"Origin": at["console"]})
            return answer.status_code

        for number in range(failures.FREE_FAILURES + 1):
            assert log_in(f"emq_{number}") == 401
        monkeypatch.setattr(failures, "MOST_WAITING", 0)
        assert log_in(rights.tokens["new"]) == 503
        monkeypatch.setattr(failures, "MOST_WAITING", 1)
        assert log_in(rights.tokens["new"]) == 303


def test_the_metrics_delay_their_refusals(tmp_path, rights, monkeypatch):
    from prometheus_client import CollectorRegistry

    from escrowmq.rights import Guard

    server = HttpServer("127.0.0.1", 0, CollectorRegistry(), lambda: {}, guard=Guard(rights.write()))
    try:
        address = f"http://127.0.0.1:{server.port}/metrics"
        for _ in range(failures.FREE_FAILURES):
            assert fetch(address, "emq_wrong")[0] == 401
        monkeypatch.setattr(failures, "DELAY_SECONDS", 0.05)
        began = time.monotonic()
        assert fetch(address, "emq_wrong")[0] == 401
        assert time.monotonic() - began >= 0.05
        assert fetch(address, rights.tokens["known"])[0] == 200
    finally:
        server.close()


async def test_only_so_many_wait():
    found = Failures()
    await found.wait("a")
    for _ in range(failures.FREE_FAILURES + 1):
        found.note("a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "MOST_WAITING", 0)
        with pytest.raises(Overloaded) as refused:
            await found.wait("a")
    assert refused.value.retry_after == failures.DELAY_SECONDS
    await found.wait("b")
