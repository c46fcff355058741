"""What the sync and the async consumer share: the subscription, receives ahead, acknowledgements."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.client.consuming.delivery import Content, Rows
from escrowmq.client.consuming.fetching import Fetcher
from escrowmq.client.consuming.membership import Membership
from escrowmq.client.consuming.settling import SettlingCodec, lease_runs, settling_batch
from escrowmq.client.lanes.alarm import Alarm
from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.parcel import Codec
from escrowmq.client.links.router import Router
from escrowmq.client.producing.outgoing import check_name
from escrowmq.client.producing.session import patient_action
from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.model import Act
from escrowmq.wire import Exchange, ExchangeOptions, Link
from escrowmq.wire.actions import groups
from escrowmq.wire.exchanges import ReceiveOptions

LaneT = TypeVar("LaneT", bound=Lane)
DEFAULT_BATCH = 1000
WITHDRAW_SECONDS = 2.0
"""How long closing waits for the broker to withdraw receives."""
Seen = Callable[[Any], bool]


class Consumption(Generic[LaneT]):
    """One consumer's machinery; :class:`Consumer` and :class:`AsyncConsumer` are its two faces."""

    def __init__(
        self,
        router: Router,
        alarm: Alarm,
        make_lane: Callable[[Link, Exchange, Codec, Callable[[], ExchangeOptions], dict[str, Any]], LaneT],
        group: str,
        subscription: groups.Subscribe,
        *,
        lease: float | None,
        prefetch: int,
        max_bytes: int,
        qos: int,
        seen: Seen | None,
        timeout: float,
        arrived: Callable[[], None],
        spawn: Callable[[Callable[[], None]], None] = lambda call: call(),
        instance: str | None = None,
    ) -> None:
        self.group, self.qos, self.seen, self.timeout = group, qos, seen, timeout
        self.router = router
        self._request = subscription
        options: ReceiveOptions = {
            "group": group,
            "member": random.getrandbits(62),
            "max_bytes": max_bytes,
            "lease_ms": None if lease is None else max(round(lease * 1000), 1),
        }
        self.options = options
        self.membership = None if instance is None else Membership(router.links, group, instance, timeout)
        self.fetcher = Fetcher(router.links, options, prefetch, alarm, arrived, spawn, self.membership)
        self.codecs = [SettlingCodec() for _ in router.links]
        self.lanes = [
            make_lane(link, Exchange.SETTLE, codec, lambda: {"group": group}, {"timeout": timeout})
            for link, codec in zip(router.links, self.codecs, strict=True)
        ]
        self.closed = False

    def subscribe(self) -> None:
        """Make or join the group at every broker. Raises SUBSCRIPTION_MISMATCH, Unknown(TIMED_OUT) and so on."""
        deadline = time.monotonic() + self.timeout
        self.router.every(lambda link: patient_action(link, groups.SUBSCRIBE(self._request), deadline))
        if self.membership is not None:
            self.membership.join()

    @property
    def refused(self) -> int:
        """Acts that came too late: their lease had ended."""
        return sum(codec.refused for codec in self.codecs)

    def act(self, rows: Rows, row: int, act: Act, delay_us: int, cause: str | None, waiter: Any) -> None:
        """Settle one message, coalesced with others."""
        leases, offsets = rows.list("lease"), rows.list("offset")
        if self.membership is not None and act != Act.EXTEND:
            self.membership.acted(rows.number, leases[row])
        entry = (leases[row], offsets[row], rows.before(row), act, delay_us, cause)
        self.lanes[rows.number].add(entry, waiter, 64)

    def act_on_all(self, rows: Rows, act: Act, delay_us: int, cause: str | None, waiter: Any) -> None:
        """Settle a whole batch; ``waiter`` gets the whole answer."""
        if self.membership is not None and act != Act.EXTEND:
            self.membership.acted_on_all(rows.number, rows.batch)
        leases, starts, counts = lease_runs(rows.batch)
        batch = settling_batch(leases, starts, counts, act, delay_us, cause)
        self.lanes[rows.number].add_batch(batch, waiter)

    @staticmethod
    def first_refusal(answer: pa.RecordBatch, resent: bool) -> Code | None:
        """The first code of a batch's answer that is not OK."""
        codes = SettlingCodec.told(answer, resent)
        bad = np.flatnonzero(codes)
        return Code(int(codes[bad[0]])) if len(bad) else None

    def unseen(self, rows: Rows, make: Callable[[Rows, int], Content]) -> npt.NDArray[np.bool_]:
        """With qos=2: which rows the consumer's own database has no mark of."""
        assert self.seen is not None
        return np.array([not self.seen(make(rows, row)) for row in range(rows.batch.num_rows)], np.bool_)

    def receive_now(self, max_messages: int, wait: float) -> list[Any]:
        """Start one receive at every broker; their futures with the brokers' numbers."""
        options: ReceiveOptions = {**self.options, "max_messages": max_messages, "wait_ms": max(round(wait * 1000), 0)}
        empty = pa.RecordBatch.from_pylist([], schema=pa.schema([]))
        if self.membership is None:
            links = enumerate(self.router.links)
            return [(number, link.exchange(Exchange.RECEIVE, empty, options)) for number, link in links]
        asked = []
        for number, link in enumerate(self.router.links):
            if self.membership.has_lost(number):
                self.membership.resume(number)
            named: ReceiveOptions = {**options, **self.membership.options(number)}
            future = link.exchange(Exchange.RECEIVE, empty, named)
            future.add_done_callback(partial(self._came_now, number))
            asked.append((number, future))
        return asked

    def _came_now(self, number: int, done: Future[pa.RecordBatch]) -> None:
        assert self.membership is not None
        if done.cancelled() or done.exception() is not None:
            self.membership.lose(number)
        else:
            self.membership.came(number, done.result())

    def give_back(self, number: int, batch: pa.RecordBatch) -> None:
        """Return messages that nobody was handed: they are delivered again at once, and their attempt is not counted."""
        leases, starts, counts = lease_runs(batch)
        if len(leases):
            try:
                settle = settling_batch(leases, starts, counts, Act.RELEASE, 0, None)
                if self.membership is not None:
                    self.membership.acted_on_all(number, batch)
                self.lanes[number].add_batch(settle, None)
            except EscrowError:
                pass  # their lease will end

    def close(self) -> None:
        """Stop receiving, give back what was not handed out, send the acks that wait (at most ``timeout`` seconds)."""
        if self.closed:
            return
        self.closed = True
        for number, batch in self.fetcher.close(WITHDRAW_SECONDS):
            self.give_back(number, batch)
        for lane in self.lanes:
            lane.drain(self.timeout)
            lane.close()


def subscription(
    group: str,
    topics: str | Sequence[str],
    tags: str | Sequence[str] | None,
    ordered: bool,
    start: str | datetime,
    max_attempts: int | None,
    retry_backoff: float | None,
    retry_backoff_max: float | None,
    in_doubt: str = "redeliver",
) -> groups.Subscribe:
    """The request ``groups.subscribe``; raises Misuse(BAD_ARGUMENT), BAD_GROUP_NAME, BAD_TOPIC_NAME."""
    check_name(group, Code.BAD_GROUP_NAME)
    names = [topics] if isinstance(topics, str) else list(topics)
    if not names:
        raise Misuse(Code.BAD_ARGUMENT, "a consumer needs a topic")
    for name in names:
        check_name(name, Code.BAD_TOPIC_NAME)
    request: groups.Subscribe = {"group": group, "topics": names, "ordered": bool(ordered), "start": _start(start)}
    if wanted := tag_list(tags):
        request["tags"] = wanted
    if max_attempts is not None:
        request["max_attempts"] = max_attempts
    if retry_backoff is not None:
        request["retry_backoff"] = retry_backoff
    if retry_backoff_max is not None:
        request["retry_backoff_max"] = retry_backoff_max
    if in_doubt == "hold":
        request["in_doubt"] = "hold"
    return request


def tag_list(tags: str | Sequence[str] | None) -> list[str]:
    """``"a || b"`` and ``["a", "b"]`` alike; ``"*"`` and None are all."""
    if tags is None or tags == "*":
        return []
    parts = [part.strip() for part in tags.split("||")] if isinstance(tags, str) else list(tags)
    if not all(isinstance(part, str) and part for part in parts):
        raise Misuse(Code.BAD_ARGUMENT, f"tags = {tags!r}", 'give "a||b" or ["a", "b"]')
    return parts


def _start(start: str | datetime) -> str:
    if isinstance(start, datetime):
        return str(round(start.timestamp() * 1_000_000))
    if start not in ("earliest", "latest"):
        raise Misuse(Code.BAD_ARGUMENT, f"start = {start!r}", '"earliest", "latest" or a datetime')
    return start


def check_options(
    qos: int,
    seen: Seen | None,
    prefetch: int,
    lease: float | None,
    instance: str | None = None,
    in_doubt: str = "redeliver",
) -> None:
    """Raise Misuse for options that make no sense."""
    if in_doubt not in ("redeliver", "hold"):
        raise Misuse(Code.BAD_ARGUMENT, f"in_doubt = {in_doubt!r}", '"redeliver" or "hold"')
    if (in_doubt == "hold") != (instance is not None):
        hint = "name this consumer: what is in doubt waits for the next process of that name"
        raise Misuse(Code.BAD_ARGUMENT, 'in_doubt="hold" and instance= go together', hint)
    if in_doubt == "hold" and lease is not None:
        raise Misuse(Code.BAD_ARGUMENT, 'with in_doubt="hold" leases do not end by time', "leave lease= out")
    if qos not in (0, 1, 2) or isinstance(qos, bool):
        raise Misuse(Code.BAD_ARGUMENT, f"qos = {qos!r}", "0 at most once, 1 at least once, 2 with seen=")
    if (qos == 2) != (seen is not None):
        hint = "give seen=FUNCTION: it looks the message's id up in the database that holds the effect"
        raise Misuse(Code.BAD_ARGUMENT, "qos=2 and seen= go together", hint)
    if not isinstance(prefetch, int) or not 1 <= prefetch <= 64:
        raise Misuse(Code.BAD_ARGUMENT, f"prefetch = {prefetch!r}", "receives ahead, 1 to 64")
    if lease is not None and not 0.001 <= lease < 1e6:
        raise Misuse(Code.BAD_ARGUMENT, f"lease = {lease!r}", "seconds, at least 0.001")


def delay_us(delay: float | None) -> int:
    """A NACK's delay in microseconds; None: the group's back-off (-1)."""
    if delay is None:
        return -1
    if isinstance(delay, bool) or not isinstance(delay, int | float) or not 0 <= delay < 1e9:
        raise Misuse(Code.BAD_ARGUMENT, f"delay = {delay!r}: seconds, 0 or more")
    return round(delay * 1_000_000)
