"""The consumer. Blocking face; ``aio.py`` has the one to await.

Quality of service, per consumer:

- ``qos=0``, at most once: messages are acknowledged before they are handed out.
- ``qos=1``, at least once: acknowledge after the effect. What is not acknowledged comes back, flagged ``redelivered``.
- ``qos=2``, exactly one effect: needs the help of the database that holds the effect. The handler writes
  ``message.message_id`` under a unique key *in the same transaction* as its effect; ``seen=`` names a function that looks
  it up. What was seen is acknowledged and passed over. The unique key, not the look-up, is what makes it exact: a lease
  may end while its first consumer still works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from escrowmq.client.consuming.consumption import DEFAULT_BATCH, Consumption, delay_us
from escrowmq.client.consuming.delivery import Content, Rows
from escrowmq.client.lanes.lanes import ThreadLane, Waiter
from escrowmq.errors import Code, EscrowError, error
from escrowmq.model import Act


class Received(Content):
    """A received message. Acknowledge it with :meth:`ack` once its effect is durable."""

    __slots__ = ("_consumption",)

    def __init__(self, rows: Rows, row: int, consumption: Consumption[ThreadLane]) -> None:
        super().__init__(rows, row)
        self._consumption = consumption

    def ack(self) -> None:
        """Done with it. Sent in the background, together with others; :meth:`Consumer.flush` waits for them."""
        self._consumption.act(self._rows, self._row, Act.ACK, 0, None, None)

    def nack(self, delay: float | None = None, cause: str | None = None) -> None:
        """Deliver it again in ``delay`` seconds (None: the group's back-off); ``cause`` is kept with a dead letter."""
        self._consumption.act(self._rows, self._row, Act.NACK, delay_us(delay), cause, None)

    def extend(self, seconds: float) -> None:
        """Keep its lease for ``seconds`` from now; waits for the broker. Raises LEASE_LOST if it is too late."""
        waiter = Waiter()
        self._consumption.act(self._rows, self._row, Act.EXTEND, delay_us(seconds), None, waiter)
        waiter.wait(self._consumption.timeout)


class ReceivedBatch:
    """Received messages as columns: ``arrow`` is a record batch of schema DELIVERY. Iterating gives its messages."""

    __slots__ = ("_consumption", "_rows")

    def __init__(self, rows: Rows, consumption: Consumption[ThreadLane]) -> None:
        self._rows = rows
        self._consumption = consumption

    @property
    def arrow(self) -> pa.RecordBatch:
        """The columns."""
        return self._rows.batch

    def __len__(self) -> int:
        return int(self._rows.batch.num_rows)

    def __iter__(self) -> Iterator[Received]:
        return (Received(self._rows, row, self._consumption) for row in range(len(self)))

    def __getitem__(self, row: int) -> Received:
        return Received(self._rows, range(len(self))[row], self._consumption)

    def ack(self, *, wait: bool = True) -> None:
        """Done with all of them; durable when this returns (with ``wait=False``: sent in the background).

        Raises LEASE_LOST if some of them are being delivered again, Unknown if that cannot be told: the connection was
        lost meanwhile, and the lease has ended, by this acknowledgement or by time.
        """
        self._act(Act.ACK, 0, None, wait)

    def nack(self, delay: float | None = None, cause: str | None = None, *, wait: bool = True) -> None:
        """Deliver all of them again in ``delay`` seconds (None: the group's back-off)."""
        self._act(Act.NACK, delay_us(delay), cause, wait)

    def extend(self, seconds: float) -> None:
        """Keep their leases for ``seconds`` from now. Raises LEASE_LOST if some have ended."""
        self._act(Act.EXTEND, delay_us(seconds), None, True)

    def _act(self, act: Act, delay: int, cause: str | None, wait: bool) -> None:
        if not len(self):
            return
        waiter = Waiter() if wait else None
        self._consumption.act_on_all(self._rows, act, delay, cause, waiter)
        if waiter is not None:
            answer, resent = waiter.wait(self._consumption.timeout)
            if (code := self._consumption.first_refusal(answer, resent)) is not None:
                raise error(code)


class Consumer:
    """Receives the messages of a consumer group. Made by :meth:`Bus.consumer`. Iterate it, or its :meth:`batches`.

    Thread-safe: several threads may iterate one consumer and share its messages.
    """

    def __init__(self, consumption: Consumption[ThreadLane], arrival: threading.Condition) -> None:
        self._consumption = consumption
        self._arrival = arrival
        self._reading = threading.Lock()
        self._current: tuple[Rows, int] | None = None  # what iteration is in the middle of, and its next row

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._consumption.group

    @property
    def refused(self) -> int:
        """Acknowledgements that came too late; those messages are delivered again."""
        return self._consumption.refused

    def __iter__(self) -> Iterator[Received]:
        return self.messages()

    def messages(self, *, idle_timeout: float | None = None) -> Iterator[Received]:
        """One message after the other, until :meth:`close`, or until none came for ``idle_timeout`` seconds."""
        while (message := self._next_message(idle_timeout)) is not None:
            yield message

    def batches(
        self, max_messages: int = DEFAULT_BATCH, *, idle_timeout: float | None = None
    ) -> Iterator[ReceivedBatch]:
        """Batches of up to ``max_messages``, until :meth:`close`, or until none came for ``idle_timeout`` seconds."""
        while (rows := self._next_rows(max_messages, idle_timeout)) is not None:
            yield ReceivedBatch(rows, self._consumption)

    def receive(self, max_messages: int = 1, wait: float = 0.0) -> list[Received]:
        """Ask once: what is there, or comes within ``wait`` seconds. For tests and scripts; iteration is faster."""
        taken = self._take(max_messages)
        found: list[Received] = []
        if taken is not None:
            found.extend(ReceivedBatch(taken, self._consumption))
        else:
            for number, future in self._consumption.receive_now(max_messages, wait):
                rows = self._screened(Rows(number, future.result(wait + self._consumption.timeout)))
                if rows is not None:
                    found.extend(ReceivedBatch(rows, self._consumption))
        return found

    def flush(self, timeout: float | None = None) -> int:
        """Wait until all acknowledgements are durable or refused; how many were refused in this consumer's life.

        Raises Unknown(TIMED_OUT) if that takes longer than ``timeout`` seconds.
        """
        patience = self._consumption.timeout if timeout is None else timeout
        if not all(lane.drain(patience) for lane in self._consumption.lanes):
            raise error(Code.TIMED_OUT, "acknowledgements are still on their way")
        return self.refused

    def close(self) -> None:
        """Send the acks that wait, give back what was not handed out, end iteration.

        What was handed out and not acknowledged comes back when its lease ends.
        """
        with self._reading:
            current, self._current = self._current, None
            if current is not None:
                rows, row = current
                self._consumption.give_back(rows.number, rows.batch.slice(row))
            self._consumption.close()
        with self._arrival:
            self._arrival.notify_all()

    def _next_message(self, idle_timeout: float | None) -> Received | None:
        while True:
            with self._reading:
                if self._current is not None and not self._consumption.closed:
                    rows, row = self._current
                    last = row + 1 >= rows.batch.num_rows
                    self._current = None if last else (rows, row + 1)
                    return Received(rows, row, self._consumption)
            fresh = self._next_rows(DEFAULT_BATCH, idle_timeout)
            if fresh is None:
                return None
            with self._reading:
                if self._current is None:
                    self._current = (fresh, 0)
                else:
                    self._consumption.fetcher.put_back(fresh.number, fresh.batch)

    def _next_rows(self, max_messages: int, idle_timeout: float | None) -> Rows | None:
        deadline = None if idle_timeout is None else time.monotonic() + idle_timeout
        if not self._consumption.closed:
            self._consumption.fetcher.start(max_messages)
        while not self._consumption.closed:
            if (rows := self._take(max_messages)) is not None:
                return rows
            with self._arrival:
                if self._consumption.fetcher.has_something() or self._consumption.closed:
                    continue
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._arrival.wait(left)
        return None

    def _take(self, max_messages: int) -> Rows | None:
        """Up to ``max_messages`` of what has arrived; with qos 0 and 2, acknowledged or screened."""
        taken = self._consumption.fetcher.take()
        if taken is None:
            return None
        number, batch = taken
        if batch.num_rows > max_messages:
            self._consumption.fetcher.put_back(number, batch.slice(max_messages))
            batch = batch.slice(0, max_messages)
        return self._screened(Rows(number, batch))

    def _screened(self, rows: Rows) -> Rows | None:
        consumption = self._consumption
        if not rows.batch.num_rows:
            return None
        if consumption.qos == 0:
            try:
                ReceivedBatch(rows, consumption).ack()
            except EscrowError as problem:
                if problem.code not in (Code.LEASE_LOST, Code.DISCONNECTED):
                    raise
                return None  # another consumer has them: at most once
        elif consumption.qos == 2:
            unseen = consumption.unseen(rows, lambda rows, row: Received(rows, row, consumption))
            for row in np.flatnonzero(~unseen).tolist():
                consumption.act(rows, row, Act.ACK, 0, None, None)
            if not unseen.all():
                rows = Rows(rows.number, rows.batch.filter(pa.array(unseen)))
        return rows if rows.batch.num_rows else None
