"""A large log is looked into once when it is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import escrowmq as mq
from escrowmq.broker.reads import lookups
from escrowmq.errors import Code, error


@pytest.fixture
def folder(tmp_path: Path) -> str:
    with mq.connect(f"file:{tmp_path}/data") as bus:
        bus.producer("g").send_batch([mq.Message("orders", b"%d" % n, key=f"k{n}") for n in range(20)])
    return f"file:{tmp_path}/data"


@pytest.mark.parametrize("rows", [20, 200])
def test_the_newest_message_is_looked_up_when_there_are_many(
    folder: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "WARM_ROWS", rows)
    looked: list[tuple[str, str]] = []
    real = lookups.view_message

    def view(engine: Any, topic: str, message_id: bytes, key: str) -> Any:
        found = real(engine, topic, message_id, key)
        looked.append((topic, found["key"]))
        return found

    monkeypatch.setattr(lookups, "view_message", view)
    with mq.connect(folder) as bus:
        assert [(topic, key[0]) for topic, key in looked] == ([("orders", "k")] if rows == 20 else [])
        found = bus.view_message("orders", "k7")
        assert found is not None
        assert found.body == b"7"


def test_what_cannot_be_looked_up_keeps_nobody_from_opening(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "WARM_ROWS", 1)
    asked: list[str] = []

    def view(engine: Any, topic: str, message_id: bytes, key: str) -> Any:
        asked.append(topic)
        raise error(Code.DAMAGED, "it lies there no more")

    with monkeypatch.context() as patch:
        patch.setattr(lookups, "view_message", view)
        bus = mq.connect(folder)
    with bus:
        assert asked == ["orders"]
        assert bus.view_message("orders", "k7") is not None
