"""Edit and deliver again: what the form does not change stays byte for byte; sent twice, it is done once; another death
is left alone.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from console_visitor import Visitor
from console_world import fail_all, served_broker

import escrowmq as mq
from escrowmq.console.asked import Params
from escrowmq.console.views.changing.dead_letters import _changes


@pytest.fixture(scope="module")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served_broker(tmp_path_factory.mktemp("editing") / "data") as url:
        yield url


@pytest.fixture
def bus(broker_url: str) -> Iterator[mq.Bus]:
    with mq.connect(broker_url) as made:
        yield made


@pytest.fixture
def visitor(open_console: Callable[..., Visitor], broker_url: str) -> Visitor:
    return open_console(broker_url)


def dead_letter(bus: mq.Bus, group: str, topic: str, body: bytes, **options: Any) -> dict[str, Any]:
    bus.producer("p").send(topic, body, **options)
    fail_all(bus, group, topic, {}, 1)
    return dict(bus.admin.dead_letters(group)[0])


def form_of(visitor: Visitor, group: str, letter: dict[str, Any]) -> dict[str, Any]:
    """The fields of the form, as a browser would send them back."""
    place = {name: letter[name] for name in ("broker", "topic", "queue", "offset")}
    page = visitor.get(f"/dead-letters/{group}/edit", **place)
    form: dict[str, Any] = {}
    for name, value in re.findall(r'<input[^>]* name="([a-z_]+)"[^>]* value="([^"]*)"', page):
        if name.startswith("property_"):
            form.setdefault(name, []).append(html.unescape(value))
        elif name != "token":
            form.setdefault(name, html.unescape(value))
    body = re.search(r"<textarea[^>]*>\n(.*?)</textarea>", page, re.DOTALL)
    assert body
    return {**form, "body": html.unescape(body[1]).replace("\n", "\r\n")}


def delivered(bus: mq.Bus, group: str, topic: str) -> Any:
    consumer = bus.consumer(group, [topic], max_attempts=1)
    message = next(iter(consumer.messages(idle_timeout=60)))
    message.ack()
    consumer.close()
    return message


def test_an_edited_body_takes_its_place_once(visitor: Visitor, bus: mq.Bus, g: str, t: str) -> None:
    letter = dead_letter(bus, g, t, b'{"price": ', key="k", tag="a", properties={"trace": "1", "old": "x"})
    form = form_of(visitor, g, letter)
    assert form["body"] == '{"price": '
    assert form["property_name"] == ["trace", "old", "", ""]
    form |= {
        "body": '{"price": 7}\r\n',
        "why": "it was cut",
        "property_name": ["trace", "", "new", ""],
        "property_value": ["1", "", "2", ""],
    }
    assert "reason" in visitor.post(f"/dead-letters/{g}/edit", status=400, **{**form, "why": ""})
    found = visitor.post(f"/dead-letters/{g}/edit", **form)
    assert found == f"/find?q={t}/{letter['queue']}/{letter['offset']}"
    message = delivered(bus, g, t)
    assert (message.body, message.key, message.tag) == (b'{"price": 7}\n', "k", "a")
    properties = {name: value for name, value in message.properties.items() if not name.startswith("ESCROWMQ_")}
    assert properties == {"trace": "1", "new": "2"}
    assert not bus.admin.dead_letters(g)
    visitor.post(f"/dead-letters/{g}/edit", status=404, **form)
    act = [one for one in bus.admin.acts() if one["act"] == "dead_letters.edit"][-1]
    assert act["why"] == "it was cut"


def test_another_death_than_the_one_shown_is_left_alone(visitor: Visitor, bus: mq.Bus, g: str, t: str) -> None:
    letter = dead_letter(bus, g, t, b"one")
    form = form_of(visitor, g, letter)
    bus.admin.retry_dead_letters(g)
    fail_all(bus, g, t, {}, 1)
    assert "CONFLICT" in visitor.post(f"/dead-letters/{g}/edit", status=409, **{**form, "body": "two", "why": "x"})
    assert len(bus.admin.dead_letters(g)) == 1


@pytest.mark.parametrize(
    ("old", "sent", "changed"),
    [
        (b"a\nb", "a\r\nb", None),
        (b"a\r\nb", "a\r\nb", None),
        (b"a\r\nb", "a\r\nc", b"a\r\nc"),
        (b"a\nb", "a\r\nc", b"a\nc"),
        (b"a", "", b""),
        (b"\xff\xfe", "", None),
        (b"\xff\xfe", "text", b"text"),
        (b"a\x00b", "", None),
        (b"", "", None),
        (None, "new", b"new"),
        ("ä€".encode(), "ä€", None),
    ],
)
def test_what_a_form_does_not_change_stays_as_it_was(old: bytes | None, sent: str, changed: bytes | None) -> None:
    message = {"body": old, "key": "a\nb", "tag": None, "properties": {"p\n": "v\r\nw", "ESCROWMQ_X": "kept"}}
    form = {"body": (sent,), "key": ("ab",), "tag": ("",), "property_name": ("p", ""), "property_value": ("vw", "")}
    changes = _changes(Params("/", form=form), message)
    assert changes == ({} if changed is None else {"body": changed})


def test_fields_are_taken_away_and_put_in() -> None:
    message = {"body": b"x", "key": "k", "tag": "t", "properties": {"a": "1", "b": "2"}}
    form = {"body": ("x",), "key": ("",), "tag": ("u",), "property_name": ("a", "c"), "property_value": ("9", "3")}
    changes = _changes(Params("/", form=form), message)
    assert changes == {"tag": "u", "properties": {"a": "9", "c": "3"}, "without": ["key", "b"]}
