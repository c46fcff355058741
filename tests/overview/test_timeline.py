"""What became of a message, over brokers and databases: every kind of event is produced for real, with its sentence and the reason why it waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import escrowmq as mq
from escrowmq import outbox
from escrowmq.overview import Story, timeline

Open = Callable[..., mq.Bus]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    buses: list[mq.Bus] = []

    def open_bus(name: str = "data", **settings: Any) -> mq.Bus:
        given = {"default_queues": 1, "retry_backoff": 600.0, "retry_backoff_max": 600.0, **settings}
        buses.append(mq.connect(f"file:{tmp_path / name}", **given))
        return buses[-1]

    yield open_bus
    for bus in buses:
        bus.close()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    outbox.migrate(engine)
    yield engine
    engine.dispose()


def the_one(bus: mq.Bus, wanted: str, *engines: sa.Engine) -> Story:
    found = timeline(bus, wanted, engines)
    json.dumps(found.to_json())
    (story,) = found.stories
    return story


def words(story: Story) -> list[str]:
    return [event.event for event in story.events]


def test_a_plain_message_that_nobody_consumes(opened: Open) -> None:
    bus = opened()
    bus.producer("shop").send("orders", b"one", key="k", tag="t", properties={"a": "b"}, message_id="m")
    story = the_one(bus, "m")
    assert words(story) == ["stored", "placed"]
    assert (story.topic, story.key, story.tag, story.body, story.properties) == ("orders", "k", "t", "one", {"a": "b"})
    assert (story.waits, story.why) == (False, "It does not wait: no consumer group consumes topic orders.")
    assert the_one(bus, "k") == the_one(bus, "orders/0/0") == story
