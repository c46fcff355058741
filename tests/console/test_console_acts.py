"""What a person does to groups and topics through the pages: shown first, confirmed by a typed name, recorded with its
reason.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from console_visitor import Visitor
from console_world import fail_all, served_broker

import escrowmq as mq


@pytest.fixture(scope="module")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served_broker(tmp_path_factory.mktemp("acts") / "data") as url:
        yield url


@pytest.fixture
def bus(broker_url: str) -> Iterator[mq.Bus]:
    with mq.connect(broker_url) as made:
        yield made


@pytest.fixture
def visitor(open_console: Callable[..., Visitor], broker_url: str) -> Visitor:
    return open_console(broker_url)


@pytest.fixture
def read(bus: mq.Bus, g: str, t: str) -> str:
    """A group that has done all 20 messages of its topic."""
    bus.admin.create_topic(t, queues=2)
    producer = bus.producer("p")
    for number in range(20):
        producer.send(t, b"{}", key=f"a-{number}")
    consumer = bus.consumer(g, [t])
    for number, message in enumerate(consumer.messages(idle_timeout=60), 1):
        message.ack()
        if number == 20:
            break
    consumer.close()
    return g


def why_of(bus: mq.Bus, act: str) -> str | None:
    return [one["why"] for one in bus.admin.acts() if one["act"] == act][-1]


def test_pause_and_resume(visitor: Visitor, bus: mq.Bus, read: str) -> None:
    page = visitor.get(f"/groups/{read}")
    assert "paused</span>" not in page
    assert visitor.post(f"/groups/{read}/pause", why="the shop is down") == f"/groups/{read}"
    assert bus.admin.groups()[-1]["name"]
    assert next(one for one in bus.admin.groups() if one["name"] == read)["paused"]
    assert why_of(bus, "groups.pause") == "the shop is down"
    assert "paused</span>" in visitor.get(f"/groups/{read}")
    assert "paused</span>" in visitor.get("/groups")
    visitor.post(f"/groups/{read}/resume", why="it is back")
    assert "paused</span>" not in visitor.get(f"/groups/{read}")
    assert "reason" in visitor.post(f"/groups/{read}/pause", status=400, why=" ")


def test_a_group_s_limits_are_shown(visitor: Visitor, bus: mq.Bus, read: str) -> None:
    assert "<dt>Limits</dt><dd>none</dd>" in visitor.get(f"/groups/{read}")
    bus.admin.limit_group(read, rate=2.5, in_flight_per_key=1)
    assert "2.5 messages per second, 1 in flight per key" in visitor.get(f"/groups/{read}")


def test_a_reset_goes_to_the_places_that_were_shown(visitor: Visitor, bus: mq.Bus, read: str, t: str) -> None:
    page = visitor.get(f"/groups/{read}/reset", to="shift", shift=-3)
    assert "6 messages that were settled come again" in page
    places = html.unescape(re.search(r'name="places" value="([^"]+)"', page)[1])  # type: ignore[index]
    form = {"places": places, "why": "a release was wrong"}
    assert "type" in visitor.post(f"/groups/{read}/reset", status=400, **form, typed="other")
    bus.producer("p").send(t, b"late", key="a-1")
    assert visitor.post(f"/groups/{read}/reset", **form, typed=read) == f"/groups/{read}"
    assert why_of(bus, "groups.reset") == "a release was wrong"
    consumer = bus.consumer(read, [t])
    got = []
    for message in consumer.messages(idle_timeout=60):
        got.append(message.body)
        message.ack()
        if len(got) == 7:
            break
    consumer.close()
    assert sorted(got) == [b"late", *[b"{}"] * 6]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"to": "somewhere"}, "no place"),
        ({"to": "time", "time": "soon"}, "no time"),
        ({"to": "shift", "shift": "many"}, "no number"),
        ({"to": "shift", "shift": str(1 << 60)}, "no number"),
        ({"to": "offset", "offset": "3"}, "queue"),
        ({"to": "earliest", "topic": "none"}, "none"),
    ],
)
def test_a_reset_that_cannot_be_says_why(visitor: Visitor, read: str, query: dict[str, str], says: str) -> None:
    status = 404 if query.get("topic") else 400
    assert says in visitor.get(f"/groups/{read}/reset", status=status, **query)


@pytest.mark.parametrize(
    "places", ["", "[]", "{", "[" * 2000, json.dumps({"escrow://elsewhere": [["t", 0, 0]]}), '{"a": [[1]]}']
)
def test_the_places_of_a_form_are_not_believed(visitor: Visitor, bus: mq.Bus, read: str, places: str) -> None:
    visitor.get(f"/groups/{read}")
    visitor.post(f"/groups/{read}/reset", status=400, places=places, typed=read, why="x")


def test_a_group_is_deleted_by_its_typed_name(visitor: Visitor, bus: mq.Bus, read: str) -> None:
    visitor.get(f"/groups/{read}")
    for typed in ("", read[:-1], read.upper()):
        visitor.post(f"/groups/{read}/delete", status=400, typed=typed, why="x")
    assert visitor.post(f"/groups/{read}/delete", typed=read, why="nobody needs it") == "/groups"
    assert read not in {one["name"] for one in bus.admin.groups()}
    assert why_of(bus, "groups.delete") == "nobody needs it"
    visitor.get(f"/groups/{read}", status=404)


def test_a_member_is_fenced_by_its_typed_name(visitor: Visitor, bus: mq.Bus, t: str, g: str) -> None:
    bus.producer("p").send(t, b"x")
    consumer = bus.consumer(g, [t], in_doubt="hold", instance="node-1")
    next(iter(consumer.messages(idle_timeout=60)))
    page = visitor.get(f"/groups/{g}")
    assert '<option value="node-1">' in page
    visitor.post(f"/groups/{g}/fence", status=400, instance="node-1", typed="node", why="x")
    assert visitor.post(f"/groups/{g}/fence", instance="node-1", typed="node-1", why="it burnt") == f"/groups/{g}"
    assert "fenced</span>" in visitor.get(f"/groups/{g}")
    assert why_of(bus, "groups.fence") == "it burnt"


def test_a_topic_is_altered_and_deleted(visitor: Visitor, bus: mq.Bus, read: str, t: str) -> None:
    visitor.get(f"/topics/{t}")
    assert visitor.post(f"/topics/{t}/alter", queues="3", retention="7d", why="more room") == f"/topics/{t}"
    assert len(bus.admin.offsets(t)) == 3
    assert why_of(bus, "topics.alter") == "more room"
    visitor.post(f"/topics/{t}/alter", status=400, why="x")
    visitor.post(f"/topics/{t}/alter", status=400, retention="soon", why="x")
    visitor.post(f"/topics/{t}/alter", status=400, queues="-1", why="x")
    page = visitor.get(f"/topics/{t}/delete")
    assert "20 messages would go" in page
    assert read in page
    visitor.post(f"/topics/{t}/delete", status=400, typed="", why="x")
    assert "CONFLICT" in visitor.post(f"/topics/{t}/delete", status=409, typed=t, why="x")
    assert visitor.post(f"/topics/{t}/delete", typed=t, force="yes", why="it was a trial") == "/topics"
    assert t not in {one["name"] for one in bus.admin.topics()}


def test_the_rules_of_a_producer_group_are_changed(visitor: Visitor, bus: mq.Bus, g: str, t: str) -> None:
    bus.producer(g).send(t, b"plain")
    assert f"/producers/{g}/alter" in visitor.get("/producers", name=g)
    page = visitor.get(f"/producers/{g}/alter")
    assert "It serves plain messages." in page
    path = f"/producers/{g}/alter"
    given = {"kind": "mixed", "transaction_timeout": "90s", "check_max": "4", "checks_exhausted": "rollback"}
    assert visitor.post(path, **given, why="a slow bank") == f"/producers?name={g}"
    (row,) = [one for one in bus.admin.producers() if one["group"] == g]
    assert (row["kind"], row["transaction_timeout"], row["check_max"], row["checks_exhausted"]) == (
        "mixed",
        90,
        4,
        "rollback",
    )
    assert why_of(bus, "producers.alter") == "a slow bank"
    visitor.post(path, check_max="broker", checks_exhausted="broker", why="back")
    (row,) = [one for one in bus.admin.producers() if one["group"] == g]
    assert sorted(row["own"]) == ["kind", "transaction_timeout"]
    visitor.post(path, status=400, why="nothing is said")
    visitor.post(path, status=400, check_max="9")
    for wrong in ({"kind": "odd"}, {"transaction_timeout": "soon"}, {"check_max": "-1"}, {"checks_exhausted": "x"}):
        visitor.post(path, status=400, why="x", **wrong)
    assert len([act for act in bus.admin.acts() if act["act"] == "producers.alter" and act["what"]["group"] == g]) == 2
    assert "no producer group" in visitor.get("/producers/nobody/alter", status=404)


def test_what_waits_leads_to_a_plan(visitor: Visitor, bus: mq.Bus, g: str, t: str) -> None:
    producer = bus.producer("p")
    for number in range(6):
        producer.send(t, b"{}", key=f"{'ab'[number % 2]}-{number}")
    fail_all(bus, g, t, {"a": "Timeout: 17 seconds", "b": "KeyError: 'sku'"}, 6)
    page = visitor.get("/waiting")
    causes = re.findall(r'href="(/plans/new\?act=dead_letters.retry[^"]+)"', page)
    mine = [visitor.get(html.unescape(cause)) for cause in causes if g in cause]
    assert len(mine) == 2
    assert all(f'value="{g}"' in form for form in mine)
    listed = visitor.get(f"/dead-letters/{g}")
    assert "of 6 dead letters" in listed
    cause = re.search(r'href="(\?cause=KeyError[^"]+)"', listed)
    assert cause
    narrowed = visitor.get(f"/dead-letters/{g}" + html.unescape(cause[1]))
    assert len(re.findall(r">b-\d<", narrowed)) == 3
    assert not re.findall(r">a-\d<", narrowed)
    assert g in visitor.get("/dead-letters")


def test_nothing_waits(open_console: Callable[..., Visitor], tmp_path_factory: pytest.TempPathFactory) -> None:
    with served_broker(tmp_path_factory.mktemp("quiet") / "data") as url:
        visitor = open_console(url)
        assert "Nothing waits." in visitor.get("/waiting")
        assert "no dead letters" in visitor.get("/dead-letters")
        assert "no plans yet" in visitor.get("/plans")


def test_acts_on_a_database_are_listed_and_verified(
    open_console: Callable[..., Visitor], broker_url: str, tmp_path: Path
) -> None:
    import sqlalchemy as sa

    from escrowmq.outbox import migrate
    from escrowmq.outbox.acts import record

    url, away = f"sqlite:///{tmp_path / 'shop.db'}", f"sqlite:///{tmp_path / 'none' / 'away.db'}"
    engine = sa.create_engine(url)
    migrate(engine)
    with record(engine, "outbox.retry", {"messages": ["<b>"]}, by="ada@shop", why="the target is back") as (_, ended):
        ended["results"] = {"OK": 1}
    visitor = open_console(broker_url, databases=[url, away])
    page = visitor.get("/acts")
    assert "the target is back" in page
    assert "ada@shop" in page
    assert "Not all" in page, "the other database cannot be read, and that is said"
    link = re.search(r'href="(/acts/1\?broker=sqlite[^"]+)"', page)
    assert link
    assert "&lt;b&gt;" in visitor.get(html.unescape(link[1]))
    assert "whole</span>" in visitor.get("/acts/verify")
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE trans_act SET record = replace(record, 'ada', 'bob')"))
    assert "touched</span>" in visitor.get("/acts/verify")
    engine.dispose()
