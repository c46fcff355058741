"""Credentials that were revoked, expired, removed or narrowed: whatever is open ends at the next look at the file and
the clock, and nothing before. The time between two looks is a constant; bench/rights.py measures the whole."""

import threading

import httpx
import pytest
from guarded_broker import RightsFile, guarded
from served import PATIENT

from escrowmq.connecting import links
from escrowmq.console import beside as console_beside
from escrowmq.console import sessions
from escrowmq.gateway import beside as gateway_beside
from escrowmq.rights import guard as guarding
from escrowmq.rights.tokens import new_token
from escrowmq.wire.frames import Kind
from escrowmq.wire.frames.frame import frame
from escrowmq.wire.frames.rows import encoder

RULES = ("send t", "produce shop", "consume g", "read t", "view")
BEFORE, AFTER = 1_801_439_999, 1_801_440_000
"""Seconds since 1970: the last of 2027-01-31, and the first of the day on which the token expires."""


@pytest.fixture
def clock(monkeypatch):
    made = {"seconds": BEFORE}
    monkeypatch.setattr(guarding.time, "time_ns", lambda: made["seconds"] * 10**9)
    return made


def change(kind, rights, clock):
    if kind == "removed":
        rights.remove("shop")
    elif kind == "revoked":
        rights.tokens["shop"] = new_token().text
        rights.add("shop", *RULES)
    elif kind == "narrowed":
        rights.add("shop", "send t", "produce shop", "read t", "view")
    else:
        clock["seconds"] = AFTER
        return
    rights.write()


def log_in(browser, token):
    """Begin a session of the console."""
    page = browser.get("/login").text
    form = {"token": page.partition('name="token" value="')[2][:64], "access_token": token}
    assert browser.post("/login", data=form, headers={"Origin": str(browser.base_url)}).status_code == 303
    assert browser.get("/plans").status_code == 200


@pytest.mark.invariant("I45")
@pytest.mark.parametrize("kind", ["removed", "revoked", "expired", "narrowed"])
def test_whatever_is_open_ends_at_the_next_look(tmp_path, kind, clock):
    rights = RightsFile(tmp_path)
    token = rights.add("shop", *RULES)
    rights.add("boss", "view")
    text = rights.write().read_text()
    if kind == "expired":
        rights.write = lambda: rights.path  # as it is
        rights.path.write_text(text.replace('" }]', '", expires = 2027-02-01 }]', 1))
    with guarded(tmp_path, rights, follows=False) as served:
        url, guard = f"escrow://127.0.0.1:{served.port}", served.guard

        def connect(one):
            return links(url, {"token": one or rights.tokens["boss"]})

        reading, receiving, watching = (served.client(token=token) for _ in range(3))
        boss = served.client(token=rights.tokens["boss"])
        with (
            reading,
            receiving,
            watching,
            boss,
            gateway_beside(connect, listen="127.0.0.1:0", rights=True) as gateway,
            console_beside(connect, listen="127.0.0.1:0", rights=True, plans=tmp_path / "plans") as console,
            httpx.Client(base_url=console["console"], trust_env=False, timeout=PATIENT) as browser,
            httpx.Client(base_url=gateway["http"], trust_env=False, timeout=PATIENT) as http,
        ):
            opened = watching.act("session.open", {"group": "shop", "instance": "one", "transactional": True})
            session = opened["session"]
            receiving.plain(b"x" * 1000)
            receiving.act("groups.subscribe", {"group": "g", "topics": ["t"], "start": "latest"})
            receiving.receive(wait_ms=60_000)
            watching.send(frame(Kind.WATCH, 77, b"", encoder.encode(session)))
            reading.begin_read({"source": "t"}, credit=1)
            answers, before = [], served.server.numbers()["requests_total"]

            def receive():
                headers = {"Authorization": f"Bearer {token}"}
                answers.append(http.post("/v1/consumers/g/receive", json={"wait": 30}, headers=headers))

            thread = threading.Thread(target=receive)
            thread.start()
            served.until(lambda: served.server.numbers()["requests_total"] > before)  # the gateway's receive
            log_in(browser, token)
            guard.look()
            for client in (reading, receiving, watching, boss):
                assert client.act("health")["status"] == "ok", "nothing has changed, and all are there"
            change(kind, rights, clock)
            for client in (reading, receiving, watching, boss):
                assert client.act("health")["status"] == "ok", "nobody has looked"
            guard.look()
            for client in (reading, receiving, watching):
                client.closed()  # reads to the end of the stream
            assert boss.act("health")["status"] == "ok"
            thread.join()
            assert answers[0].status_code == (403 if kind == "narrowed" else 401)
            if kind != "narrowed":
                served.until(lambda: browser.get("/plans").status_code == 303)
                assert browser.get("/").headers["location"] == "/login?next=%2F"


def test_an_expiry_that_was_put_off_counts(tmp_path, clock):
    rights = RightsFile(tmp_path)
    token = rights.add("shop", *RULES)
    text = rights.write().read_text()
    rights.path.write_text(text.replace('" }]', '", expires = 2027-02-01 }]'))
    guard, dropped = guarding.Guard(rights.path), []
    guard.enter(token, (), "a", lambda: dropped.append(1))
    rights.path.write_text(text.replace('" }]', '", expires = 2027-02-02 }]'))
    guard.look()
    clock["seconds"] = AFTER
    guard.look()
    assert not dropped
    clock["seconds"] = AFTER + 86_400
    guard.look()
    assert dropped == [1]


def test_the_looks_together_leave_time_to_end_within_a_second():
    assert guarding.POLL_SECONDS + sessions.CHECKED_SECONDS < 1.0
