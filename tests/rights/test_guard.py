"""Authentication, limits, and what changes of the rights file do to open connections."""

import threading
import time
from types import SimpleNamespace

import pyarrow as pa
import pytest
from guarded_broker import RightsFile, guarded

from escrowmq.broker.guarded import GuardedCalls
from escrowmq.errors import Code, Denied, EscrowError, Misuse, Overloaded
from escrowmq.model import Outcome, TransactionId
from escrowmq.rights import Guard, failures
from escrowmq.rights import guard as guarding
from escrowmq.rights.guard import Bucket
from escrowmq.rights.tokens import PATTERN, new_token
from escrowmq.schemas import ENDING
from escrowmq.wire import Exchange
from escrowmq.wire.frames import Kind


@pytest.fixture
def rights(tmp_path):
    file = RightsFile(tmp_path)
    file.add("shop", "send t", "produce shop", "consume g", "read t")
    file.add("boss", "view", "admin", "act *")
    return file


def enter(guard, token, source="1.2.3.4", certificates=()):
    return guard.enter(token, certificates, source, lambda: None)


def test_tokens_are_random_and_named():
    made = {new_token().text for _ in range(100)}
    assert len(made) == 100
    assert all(PATTERN.fullmatch(text) for text in made)


def test_only_a_known_token_or_certificate_enters(rights):
    rights.add("shop", more='certificates = ["shop.example"]')
    guard = Guard(rights.write())
    assert enter(guard, rights.tokens["shop"]).principal.name == "shop"
    by_certificate = enter(guard, None, certificates=["other", "shop.example"])
    assert by_certificate.authenticated_by == "certificate shop.example"
    for token in (None, "", "emq_", new_token().text, rights.tokens["shop"][:-1]):
        with pytest.raises(Denied) as caught:
            enter(guard, token)
        assert caught.value.code is Code.UNAUTHENTICATED
    with pytest.raises(Denied):  # a wrong token is not made good by a certificate
        enter(guard, "emq_wrong", certificates=["shop.example"])


def test_guesses_from_one_address_are_delayed(rights):
    guard = Guard(rights.write())
    for _ in range(failures.FREE_FAILURES + 1):
        with pytest.raises(Denied):
            enter(guard, "guess")
    assert guard.failures.delay("1.2.3.4") > 0
    assert guard.failures.delay("5.6.7.8") == 0


def test_a_token_expires_by_the_clock(rights, monkeypatch):
    token = new_token()
    rights.path.write_text(f'[principals.x]\ntokens = [{{ sha256 = "{token.sha256}", expires = 2027-02-01 }}]')
    now = {"ns": 1_801_440_000 * 10**9 - 1}  # one nanosecond before
    monkeypatch.setattr(guarding.time, "time_ns", lambda: now["ns"])
    dropped = threading.Event()
    guard = Guard(rights.path)
    guard.enter(token.text, (), "a", dropped.set)
    guard.start()
    try:
        assert not dropped.wait(3 * guarding.POLL_SECONDS)
        now["ns"] += 1
        assert dropped.wait(60)
        with pytest.raises(Denied):
            enter(guard, token.text)
    finally:
        guard.stop()


def test_a_changed_file_takes_effect_and_an_invalid_one_does_not(rights):
    guard = Guard(rights.write())
    changes, changed = [], threading.Event()
    guard.on_change = lambda *facts: (changes.append(facts), changed.set())
    before = guard.rights.digest
    guard.start()
    try:
        rights.path.write_text("[principals.x")
        deadline = time.monotonic() + 60
        while not guard.failed_reloads:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert guard.rights.digest == before
        rights.add("new", "view")
        rights.write()
        assert changed.wait(60)
        assert changes == [(guard.rights.digest, before, "the file changed")]
        assert enter(guard, rights.tokens["new"]).principal.name == "new"
    finally:
        guard.stop()


@pytest.mark.invariant("I45")
def test_half_a_file_and_no_file_change_nothing(rights):
    guard = Guard(rights.write())
    whole = rights.path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", None):
        if content is None:
            rights.path.unlink()
        else:
            rights.path.write_bytes(content)
        with pytest.raises(Misuse):
            guard.reload()
        assert set(guard.rights.principals) == {"shop", "boss"}


@pytest.mark.parametrize("change", ["removed", "narrowed", "another token"])
def test_whoever_lost_a_right_is_dropped_and_nobody_else(rights, change):
    guard = Guard(rights.write())
    dropped = []
    for name in ("shop", "boss"):
        guard.enter(rights.tokens[name], (), "a", lambda name=name: dropped.append(name))
    if change == "removed":
        rights.remove("shop")
    elif change == "narrowed":
        rights.add("shop", "send t", "produce shop", "consume g")
    else:
        rights.tokens["shop"] = new_token().text
        rights.add("shop", "send t", "produce shop", "consume g", "read t")
    rights.add("boss", "view", "admin", "act *", "send t")  # more than before: nothing ends
    rights.write()
    assert guard.reload()
    assert dropped == ["shop"]


def test_a_second_token_of_a_principal_lets_the_first_go_on(rights):
    """Rotation: add, deploy, remove."""
    guard = Guard(rights.write())
    dropped = []
    guard.enter(rights.tokens["shop"], (), "a", lambda: dropped.append(1))
    second = new_token()
    text = rights.path.read_text().replace("tokens = [", f'tokens = [{{ sha256 = "{second.sha256}" }}, ', 1)
    rights.path.write_text(text)
    guard.reload()
    assert not dropped
    assert enter(guard, second.text).principal.name == "shop"


def test_connections_of_one_principal_are_limited(rights):
    rights.add("shop", more="limits = { connections = 2 }")
    guard = Guard(rights.write())
    first, _ = enter(guard, rights.tokens["shop"]), enter(guard, rights.tokens["shop"])
    with pytest.raises(Overloaded, match="its limit is 2"):
        enter(guard, rights.tokens["shop"])
    guard.leave(first)
    guard.leave(first)  # counted once
    enter(guard, rights.tokens["shop"])
    with pytest.raises(Overloaded):
        enter(guard, rights.tokens["shop"])


def test_a_bucket_gives_its_rate_and_no_more(monkeypatch):
    clock = {"now": 100.0}
    monkeypatch.setattr(guarding.time, "monotonic", lambda: clock["now"])
    bucket = Bucket(10)
    assert bucket.take(10) == 0
    assert bucket.take(5) == pytest.approx(0.5)
    clock["now"] += 0.5
    assert bucket.take(5) == 0
    clock["now"] += 1.0
    assert bucket.take(30) == 0  # a request over the rate is taken whole, and the next ones wait
    assert bucket.take(1) == pytest.approx(2.1)


@pytest.fixture
def standing(monkeypatch):
    """Time stands still for what is counted by the second."""
    now = time.monotonic()
    monkeypatch.setattr(guarding, "time", SimpleNamespace(monotonic=lambda: now, time_ns=time.time_ns))


def test_a_principal_over_its_rows_is_asked_to_slow_down(tmp_path, rights, standing):
    rights.add("shop", "send t", more="limits = { rows_per_s = 3 }")
    with guarded(tmp_path, rights) as served, served.client(token=rights.tokens["shop"]) as client:
        assert len(client.plain(b"1", b"2", b"3")) == 3
        refusal = client.plain(b"4", sequence=4)
        assert isinstance(refusal, Overloaded)
        assert refusal.retry_after > 0


def test_a_principal_over_its_bytes_is_asked_to_slow_down(tmp_path, rights, standing):
    rights.add("shop", "send t", more='limits = { bytes_per_s = "1kB" }')
    with guarded(tmp_path, rights) as served, served.client(token=rights.tokens["shop"]) as client:
        assert client.plain(b"x" * 1_000_000)[0][0] == Code.OK, "more than a second's worth, from a full bucket"
        refusal = client.plain(b"y", sequence=2)
        assert isinstance(refusal, Overloaded)
        assert "1,000 bytes a second" in str(refusal)
        assert refusal.retry_after > 0


def test_open_transactions_of_a_principal_are_limited(tmp_path, rights):
    rights.add("shop", "send t", "produce shop", more="limits = { open_transactions = 2 }")
    with guarded(tmp_path, rights) as served, served.client(token=rights.tokens["shop"]) as client:
        request = {"group": "shop", "instance": "one", "transactional": True}
        session = client.act("session.open", request)["session"]
        assert [row[0] for row in client.prepare(session, b"1", b"2")] == [Code.OK, Code.OK]
        refusal = client.prepare(session, b"3", sequence=3)
        assert refusal.code is Code.TOO_MANY_OPEN


@pytest.mark.invariant("I45")
def test_a_revoked_token_ends_reads_receives_and_check_subscriptions(tmp_path, rights):
    with guarded(tmp_path, rights) as served:
        token = rights.tokens["shop"]
        reading, receiving, watching, boss = (
            served.client(token=token),
            served.client(token=token),
            served.client(token=token),
            served.client(token=rights.tokens["boss"]),
        )
        with reading, receiving, watching, boss:
            session = watching.act("session.open", {"group": "shop", "instance": "one", "transactional": True})[
                "session"
            ]
            receiving.plain(b"x" * 1000)
            receiving.act("groups.subscribe", {"group": "g", "topics": ["t"], "start": "latest"})
            receiving.receive(wait_ms=60_000)
            from escrowmq.wire.frames.frame import frame
            from escrowmq.wire.frames.rows import encoder

            watching.send(frame(Kind.WATCH, 77, b"", encoder.encode(session)))
            reading.begin_read({"source": "t"}, credit=1)
            rights.remove("shop")
            rights.write()
            for client in (reading, receiving, watching):
                client.closed()  # reads to the end of the stream; a test that waits for ever fails by its timeout
            assert boss.act("health")["status"] == "ok"
            with pytest.raises(Denied):
                served.client(token=token)


def test_a_principal_that_lost_a_right_gets_it_refused_when_it_comes_back(tmp_path, rights):
    with guarded(tmp_path, rights) as served:
        with served.client(token=rights.tokens["shop"]) as client:
            client.plain(b"x")
            rights.add("shop", "read t")
            rights.write()
            client.closed()
        with served.client(token=rights.tokens["shop"]) as client:
            refusal = client.plain(b"y", sequence=2)
            assert refusal.code is Code.DENIED
            assert refusal.message == "shop may not send to topic t: it needs `send t`"


class OpensFirst:
    """Calls of a broker whose next session opens after the rights were checked, and before the call is carried out."""

    def __init__(self, calls):
        self.calls = calls

    def __getattr__(self, name):
        return getattr(self.calls, name)

    def exchange(self, *given):
        self.calls.action("session.open", {"group": "shop", "instance": "new", "transactional": True})
        return self.calls.exchange(*given)


@pytest.mark.invariant("I45")
def test_a_guessed_session_cannot_be_used_although_it_opens_meanwhile(rights, tmp_path):
    rights.add("stranger", "consume x")
    with guarded(tmp_path, rights) as served, served.client(token=rights.tokens["shop"]) as shop:
        session = shop.act("session.open", {"group": "shop", "instance": "one", "transactional": True})["session"]
        shop.prepare(session, b"half")
        [half] = served.calls.action("transactions.list", {})["transactions"]
        ids = pa.array([bytes(TransactionId.parse(half["id"]))], pa.binary(16))
        ending = pa.record_batch([ids, pa.array([Outcome.COMMIT], pa.uint8())], schema=ENDING)
        guard = Guard(rights.path)
        stranger = GuardedCalls(OpensFirst(served.calls), guard, enter(guard, rights.tokens["stranger"]))
        with pytest.raises(EscrowError) as caught:
            stranger.exchange(Exchange.END, ending, {"session": session + 1}).result(60)
        assert caught.value.code is Code.UNKNOWN_SESSION
        [shown] = served.calls.action("transactions.list", {})["transactions"]
        assert shown["state"] == "open"
