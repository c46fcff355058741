"""A bug in the broker: what its caller is told, embedded and served, and that nothing else suffers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served

import escrowmq as mq
from escrowmq.broker.actions import HANDLERS
from escrowmq.errors import Code, Meaning, Rejected, Unknown, error
from escrowmq.ledger.commands import Prepare
from escrowmq.ledger.ledger import Ledger
from escrowmq.wire import frames
from escrowmq.wire.frames import Kind
from escrowmq.wire.frames.rows import encoder


@pytest.fixture(params=["embedded", "served"])
def bus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[mq.Bus]:
    if request.param == "embedded":
        with mq.connect(f"file:{tmp_path / 'data'}") as made:
            yield made
        return
    served = Served(tmp_path / "data")
    try:
        with mq.connect(f"escrow://127.0.0.1:{served.port}") as made:
            yield made
    finally:
        served.stop()


def test_an_unexpected_exception_in_deciding_is_a_code_of_its_own(bus: mq.Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may look applied or not: the caller hears that nobody knows, and may repeat it under the same id."""
    decide = Ledger.decide

    def failing(ledger: Ledger, command: Any, now_us: int) -> Any:
        if isinstance(command, Prepare):
            raise ZeroDivisionError("planted")
        return decide(ledger, command, now_us)

    producer = bus.producer("shop")
    producer.checker(lambda check: mq.ROLLBACK)
    with monkeypatch.context() as planted:
        planted.setattr(Ledger, "decide", failing)
        with pytest.raises(Unknown, match="planted") as raised:
            producer.prepare("orders", b"x")
        assert raised.value.code is Code.BROKER_FAILED
        assert raised.value.message_id is not None
        assert bus.producer("plain").send("orders", b"others go on").queue >= 0
    assert producer.prepare("orders", b"x", message_id=raised.value.message_id).transaction_id is not None


def test_an_unexpected_exception_in_an_action_is_a_code_of_its_own(
    bus: mq.Bus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> Any:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as planted:
        planted.setitem(HANDLERS, "topics.list", failing)
        with pytest.raises(Unknown, match="planted") as raised:
            bus.admin.topics()
    assert raised.value.code is Code.BROKER_FAILED
    assert "ZeroDivisionError" in caplog.text, "the traceback is in the broker's log"
    assert bus.admin.topics() == []


def test_an_unexpected_exception_before_a_request_is_submitted_is_a_code_of_its_own(
    bus: mq.Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise ZeroDivisionError("planted")

    producer = bus.producer("plain")
    producer.send("orders", b"first")
    with monkeypatch.context() as planted:
        for check in ("check_batch", "check_parcel"):
            planted.setattr(f"escrowmq.broker.calls.{check}", failing)
        with pytest.raises(Unknown, match="planted") as raised:
            producer.send("orders", b"x")
        with pytest.raises(Unknown, match="planted"):
            producer.send_batch([mq.Message("orders", b"y")])
    assert raised.value.code is Code.BROKER_FAILED
    assert producer.send("orders", b"x", message_id=raised.value.message_id).queue >= 0


def test_a_client_of_the_version_before_reads_it_as_a_bad_request_with_the_same_text() -> None:
    """Whole calls alone are answered so, never rows; a number that a client does not know is BAD_REQUEST to it."""
    raw = frames.refused(1, error(Code.BROKER_FAILED, "the broker failed on this request: planted"))
    told = frames.Frame(Kind.ERROR, 0, 1, memoryview(b""), memoryview(raw)[frames.HEADER_BYTES :])
    known = frames.read_refusal(told)
    assert (known.code, known.meaning) == (Code.BROKER_FAILED, Meaning.UNKNOWN)
    before = frames.read_refusal(told._replace(body=memoryview(encoder.encode((255, known.message, known.hint, None)))))
    assert (type(before), before.code) == (Rejected, Code.BAD_REQUEST)
    assert "planted" in before.message
