"""Plans through the pages: the set that was shown is the set that is acted on, once, and nothing is done without a
token.
"""

from __future__ import annotations

import html
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from console_visitor import Visitor
from console_world import fail_all, served_broker

import escrowmq as mq
from escrowmq.console import ConsoleSettings
from escrowmq.console.jobs import Job, Jobs
from escrowmq.errors import EscrowError, Rejected

CAUSES = {"a": "Timeout: the price list", "b": "KeyError: 'sku'"}


@pytest.fixture(scope="module")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served_broker(tmp_path_factory.mktemp("plans") / "data") as url:
        yield url


@pytest.fixture
def bus(broker_url: str) -> Iterator[mq.Bus]:
    with mq.connect(broker_url) as made:
        yield made


@pytest.fixture
def visitor(open_console: Callable[..., Visitor], broker_url: str, tmp_path: Path) -> Visitor:
    return open_console(broker_url, plans=tmp_path / "plans")


@pytest.fixture
def dead(bus: mq.Bus, g: str, t: str) -> str:
    """A group with 30 dead letters of two causes."""
    producer = bus.producer("p")
    for number in range(30):
        producer.send(t, b"{}", key=f"{'ab'[number % 3 == 0]}-{number}")
    fail_all(bus, g, t, CAUSES, 30)
    return g


def new_plan(visitor: Visitor, **fields: str) -> str:
    """The path of a plan that was made through the form."""
    visitor.get("/plans/new")
    path = visitor.post("/plans", why="a test", **fields)
    while path.startswith("/work/"):
        answer = visitor.http.get(path)
        path = answer.headers.get("location", path)
    return path


def run_of(visitor: Visitor, path: str, **fields: str) -> str:
    """Run a plan, and give its page once it stands still."""
    page = visitor.get(path)
    digest = re.search(r'name="digest" value="([0-9a-f]+)"', page)
    assert digest, page[-3000:]
    assert visitor.post(path + "/run", digest=digest[1], **{"ramp": "100", "pause": "0", **fields}) == path
    return until(visitor, path, lambda page: "data-live" not in page)


def until(visitor: Visitor, path: str, ready: Callable[[str], bool]) -> str:
    """A page, once it is as wanted."""
    deadline = time.monotonic() + 60
    while not ready(page := visitor.get(path)):
        assert time.monotonic() < deadline, page
    return page


def test_from_the_form_to_the_last_row(visitor: Visitor, bus: mq.Bus, dead: str) -> None:
    path = new_plan(visitor, act="dead_letters.retry", group=dead, cause=CAUSES["b"])
    page = visitor.get(path)
    assert "<strong>10 rows</strong>" in page
    assert "KeyError: &#39;sku&#39;" in page
    assert visitor.post(path + "/dry-run") == path
    until(visitor, path, lambda page: "it would be done" in page and "Checking:" not in page)
    assert len(bus.admin.dead_letters(dead)) == 30, "a dry run changes nothing"
    page = run_of(visitor, path)
    assert '<span class="state finished">finished</span>' in page
    left = bus.admin.dead_letters(dead)
    assert len(left) == 20
    assert not [letter for letter in left if "KeyError" in letter["cause"]]
    rows = visitor.get(path + "/rows", outcome="done")
    assert len(re.findall(r"<td data-label=\"outcome\">done</td>", rows)) == 10
    assert "No rows are like this" in visitor.get(path + "/rows", outcome="gone")
    act = [one for one in bus.admin.acts() if path.rpartition("/")[2] in (one["why"] or "")]
    assert len(act) >= 1
    assert "a test" in str(act[0]["why"])
    listed = visitor.get("/plans")
    assert path.rpartition("/")[2] in listed
    assert visitor.post(path + "/delete") == "/plans"
    visitor.get(path, status=404)


def test_what_cannot_be_taken_back_wants_the_number_of_rows(visitor: Visitor, bus: mq.Bus, dead: str) -> None:
    path = new_plan(visitor, act="dead_letters.discard", group=dead, cause=CAUSES["a"])
    page = visitor.get(path)
    digest = re.search(r'name="digest" value="([0-9a-f]+)"', page)
    assert digest
    for typed in ("", "19", "200"):
        assert "type the number" in visitor.post(path + "/run", status=400, digest=digest[1], ramp="100", rows=typed)
    assert len(bus.admin.dead_letters(dead)) == 30
    run_of(visitor, path, rows="20")
    assert len(bus.admin.dead_letters(dead)) == 10


def test_the_set_that_is_acted_on_is_the_set_shown(visitor: Visitor, bus: mq.Bus, dead: str, tmp_path: Path) -> None:
    path = new_plan(visitor, act="dead_letters.retry", group=dead)
    assert "look at it again" in visitor.post(path + "/run", status=409, digest="0" * 64, ramp="100")
    letters = bus.admin.dead_letters(dead)
    bus.admin.retry_dead_letters(dead, letters[:5])
    consumer = bus.consumer(dead, [letters[0]["topic"]], max_attempts=1)
    for number, message in enumerate(consumer.messages(idle_timeout=60), 1):
        message.nack(cause="it died again")
        if number == 5:
            break
    consumer.close()
    page = run_of(visitor, path, stop_after="")
    assert re.search(r">changed</a></th><td[^>]*>5<", page), "another death than the one that was shown is left alone"
    assert len(bus.admin.dead_letters(dead)) == 5
    frozen = next((tmp_path / "plans").glob("*/set.arrow"))
    frozen.write_bytes(frozen.read_bytes()[:-1] + b"\x00")
    again = new_plan(visitor, act="dead_letters.discard", group=dead)
    file = tmp_path / "plans" / again.rpartition("/")[2] / "set.arrow"
    file.write_bytes(file.read_bytes().replace(b"it died again", b"it died AGAIN"))
    digest = re.search(r'name="digest" value="([0-9a-f]+)"', visitor.get(again))
    assert digest
    visitor.post(again + "/run", status=500, digest=digest[1], ramp="100", rows="5")
    assert len(bus.admin.dead_letters(dead)) == 5, "a set that was changed by hand is refused"


def test_a_run_is_stopped_and_gone_on_with(visitor: Visitor, bus: mq.Bus, dead: str) -> None:
    path = new_plan(visitor, act="dead_letters.retry", group=dead)
    digest = re.search(r'name="digest" value="([0-9a-f]+)"', visitor.get(path))
    assert digest
    form = {"digest": digest[1], "ramp": "10,100", "pause": "600s"}
    assert visitor.post(path + "/run", **form) == path
    page = until(visitor, path, lambda page: ">3 of 30</progress>" in page)
    assert 'data-live="1"' in page
    assert "CONFLICT" in visitor.post(path + "/run", status=409, **form)
    assert visitor.post(path + "/stop") == path
    page = until(visitor, path, lambda page: "data-live" not in page)
    assert '<span class="state stopped">' in page
    assert len(bus.admin.dead_letters(dead)) == 27
    page = run_of(visitor, path)
    assert '<span class="state finished">' in page
    assert not bus.admin.dead_letters(dead)


def test_a_console_that_ends_stops_its_runs_between_batches(
    open_console: Callable[..., Visitor], broker_url: str, bus: mq.Bus, dead: str, tmp_path: Path
) -> None:
    from escrowmq.connecting import links
    from escrowmq.console import beside
    from escrowmq.plans import Plans

    with beside(lambda _: links(broker_url, {}), listen="127.0.0.1:0", plans=tmp_path / "plans") as at:
        visitor = Visitor(at["console"])
        path = new_plan(visitor, act="dead_letters.retry", group=dead)
        digest = re.search(r'name="digest" value="([0-9a-f]+)"', visitor.get(path))
        assert digest
        visitor.post(path + "/run", digest=digest[1], ramp="10,100", pause="600s")
        until(visitor, path, lambda page: ">3 of 30</progress>" in page)
        visitor.http.close()
    (found,) = Plans(tmp_path / "plans").list()
    assert (found.state, found.next) == ("stopped", 3)


def test_transactions_are_decided_by_plans_too(visitor: Visitor, bus: mq.Bus, t: str, g: str) -> None:
    producer = bus.producer(g, unasked=True)
    waiting = []
    for number in range(3):
        transaction = producer.transaction()
        waiting.append(transaction.send(t, b"half", key=str(number)).transaction_id)
    page = visitor.get("/transactions", group=g, state="open")
    found = re.search(r'href="(/plans/new\?act=transactions.commit[^"]+)"', page)
    assert found
    form = visitor.get(html.unescape(found[1]))
    assert f'value="{g}"' in form
    path = new_plan(visitor, act="transactions.commit", group=g, state="open")
    run_of(visitor, path, rows="3")
    assert {row["state"] for row in bus.admin.transactions(group=g)} == {"committed"}
    page = visitor.get(f"/transactions/{waiting[0]}")
    assert "by operator" in page


@pytest.mark.parametrize(
    ("act", "selection"),
    [
        ("transactions.rollback", {"group": "shop", "state": "parked", "cause": "asked_out"}),
        ("transactions.commit", {"group": "shop", "key": "of a letter"}),
        ("dead_letters.retry", {"group": "cart", "containing": "no 'sku'"}),
    ],
)
def test_all_of_a_selection_is_in_the_form(visitor: Visitor, act: str, selection: dict[str, str]) -> None:
    """Else the plan would have more rows than the page that leads to it showed."""
    form = visitor.get("/plans/new", act=act, selection=json.dumps(selection))
    shown = {
        html.unescape(name): html.unescape(value)
        for name, value in re.findall(r'name="(\w+)"[^>]* value="([^"]*)"', form)
    }
    assert {name: shown[name] for name in selection} == selection


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"act": "dead_letters.retry", "group": "none", "why": "x"}, 404, "UNKNOWN_GROUP"),
        ({"act": "dead_letters.retry", "why": "x"}, 400, "group"),
        ({"act": "dead_letters.retry", "group": "<b>", "why": "x"}, 400, "BAD_GROUP_NAME"),
        ({"act": "topics.delete", "why": "x"}, 400, "no act"),
        ({"act": "dead_letters.retry", "group": "g"}, 400, "reason"),
        ({"act": "transactions.commit", "state": "committed", "why": "x"}, 400, "committed"),
        ({"act": "transactions.commit", "older_than": "soon", "why": "x"}, 400, "older than"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(
    visitor: Visitor, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], status: int, says: str
) -> None:
    monkeypatch.setattr("escrowmq.console.views.plans.QUICKLY", 60.0)  # the answer is the error, however slow it is
    visitor.get("/plans/new")
    assert says in visitor.post("/plans", status=status, **fields)


def test_addresses_of_plans_are_not_believed(visitor: Visitor) -> None:
    for selection in ("[]", "{", "1", "[" * 3000):
        visitor.get("/plans/new", status=400, selection=selection)
    unknown = json.dumps({"group": "g", "other": 1})
    assert "other" in visitor.get("/plans/new", status=400, act="dead_letters.retry", selection=unknown)
    page = visitor.get("/plans/new", act="<script>", selection=json.dumps({"group": '"><script>'}))
    assert "<script>" not in page.replace('<script src="/static/console.js" defer>', "")
    for path in ("/plans/none", "/plans/%2e%2e", "/plans/0", "/work/none"):
        visitor.get(path, status=404)


# Forged forms

FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"token": "0" * 64}, 403),
        ({"token": ""}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": None}, 403),
        ({"cookie": "escrowmq-console=x"}, 403),
        ({"kind": "application/json"}, 415),
        ({"kind": "multipart/form-data; boundary=x"}, 415),
        ({"kind": "text/plain"}, 415),
    ],
)
def test_a_forged_form_does_nothing(
    visitor: Visitor, dead: str, tmp_path: Path, changes: dict[str, Any], status: int
) -> None:
    visitor.get("/plans/new")
    ((name, value),) = visitor.http.cookies.items()
    honest = {"token": visitor.token, "origin": visitor.url, "cookie": f"{name}={value}", "kind": FORM}

    def post(given: dict[str, Any]) -> int:
        headers = {"Content-Type": given["kind"], "Cookie": given["cookie"]}
        if given["origin"] is not None:
            headers["Origin"] = given["origin"]
        form = urlencode({"token": given["token"], "act": "dead_letters.retry", "group": dead, "why": "x"})
        with httpx.Client(trust_env=False, timeout=60.0) as bare:
            return bare.post(visitor.url + "/plans", content=form, headers=headers).status_code

    assert post({**honest, **changes}) == status
    assert not (tmp_path / "plans").exists(), "nothing was done"
    assert post(honest) == 303


# Work


def test_work_is_bounded_and_told() -> None:
    jobs, gate = Jobs(), threading.Event()

    def wait(job: Job) -> str:
        job.progress = "half"
        assert gate.wait(60)
        return "/there"

    running = [jobs.begin("run", f"plan {number}", wait) for number in range(8)]
    with pytest.raises(EscrowError, match="enough at once"):
        jobs.begin("run", "another", wait)
    gate.set()
    for job in running:
        assert job.ended.wait(60)
        assert job.to == "/there"

    def fail(job: Job) -> str:
        raise ValueError("a bug")

    broken = jobs.begin("run", "plan 0", fail)
    assert broken.ended.wait(60)
    assert "a bug" in str(broken.problem)
    assert jobs.of("run", "plan 0") is broken
    for number in range(200):
        assert jobs.begin("x", "", lambda job: "/").ended.wait(60), number
    with pytest.raises(Rejected, match="no such work"):
        jobs.get(running[0].id)
    jobs.close()
    with pytest.raises(EscrowError, match="enough at once"):
        jobs.begin("x", "", wait)


def test_a_slow_making_shows_how_far_it_is(
    open_console: Callable[..., Visitor], broker_url: str, dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from escrowmq.console.views import plans as view

    monkeypatch.setattr(view, "QUICKLY", 0.0)
    settings = ConsoleSettings(sample_seconds=60, call_timeout=60.0, page_timeout=120.0)
    visitor = open_console(broker_url, settings, plans=tmp_path / "plans")
    visitor.get("/plans/new")
    path = visitor.post("/plans", act="dead_letters.retry", group=dead, why="x")
    while path.startswith("/work/"):
        path = visitor.http.get(path).headers.get("location", path)
    assert "<strong>30 rows</strong>" in visitor.get(path)


def test_the_plan_of_a_message_that_was_found_is_of_that_one_alone(visitor: Visitor, dead: str, t: str) -> None:
    page = visitor.get("/find?q=b-0")
    link = next(
        html.unescape(one)
        for one in re.findall(r'href="(/plans/new\?act=dead_letters.retry[^"]+)"', page)
        if dead in html.unescape(one)
    )
    form = visitor.get(link)
    items = re.search(r'name="items" value="([^"]+)"', form)
    assert items, form
    path = new_plan(visitor, act="dead_letters.retry", group=dead, items=html.unescape(items[1]))
    assert "b-0" in visitor.get(path + "/rows")
    run_of(visitor, path)
    assert path.rpartition("/")[2] in visitor.get("/plans")
    page = visitor.post("/plans", 400, act="dead_letters.retry", group=dead, why="x", items="[")
    assert "can be read" in page


def test_rows_of_a_database_are_acted_on_through_a_plan(
    open_console: Callable[..., Visitor], broker_url: str, tmp_path: Path
) -> None:
    import sqlalchemy as sa

    from escrowmq import outbox
    from escrowmq.outbox.tables import State, trans_message

    urls = [f"sqlite:///{tmp_path / name}" for name in ("shop.db", "till.db")]
    engines = [sa.create_engine(url) for url in urls]
    for engine in engines:
        outbox.migrate(engine)
        with engine.begin() as connection:
            outbox.send_batch_tx(connection, [mq.Message("orders", b"%d" % n) for n in range(3)])
            connection.execute(sa.update(trans_message).values(state=State.WAITING, attempts=4, error="UNKNOWN_TOPIC"))
    visitor = open_console(broker_url, databases=urls, plans=tmp_path / "plans")
    page = visitor.get("/waiting")
    links = [html.unescape(one) for one in re.findall(r'href="(/plans/new\?act=outbox.retry[^"]+)"', page)]
    assert len(links) == 2, page
    form = visitor.get(next(one for one in links if "till.db" in one))
    assert re.search(r"<option[^>]*till.db[^>]* selected>", form), form
    path = new_plan(visitor, act="outbox.retry", database=urls[1])
    assert "till.db" in visitor.get(path)
    run_of(visitor, path)
    with engines[0].connect() as shop, engines[1].connect() as till:
        states = [list(one.scalars(sa.select(trans_message.c.state))) for one in (shop, till)]
    assert states == [[State.WAITING] * 3, [State.PENDING] * 3]
    page = visitor.post("/plans", 400, act="outbox.retry", database="sqlite:///other.db", why="x")
    assert "databases" in page
    for engine in engines:
        engine.dispose()
