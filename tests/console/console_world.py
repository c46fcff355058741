"""A broker with something of everything in it, and with names, keys, bodies and causes that mean harm to a page."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import escrowmq as mq
from escrowmq.broker.serving.serve import serve as serve_broker
from escrowmq.settings import BrokerSettings

HARM = "<script>document.title='harmed'</script>"
HARMS = (
    HARM,
    '"><img src=x onerror="document.title=\'harmed\'">',
    "' onmouseover='document.title=\"harmed\"' x='",
    "{{ 7 * 7 }}{% raw %}",
    "\u202etxt.exe\u0000\u0007\r\nSet-Cookie: harmed=1",
    "</textarea></title></style><svg onload=document.title='harmed'>",
)
"""Texts that a page must show as they are."""
LONG = "n" * 126 + "x"
"""The longest name."""

QUICK: dict[str, Any] = {
    "transaction_timeout": 600.0,
    "check_interval": 600.0,
    "retry_backoff": 0.01,
    "retry_backoff_max": 0.01,
    "lease_seconds": 600.0,
}


@contextmanager
def served_broker(folder: Path, **settings: Any) -> Iterator[str]:
    """The URL of a broker on a thread of this process."""
    ready: list[str] = []
    started, stop = threading.Event(), threading.Event()

    def announce(told: dict[str, Any]) -> None:
        ready.append(str(told["url"]))
        started.set()

    def work() -> None:
        chosen = BrokerSettings(**{**QUICK, **settings})
        serve_broker(folder, listen="127.0.0.1:0", settings=chosen, announce=announce, stop=stop)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield ready[0]
    finally:
        stop.set()
        thread.join()


def fail_all(bus: mq.Bus, group: str, topic: str, causes: dict[str, str], count: int) -> None:
    """Have ``group`` receive ``count`` messages of ``topic`` and give each up at once, for the cause of its key."""
    consumer, given_up = bus.consumer(group, [topic], max_attempts=1), 0
    for message in consumer.messages(idle_timeout=60):
        message.nack(cause=causes.get((message.key or "").partition("-")[0], HARM))
        given_up += 1
        if given_up == count:
            break
    consumer.close()
    assert given_up == count, f"{group} got {given_up} messages of {topic}"


def fill(bus: mq.Bus) -> None:
    """Something for every page."""
    shop = bus.producer("shop")
    for number in range(60):
        order = {"order": number, "price": 12.50, "currency": "EUR", "lines": [{"sku": "book", "count": 1}]}
        shop.send(
            "orders",
            json.dumps(order).encode(),
            key=f"order-{number}",
            tag="placed",
            properties={"trace": f"{number:032x}"},
        )
    shop.send(LONG, b"\x00\x01\x02\xff" * 40, key=LONG)
    for harm in HARMS:
        text = harm.replace("\x00", "")
        shop.send("hostile", text.encode(), key=text, tag="t", properties={text: text})
    held = bus.producer("pay<ments".replace("<", "-"), unasked=True)
    for number in range(3):
        transaction = held.transaction()
        transaction.send("payments", b'{"amount": 5}', key=f"payment-{number}")
        if number == 0:
            transaction.commit()
        elif number == 1:
            transaction.rollback()
    done = bus.consumer("books", ["orders"])
    for number, message in enumerate(done.messages(idle_timeout=60), 1):
        message.ack()
        if number == 60:
            break
    done.close()
