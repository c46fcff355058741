"""What a test puts before a program of an example: its loop over a consumer's messages ends when nothing is left to do,
not when the machine stood still for as long as the program waits for a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from escrowmq.client.admin import Admin
from escrowmq.client.consuming.consumer import Consumer

_messages = Consumer.messages


def _is_done(consumer: Consumer) -> bool:
    consumer.flush(60.0)
    admin = Admin(consumer._consumption.router, 60.0)
    queues = [queue for group in admin.groups() for queue in group["queues"]]
    return not admin.transactions(state="undecided") and all(queue["floor"] >= queue["end"] for queue in queues)


def _patient(self: Consumer, *, idle_timeout: float) -> Iterator[Any]:
    while True:
        yield from _messages(self, idle_timeout=idle_timeout)
        if _is_done(self):
            return


Consumer.messages = _patient  # type: ignore[assignment, method-assign]
