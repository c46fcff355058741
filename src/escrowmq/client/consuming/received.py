"""Received messages and batches, and how they are acknowledged."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.client.consuming.consumption import Consumption
from escrowmq.client.consuming.delivery import Batch, Content, Rows
from escrowmq.client.consuming.options import cause_text, delay_us
from escrowmq.client.lanes.blocking import at_once, begun, blocking
from escrowmq.model import Act
from escrowmq.wire import DAMAGED_COLUMN


class LeasedRows(Rows):
    """Rows that a consumer received and settles."""

    __slots__ = ("_changes", "_until", "apart", "consumption")

    def __init__(self, number: int, batch: pa.RecordBatch, consumption: Consumption) -> None:
        super().__init__(number, batch)
        self.consumption = consumption
        self.apart = consumption.order is not None
        self._until, self._changes = 0.0, -1  # what Order.valid_until returned, and when

    def without(self, mask: npt.NDArray[np.bool_]) -> LeasedRows:
        """Return the rows that a mask does not select."""
        return LeasedRows(self.number, self.batch.filter(pa.array(~mask)), self.consumption)

    def drop_withdrawn(self) -> LeasedRows:
        """Return the rows that may be handed out, without withdrawn messages. Those are given back, because the broker
        may count them as delivered to this consumer although their lease is lost."""
        order = self.consumption.order
        if order is None or (withdrawn := order.find_withdrawn(self)) is None:
            return self
        self.consumption.give_back(self.number, self.batch.filter(pa.array(withdrawn)))
        return self.without(withdrawn)

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
        """Return whether the message must not be handled, in an ordered group: it is redelivered, because an earlier
        message of its key failed or its lease expired since it was received. Iteration skips such messages; with a list
        of messages, check before each effect."""
        return self._rows.withdrawn(self._row)

    @property
    def damaged(self) -> str | None:
        """Where the log is damaged under a row of a system view, whose lost values are None. A message of a topic is
        never damaged."""
        names = self._rows.batch.schema.names
        return self._rows.list(DAMAGED_COLUMN)[self._row] if DAMAGED_COLUMN in names else None

    def _ack(self) -> None:
        """Acknowledge the message. Sent in the background, together with others; :meth:`Consumer.flush` waits for
        them."""
        self._rows.consumption.act(self._rows, self._row, Act.ACK, 0, None)

    def _nack(self, delay: float | None = None, cause: str | None = None) -> None:
        """Give the message back as failed: it is redelivered in ``delay`` seconds (None: the group's back-off), or
        becomes a dead letter, with which ``cause`` is kept, after its last attempt."""
        self._rows.consumption.act(self._rows, self._row, Act.NACK, delay_us(delay), cause_text(cause))

    def _reject(self, cause: str | None = None) -> None:
        """Make the message a dead letter now, without further attempts; ``cause`` is kept with it."""
        self._rows.consumption.act(self._rows, self._row, Act.REJECT, 0, cause_text(cause))

    def _release(self) -> None:
        """Give the message back unhandled. It is redelivered at once, and this attempt is not counted."""
        self._rows.consumption.act(self._rows, self._row, Act.RELEASE, 0, None)


class AsyncReceived(ReceivedBase):
    """As :class:`Received`, to await."""

    __slots__ = ()

    ack = at_once(ReceivedBase._ack)
    nack = at_once(ReceivedBase._nack)
    reject = at_once(ReceivedBase._reject)
    release = at_once(ReceivedBase._release)

    async def extend(self, seconds: float) -> None:
        """Extend the message's lease to ``seconds`` from now. Returns when the broker has; raises LEASE_LOST if it has
        expired."""
        await self._rows.consumption.extend(self._rows, self._row, delay_us(seconds))


class Received(ReceivedBase):
    """A received message. Acknowledge it with :meth:`ack` once its effect is durable."""

    __slots__ = ()

    ack = ReceivedBase._ack  # once per message: not even a coroutine is made
    nack = ReceivedBase._nack
    reject = ReceivedBase._reject
    release = ReceivedBase._release
    extend = blocking(AsyncReceived.extend)


class AsyncReceivedBatch(Batch[AsyncReceived]):
    """As :class:`ReceivedBatch`, to await."""

    __slots__ = ()
    _message = AsyncReceived
    _rows: LeasedRows

    @begun
    async def ack(self, *, wait: bool = True) -> None:
        """Acknowledge all messages of the batch; durable when this returns (with ``wait=False``: sent in the
        background).

        Raises LEASE_LOST if some of them are redelivered, Unknown if the connection was lost meanwhile and the lease
        has ended, by this acknowledgement or by time.
        """
        await self._rows.consumption.act_on_all(self._rows, Act.ACK, 0, None, wait)

    @begun
    async def nack(self, delay: float | None = None, cause: str | None = None, *, wait: bool = True) -> None:
        """Give all messages of the batch back as failed: redelivered in ``delay`` seconds (None: the group's back-off).
        ``cause`` is kept with dead letters. ``wait`` and errors as for :meth:`ack`."""
        await self._rows.consumption.act_on_all(self._rows, Act.NACK, delay_us(delay), cause_text(cause), wait)

    @begun
    async def reject(self, cause: str | None = None, *, wait: bool = True) -> None:
        """Make all messages of the batch dead letters now, without further attempts. ``wait`` and errors as for
        :meth:`ack`."""
        await self._rows.consumption.act_on_all(self._rows, Act.REJECT, 0, cause_text(cause), wait)

    @begun
    async def extend(self, seconds: float) -> None:
        """Extend the leases of all messages of the batch to ``seconds`` from now. Raises LEASE_LOST if some have
        expired."""
        await self._rows.consumption.act_on_all(self._rows, Act.EXTEND, delay_us(seconds), None, True)


class ReceivedBatch(Batch[Received]):
    """Received messages as columns: ``arrow`` is a record batch of schema DELIVERY. Iteration gives its messages, in an
    ordered group without the withdrawn ones."""

    __slots__ = ()
    _message = Received

    ack = blocking(AsyncReceivedBatch.ack)
    nack = blocking(AsyncReceivedBatch.nack)
    reject = blocking(AsyncReceivedBatch.reject)
    extend = blocking(AsyncReceivedBatch.extend)
