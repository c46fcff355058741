"""What waits, by its cause."""

from __future__ import annotations

from pathlib import Path

import escrowmq as mq
from escrowmq.overview import status, waiting


def test_a_dead_letter_waits_for_a_person(tmp_path: Path) -> None:
    with mq.connect(f"file:{tmp_path / 'data'}", default_queues=1) as bus:
        assert waiting(bus) == []
        bus.producer("shop").send("orders", b"one", message_id="m")
        with bus.consumer("cart", "orders", max_attempts=1) as consumer:
            consumer.receive(1, wait=5.0)[0].nack(cause="ValueError: order 17 is bad")
            consumer.flush()
        (cause,) = waiting(bus)
        assert (cause.kind, cause.of, cause.count, cause.needs_person) == ("dead", "cart", 1, True)
        assert cause.samples[0]["place"] == "orders/0/0"
        now = status(bus)
        assert (now.needs_person, [one.kind for one in now.waiting]) == (True, ["dead"])
