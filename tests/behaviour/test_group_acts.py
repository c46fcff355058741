"""What persons did to places of consumer groups, as `%group-acts` tells it: of an embedded broker, a served one, and a
folder at rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import escrowmq as mq
from escrowmq.errors import Code
from escrowmq.schemas import GROUP_ACT_VIEW

Own = Callable[..., Any]


def rows(bus: mq.Bus, **request: Any) -> list[dict[str, Any]]:
    return list(bus.admin.read("%group-acts", **request).read_all().to_pylist())


def told(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["group"], row["topic"], row["queue"], row["offset"], row["act"]) for row in found]


def fail(bus: mq.Bus, group: str, count: int) -> None:
    with bus.consumer(group, "orders", max_attempts=1, retry_backoff=0.001) as consumer:
        for message in consumer.receive(count, wait=60.0):
            message.nack(0.0, "poison")
        consumer.flush()


def test_acts_are_told_in_their_order_with_what_a_group_gets_instead(own: Own) -> None:
    broker = own()
    with broker.connect() as bus:
        bus.admin.create_topic("orders", 1)
        bus.producer("shop").send_batch([mq.Message("orders", b"%d" % n, key=f"k{n}") for n in range(4)]).check()
        fail(bus, "cart", 4)
        fail(bus, "books", 1)
        admin = bus.admin
        letters = list(admin.dead_letters("cart"))
        assert admin.settle_dead_letters("cart", letters[:1], "discard") == [Code.OK]
        edit = admin.edit_dead_letter("cart", letters[1], body=b"cured", key="other", properties={"a": "1"})
        assert admin.settle_dead_letters("cart", letters[2:3], "retry") == [Code.OK]
        admin.settle_dead_letters("books", list(admin.dead_letters("books")), "discard")
        admin.reset_group("cart", "earliest")
        found = rows(bus)
        assert told(found) == [
            ("cart", "orders", 0, 0, "discard"),
            ("cart", "orders", 0, 1, "edit"),
            ("cart", "orders", 0, 2, "retry"),
            ("books", "orders", 0, 0, "discard"),
            ("cart", "orders", 0, 0, "reset"),
        ]
        edited = found[1]
        assert (edited["body"], edited["key"], edited["tag"]) == (b"cured", "other", None)
        assert (edited["message_id"].hex(), edited["edited_from"]) == (edit["message_id"], letters[1]["message_id"])
        assert dict(edited["properties"]) == {"a": "1", "ESCROWMQ_EDITED_FROM": letters[1]["message_id"]}
        content = ("message_id", "edited_from", "key", "tag", "properties", "body")
        assert all(row[name] is None for row in found if row["act"] != "edit" for name in content)
        assert [row["acted_us"] for row in found] == sorted(row["acted_us"] for row in found)
        assert rows(bus, group="books") == found[3:4]
        assert rows(bus, start=edited["position"], end=found[3]["position"]) == found[1:3]
        names = ["edited_from", "position", "act"]
        assert rows(bus, columns=names) == [{name: row[name] for name in names} for row in found]
        assert rows(bus, columns=["offset", "damaged"])[0] == {"offset": 0, "damaged": None}
        with bus.reader("%group-acts", of_group="cart") as reader:
            (batch,) = reader.batches(idle_timeout=0)
            assert batch.arrow.schema == GROUP_ACT_VIEW
            assert [(m.tag, m.key) for m in batch][:2] == [("discard", "orders/0/0"), ("edit", "orders/0/1")]
            assert (batch[1].body, batch[1].properties["edited_from"]) == (b"cured", letters[1]["message_id"])
        with pytest.raises(mq.Rejected, match="neither tags nor keys"):
            rows(bus, key="k1")
        with pytest.raises(mq.Rejected, match="has no consumer groups"):
            bus.admin.read("%op", group="cart")
    broker.stop()
    with mq.connect(f"file:{broker.folder}", read_only=True) as offline:
        assert rows(offline) == found


def test_a_group_that_was_deleted_lends_its_acts_to_no_other_of_its_name(own: Own) -> None:
    with own().connect() as bus:
        bus.admin.create_topic("orders", 1)
        bus.producer("shop").send("orders", b"one")
        fail(bus, "cart", 1)
        bus.admin.discard_dead_letters("cart")
        bus.admin.delete_group("cart", force=True)
        assert told(rows(bus)) == [("cart", "orders", 0, 0, "discard")]
        fail(bus, "cart", 1)
        assert told(rows(bus)) == [(None, "orders", 0, 0, "discard")]
        assert rows(bus, group="cart") == []


def test_acts_are_followed(own: Own) -> None:
    with own().connect() as bus:
        bus.admin.create_topic("orders", 1)
        bus.producer("shop").send("orders", b"one")
        fail(bus, "cart", 1)
        with bus.reader("%group-acts", start="latest") as reader:
            bus.admin.retry_dead_letters("cart")
            batch = next(iter(reader.batches(idle_timeout=60)))
            assert [message.tag for message in batch] == ["retry"]
