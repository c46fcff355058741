"""The bus: one connection to one or several brokers, from which producers, consumers and the admin come. It blocks."""

from __future__ import annotations

from collections.abc import Sequence

from escrowmq.client.admin import Admin
from escrowmq.client.aio import BusBase, BusCalls
from escrowmq.client.consuming.consumer import Consumer
from escrowmq.client.consuming.received import Received
from escrowmq.client.lanes.blocking import Closes, blocking
from escrowmq.client.lanes.waiting import Threads
from escrowmq.client.producing.producer import Producer
from escrowmq.client.reading.reader import Reader
from escrowmq.wire import Link


class Bus(BusBase[Producer, Consumer, Reader], Closes):
    """Made by :func:`escrowmq.connect`. A context manager; closing it closes all that came from it. Thread-safe."""

    def __init__(self, links: Sequence[Link], *, owns_links: bool = True) -> None:
        super().__init__(links, Threads(), Producer, Consumer, Reader, owns_links=owns_links)
        self.admin = Admin(self.router)

    consumer = blocking(BusCalls[Producer, Consumer, Reader, Received].consumer)
    reader = blocking(BusCalls[Producer, Consumer, Reader, Received].reader)
    view_message = blocking(BusCalls[Producer, Consumer, Reader, Received].view_message)
    close = blocking(BusCalls[Producer, Consumer, Reader, Received].close)
