"""Received messages and batches, and how they are acknowledged."""

from __future__ import annotations

import time

import pyarrow as pa

from escrowmq.client.consuming.consumption import Consumption
from escrowmq.client.consuming.delivery import Batch, Content, Rows
from escrowmq.client.consuming.options import cause_text, delay_us
from escrowmq.client.lanes.blocking import at_once, begun, blocking
from escrowmq.model import Act
from escrowmq.wire import DAMAGED_COLUMN


class LeasedRows(Rows):
    """Rows of a consumer, by whose machinery they are settled."""

    __slots__ = ("_changes", "_until", "apart", "consumption")

    def __init__(self, number: int, batch: pa.RecordBatch, consumption: Consumption) -> None:
        super().__init__(number, batch)
        self.consumption = consumption
        self.apart = consumption.order is not None
        self._until, self._changes = 0.0, -1  # what Order.valid_until returned, and when

    def withdrawn(self, row: int) -> bool:
        order = self.consumption.order
        if order is None:
            return False
        if self._changes != order.changes:
            self._changes = order.changes
            self._until = order.valid_until(self)
        return time.monotonic() >= self._until and order.is_withdrawn(self, row)


class ReceivedBase(Content):
    """The base of both received messages: the calls that never wait."""

    __slots__ = ()
    _rows: LeasedRows

    @property
    def withdrawn(self) -> bool:
        """Whether it is redelivered, in an ordered group, because an earlier message of its key failed or its lease
        ended since it was received. Iterating passes such messages over; who has a list of them looks here before each
        effect."""
        return self._rows.withdrawn(self._row)

    @property
    def damaged(self) -> str | None:
        """Of a row of a system view: where the log is damaged under it; what is lost of it is None. A message of a
        topic is never handed out so."""
        names = self._rows.batch.schema.names
        return self._rows.list(DAMAGED_COLUMN)[self._row] if DAMAGED_COLUMN in names else None

    def _ack(self) -> None:
        """Done with it. Sent in the background, together with others; :meth:`Consumer.flush` waits for them."""
        self._rows.consumption.act(self._rows, self._row, Act.ACK, 0, None)

    def _nack(self, delay: float | None = None, cause: str | None = None) -> None:
        """Deliver it again in ``delay`` seconds (None: the group's back-off); ``cause`` is kept with a dead letter."""
        self._rows.consumption.act(self._rows, self._row, Act.NACK, delay_us(delay), cause_text(cause))

    def _release(self) -> None:
        """Give it back: its handling has not begun. It is delivered again at once, and this attempt is not counted."""
        self._rows.consumption.act(self._rows, self._row, Act.RELEASE, 0, None)


class AsyncReceived(ReceivedBase):
    """As :class:`Received`, to await."""

    __slots__ = ()

    ack = at_once(ReceivedBase._ack)
    nack = at_once(ReceivedBase._nack)
    release = at_once(ReceivedBase._release)

    async def extend(self, seconds: float) -> None:
        """Keep its lease for ``seconds`` from now; waits for the broker. Raises LEASE_LOST if it is too late."""
        await self._rows.consumption.extend(self._rows, self._row, delay_us(seconds))


class Received(ReceivedBase):
    """A received message. Acknowledge it with :meth:`ack` once its effect is durable."""

    __slots__ = ()

    ack = ReceivedBase._ack  # once per message: not even a coroutine is made
    nack = ReceivedBase._nack
    release = ReceivedBase._release
    extend = blocking(AsyncReceived.extend)


class AsyncReceivedBatch(Batch[AsyncReceived]):
    """As :class:`ReceivedBatch`, to await."""

    __slots__ = ()
    _message = AsyncReceived
    _rows: LeasedRows

    @begun
    async def ack(self, *, wait: bool = True) -> None:
        """Done with all of them; durable when this returns (with ``wait=False``: sent in the background).

        Raises LEASE_LOST if some of them are being delivered again, Unknown if that is unknown: the connection was
        lost meanwhile, and the lease has ended, by this acknowledgement or by time.
        """
        await self._rows.consumption.act_on_all(self._rows, Act.ACK, 0, None, wait)

    @begun
    async def nack(self, delay: float | None = None, cause: str | None = None, *, wait: bool = True) -> None:
        """Deliver all of them again in ``delay`` seconds (None: the group's back-off)."""
        await self._rows.consumption.act_on_all(self._rows, Act.NACK, delay_us(delay), cause_text(cause), wait)

    @begun
    async def extend(self, seconds: float) -> None:
        """Keep their leases for ``seconds`` from now. Raises LEASE_LOST if some have ended."""
        await self._rows.consumption.act_on_all(self._rows, Act.EXTEND, delay_us(seconds), None, True)


class ReceivedBatch(Batch[Received]):
    """Received messages as columns: ``arrow`` is a record batch of schema DELIVERY. Iterating gives its messages, in an
    ordered group without those that were withdrawn meanwhile."""

    __slots__ = ()
    _message = Received

    ack = blocking(AsyncReceivedBatch.ack)
    nack = blocking(AsyncReceivedBatch.nack)
    extend = blocking(AsyncReceivedBatch.extend)
