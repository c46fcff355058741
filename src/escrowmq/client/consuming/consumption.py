"""The shared implementation of blocking and asyncio consumers: subscription, prefetch, acknowledgements."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.client.consuming.delivery import Rows
from escrowmq.client.consuming.fetching import NO_ROWS, Fetcher
from escrowmq.client.consuming.membership import Membership
from escrowmq.client.consuming.settling import SettlingCodec, lease_runs, settling_batch
from escrowmq.client.lanes.waiting import Waiting
from escrowmq.client.links.patience import patient_action
from escrowmq.client.links.router import Router
from escrowmq.errors import Code, EscrowError, error
from escrowmq.model import Act
from escrowmq.wire import Exchange
from escrowmq.wire.actions import groups
from escrowmq.wire.exchanges import ReceiveOptions

WITHDRAW_SECONDS = 2.0
"""How long closing waits for the broker to withdraw receives."""


class Consumption:
    """One consumer's machinery; :class:`Consumer` and :class:`AsyncConsumer` are its two faces."""

    def __init__(
        self,
        router: Router,
        waiting: Waiting,
        request: groups.Subscribe,
        lease: float | None,
        prefetch: int,
        max_bytes: int,
        qos: int,
        seen: Callable[[Any], bool] | None,
        timeout: float,
        instance: str | None,
    ) -> None:
        self._request = request
        self.group = group = request["group"]
        self.qos, self.seen, self.timeout = qos, seen, timeout
        self.router = router
        self.waiting = waiting
        self.arrival = waiting.signal()
        self._options: ReceiveOptions = {
            "group": group,
            "member": random.getrandbits(62),
            "max_bytes": max_bytes,
            "lease_ms": None if lease is None else max(round(lease * 1000), 1),
        }
        links = router.links
        self._membership = None if instance is None else Membership(links, group, instance, timeout)
        self.fetcher = Fetcher(
            links, self._options, prefetch, waiting.timer, self.arrival.set, waiting.spawn, self._membership
        )
        self._codecs = [SettlingCodec() for _ in links]
        self.lanes = [
            waiting.lane(link, Exchange.SETTLE, codec, lambda: {"group": group}, timeout=timeout)
            for link, codec in zip(links, self._codecs, strict=True)
        ]
        self.closed = False

    def subscribe(self) -> None:
        """Make or join the group at every broker. Raises SUBSCRIPTION_MISMATCH, Unknown(TIMED_OUT) and so on."""
        deadline = time.monotonic() + self.timeout
        self.router.every(lambda link: patient_action(link, groups.SUBSCRIBE(self._request), deadline))
        if self._membership is not None:
            for number in range(len(self.router)):
                self._membership.join(number, resume=False)

    @property
    def refused(self) -> int:
        """Acts that came too late: their lease had ended."""
        return sum(codec.refused for codec in self._codecs)

    def act(self, rows: Rows, row: int, act: Act, delay_us: int, cause: str | None, waiter: Any = None) -> None:
        """Settle one message, coalesced with others; ``waiter`` gets its answer."""
        handle = rows.handle(row)
        if self._membership is not None and act != Act.EXTEND:
            self._membership.acted(rows.number, handle[0])
        self.lanes[rows.number].add((*handle, act, delay_us, cause), waiter, 64)

    async def extend(self, rows: Rows, row: int, delay_us: int) -> None:
        """Keep the lease of one message; waits for the broker."""
        waiter = self.lanes[rows.number].waiter()
        self.act(rows, row, Act.EXTEND, delay_us, None, waiter)
        await waiter

    async def act_on_all(self, rows: Rows, act: Act, delay_us: int, cause: str | None, wait: bool) -> None:
        """Settle a whole batch; with ``wait``, raises the first refusal."""
        if not rows.count:
            return
        lane, batch = self.lanes[rows.number], self._settling(rows.number, rows.batch, act, delay_us, cause)
        if not wait:
            lane.add_batch(batch, None)
            return
        answer, resent = await lane.call_batch(batch)
        codes = SettlingCodec.codes(answer, resent)
        if codes.any():
            raise error(Code(int(codes[np.flatnonzero(codes)[0]])))

    def receive_now(self, max_messages: int, wait: float) -> list[tuple[int, Future[pa.RecordBatch]]]:
        """Start one receive at every broker; their futures with the brokers' numbers. Blocks."""
        options: ReceiveOptions = {**self._options, "max_messages": max_messages, "wait_ms": max(round(wait * 1000), 0)}
        asked, membership = [], self._membership
        for number, link in enumerate(self.router.links):
            if membership is not None:
                if membership.has_lost(number):
                    membership.join(number, resume=True)
                options = {**options, **membership.options(number)}
            future = link.exchange(Exchange.RECEIVE, NO_ROWS, options)
            if membership is not None:
                future.add_done_callback(partial(membership.answered, number))
            asked.append((number, future))
        return asked

    def give_back(self, number: int, batch: pa.RecordBatch) -> None:
        """Return messages that were not handed out: they are delivered again at once, and their attempt is not counted."""
        if batch.num_rows:
            with suppress(EscrowError):  # their lease will end
                self.lanes[number].add_batch(self._settling(number, batch, Act.RELEASE, 0, None), None)

    def _settling(
        self, number: int, batch: pa.RecordBatch, act: Act, delay_us: int, cause: str | None
    ) -> pa.RecordBatch:
        if self._membership is not None and act != Act.EXTEND:
            self._membership.acted_on_all(number, batch)
        return settling_batch(*lease_runs(batch), act, delay_us, cause)

    def close(self) -> None:
        """Stop receiving, give back what was not handed out, send the acks that wait (at most ``timeout`` seconds)."""
        for number, batch in self.fetcher.close(WITHDRAW_SECONDS):
            self.give_back(number, batch)
        for lane in self.lanes:
            lane.drain(self.timeout)
            lane.close()
