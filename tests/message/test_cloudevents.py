"""Events as messages and back, through a broker and through the outbox."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st

import escrowmq as mq
from escrowmq import cloudevents, outbox
from escrowmq.errors import Code, Misuse
from escrowmq.model import message_id
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.opening import open_target

TIME = datetime(2026, 11, 28, 5, 0, 0, 123456, UTC)
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
names = st.from_regex(r"[a-z][a-z0-9]{2,12}", fullmatch=True).filter(
    lambda name: name not in {"data", "source", "type", "time", "specversion", "subject", "partitionkey", "dataschema"}
)


class Got:
    """What a consumer gets of a message."""

    def __init__(self, message: mq.Message) -> None:
        self.topic, self.key, self.body = message.topic, message.key, message.body
        self.properties = dict(message.properties or {})
        assert isinstance(message.message_id, str)
        self.message_id, self.born = message_id(message.message_id), TIME


@given(
    texts, texts, texts, st.none() | texts, st.dictionaries(names, texts, max_size=3), st.none() | st.binary(min_size=1)
)
def test_attributes_and_data_survive(
    identity: str, source: str, kind: str, key: str | None, more: dict[str, str], data: bytes | None
) -> None:
    attributes: dict[str, Any] = {**more, "id": identity, "source": source, "type": kind, "time": TIME}
    attributes |= {"datacontenttype": "application/octet-stream"}
    if key is not None:
        attributes["partitionkey"] = key
    message = cloudevents.to_message("orders", CloudEvent(dict(attributes), data), delay=1.5)
    assert (message.key, message.message_id, message.delay) == (key, identity, 1.5)
    found = cloudevents.from_message(Got(message))
    assert found.get_attributes() == {**attributes, "specversion": "1.0"}
    body = found.get_data()
    assert (body.encode() if isinstance(body, str) else body) == data


def test_the_outbox_and_a_relay_carry_events(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    outbox.migrate(engine)
    event = CloudEvent({"id": "o-1", "source": "/shop", "type": "shop.paid", "partitionkey": "k"}, {"sum": 17})
    with engine.begin() as connection:
        outbox.send_tx(connection, cloudevents.to_message("orders", event))
    url = f"file:{tmp_path / 'data'}"
    with contextlib.closing(open_target(url)) as target:
        assert Relay(engine, target).drain(60)
    with mq.connect(url) as bus, bus.consumer("cart", ["orders"]) as consumer:
        message = next(iter(consumer))
        found = cloudevents.from_message(message)
        message.ack()
    assert found.get_attributes() == event.get_attributes()
    assert found.get_data() == {"sum": 17}
    engine.dispose()


def test_invalid_attributes_are_named() -> None:
    message = mq.Message("orders", b"", properties={"ce_specversion": "1.0", "ce_id": "1"}, message_id="1")
    with pytest.raises(Misuse, match="source") as raised:
        cloudevents.from_message(Got(message))
    assert raised.value.code is Code.BAD_ARGUMENT
