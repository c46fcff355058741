"""Received messages and batches, and how they are acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import pyarrow as pa

from escrowmq.client.consuming.consumption import Consumption
from escrowmq.client.consuming.delivery import Content, Rows
from escrowmq.client.consuming.options import delay_us
from escrowmq.client.lanes.blocking import blocking
from escrowmq.model import Act


class ReceivedBase(Content):
    """What both faces of a received message share."""

    __slots__ = ("_consumption",)

    def __init__(self, rows: Rows, row: int, consumption: Consumption) -> None:
        self._rows = rows
        self._row = row
        self._consumption = consumption


class AsyncReceived(ReceivedBase):
    """As :class:`Received`, to await."""

    __slots__ = ()

    async def ack(self) -> None:
        """Done with it. Sent in the background, together with others; :meth:`Consumer.flush` waits for them."""
        self._consumption.act(self._rows, self._row, Act.ACK, 0, None)

    async def nack(self, delay: float | None = None, cause: str | None = None) -> None:
        """Deliver it again in ``delay`` seconds (None: the group's back-off); ``cause`` is kept with a dead letter."""
        self._consumption.act(self._rows, self._row, Act.NACK, delay_us(delay), cause)

    async def extend(self, seconds: float) -> None:
        """Keep its lease for ``seconds`` from now; waits for the broker. Raises LEASE_LOST if it is too late."""
        await self._consumption.extend(self._rows, self._row, delay_us(seconds))


class Received(ReceivedBase):
    """A received message. Acknowledge it with :meth:`ack` once its effect is durable."""

    __slots__ = ()

    ack = blocking(AsyncReceived.ack)
    nack = blocking(AsyncReceived.nack)
    extend = blocking(AsyncReceived.extend)


MessageT = TypeVar("MessageT", bound=ReceivedBase)


class ReceivedBatchBase(Generic[MessageT]):
    """What both faces of a received batch share. ``message`` is the class of its messages."""

    __slots__ = ("_consumption", "_message", "_rows")

    def __init__(self, rows: Rows, consumption: Consumption, message: type[MessageT]) -> None:
        self._rows = rows
        self._consumption = consumption
        self._message = message

    @property
    def arrow(self) -> pa.RecordBatch:
        """The columns."""
        return self._rows.batch

    def __len__(self) -> int:
        return self._rows.count

    def __iter__(self) -> Iterator[MessageT]:
        return (self._message(self._rows, row, self._consumption) for row in range(len(self)))

    def __getitem__(self, row: int) -> MessageT:
        return self._message(self._rows, range(len(self))[row], self._consumption)


class AsyncReceivedBatch(ReceivedBatchBase[AsyncReceived]):
    """As :class:`ReceivedBatch`, to await."""

    __slots__ = ()

    def __init__(self, rows: Rows, consumption: Consumption) -> None:
        super().__init__(rows, consumption, AsyncReceived)

    async def ack(self, *, wait: bool = True) -> None:
        """Done with all of them; durable when this returns (with ``wait=False``: sent in the background).

        Raises LEASE_LOST if some of them are being delivered again, Unknown if that cannot be told: the connection was
        lost meanwhile, and the lease has ended, by this acknowledgement or by time.
        """
        await self._consumption.act_on_all(self._rows, Act.ACK, 0, None, wait)

    async def nack(self, delay: float | None = None, cause: str | None = None, *, wait: bool = True) -> None:
        """Deliver all of them again in ``delay`` seconds (None: the group's back-off)."""
        await self._consumption.act_on_all(self._rows, Act.NACK, delay_us(delay), cause, wait)

    async def extend(self, seconds: float) -> None:
        """Keep their leases for ``seconds`` from now. Raises LEASE_LOST if some have ended."""
        await self._consumption.act_on_all(self._rows, Act.EXTEND, delay_us(seconds), None, True)


class ReceivedBatch(ReceivedBatchBase[Received]):
    """Received messages as columns: ``arrow`` is a record batch of schema DELIVERY. Iterating gives its messages."""

    __slots__ = ()

    def __init__(self, rows: Rows, consumption: Consumption) -> None:
        super().__init__(rows, consumption, Received)

    ack = blocking(AsyncReceivedBatch.ack)
    nack = blocking(AsyncReceivedBatch.nack)
    extend = blocking(AsyncReceivedBatch.extend)
