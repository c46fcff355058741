"""The asyncio API of the bus: :class:`AsyncBus` and its awaitable calls.

Everything belongs to the event loop on which :func:`escrowmq.aconnect` was awaited. Calls of many tasks share batches.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Generic, TypeVar

from escrowmq.client.admin import Admin
from escrowmq.client.async_admin import AsyncAdmin
from escrowmq.client.consuming.consumer import GRACE_SECONDS, AsyncConsumer, ConsumerBase
from escrowmq.client.consuming.consumption import Consumption
from escrowmq.client.consuming.options import ConsumerOptions, subscription
from escrowmq.client.consuming.received import AsyncReceived, ReceivedBase
from escrowmq.client.lanes.blocking import AsyncCloses
from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.request import Codec, Options
from escrowmq.client.lanes.waiting import Loop, Waiting
from escrowmq.client.links.presence import Missing
from escrowmq.client.links.router import Router
from escrowmq.client.producing.checker import AnyChecker
from escrowmq.client.producing.oneway import Confirm
from escrowmq.client.producing.placing import Absent, Choice, Failover
from escrowmq.client.producing.producer import AsyncProducer, ProducerBase
from escrowmq.client.producing.production import Production
from escrowmq.client.reading.browsing import Browsing, check_browsing, view_among
from escrowmq.client.reading.reader import AsyncReader, ReaderBase
from escrowmq.client.reading.reading import Partition, Reading, Start
from escrowmq.client.reading.viewing import view_message
from escrowmq.errors import Code, Misuse, Unknown
from escrowmq.model import CheckPolicy, StoredMessage
from escrowmq.wire import Exchange, Link

ProducerT = TypeVar("ProducerT", bound=ProducerBase[Any])
ConsumerT = TypeVar("ConsumerT", bound=ConsumerBase[Any, Any])
ReaderT = TypeVar("ReaderT", bound=ReaderBase)
MessageT = TypeVar("MessageT", bound=ReceivedBase)
PartT = TypeVar("PartT", bound=ProducerBase[Any] | ConsumerBase[Any, Any] | ReaderBase)


class BusBase(Generic[ProducerT, ConsumerT, ReaderT]):
    """The base of both buses: their brokers, their objects, and everything that does not wait."""

    def __init__(
        self,
        links: Sequence[Link],
        waiting: Waiting,
        producer: Callable[[Production], ProducerT],
        consumer: Callable[[Consumption], ConsumerT],
        reader: Callable[[Reading], ReaderT],
        *,
        owns_links: bool = True,
    ) -> None:
        if not links:
            raise Misuse(Code.BAD_ARGUMENT, "a bus needs a broker")
        self.router = Router(links)
        self._waiting, self._owns_links = waiting, owns_links
        self._make_producer, self._make_consumer, self._make_reader = producer, consumer, reader
        self._parts: list[ProducerBase[Any] | ConsumerBase[Any, Any] | ReaderBase] = []
        self._lock = threading.RLock()  # a signal handler may close the bus
        self._closed = self._ended = False

    def producer(
        self,
        group: str,
        *,
        instance: str | None = None,
        qos: int = 1,
        timeout: float = 30.0,
        checker: AnyChecker | None = None,
        unasked: bool = False,
        check_policy: CheckPolicy | None = None,
        replaces: bool = False,
        absent: Absent | None = None,
        failover: Failover = "unsent",
        confirm: Confirm = "answered",
    ) -> ProducerT:
        """Return a producer of producer group ``group``; see :class:`Producer` for ``qos`` and :meth:`Producer.checker`
        for ``checker``. It does not wait.

        ``instance`` names this process within the group: a newer producer of the same name fences this one (its calls
        then raise Fenced). ``timeout`` is seconds per call. ``unasked``: transactions may begin without a checker. They
        are ended by id, from any process, and are parked after ``half_retention``. ``check_policy``: the check-back
        rules of a new group; an existing group must have these rules (else the first call raises GROUP_RULES, see
        :meth:`Admin.alter_producers`). ``replaces``: a prepare with the message id of an undecided transaction and
        another content replaces that transaction, which is rolled back (else MESSAGE_ID_TAKEN, as after the decision).

        With several brokers, a message without a key goes to a reachable one. ``absent``: a call that belongs to a
        broker that is away (a key, an id of the caller's, a transaction) and was surely not sent ``"fail"``s with
        Overloaded(BROKER_AWAY) at once (the default with several brokers), or ``"wait"``s up to ``timeout`` (the
        default with one). A request that may have been sent waits for its broker, because another one could store it
        twice; ``failover="repeat"`` sends a plain message without a key or id of its own to another broker after three
        more tries, under the same id: then a consumer must be idempotent by message id.

        ``confirm="oneway"``: ends of transactions do not wait, and a refusal is counted instead of raised; see
        :class:`Producer`'s module.
        """
        self._need_open()
        choice = Choice(absent or ("fail" if len(self.router) > 1 else "wait"), failover, confirm)
        production = Production(
            self.router, self._waiting, group, instance, qos, timeout, checker, unasked, check_policy, replaces, choice
        )
        return self._keep(self._make_producer(production))

    def missing(self) -> list[Missing]:
        """Return the brokers of several that were needed and are away, each with the reason."""
        return self.router.presence.missing()

    def lane(self, link: Link, kind: Exchange, codec: Codec, options: Options, **more: Any) -> Lane:
        """Return a new lane, which combines the rows of concurrent callers into requests of one kind over a link; its
        caller closes it. With several brokers, rows that were not sent to one that is away are refused with
        BROKER_AWAY."""
        more.setdefault("attended", self.router.attendances[self.router.links.index(link)])
        return self._waiting.lane(link, kind, codec, options, **more)

    async def _close(self, grace: float = GRACE_SECONDS) -> None:
        with self._lock:
            again, self._closed = self._closed, True
            consumers = [part for part in self._parts if isinstance(part, ConsumerBase)]
        for consumer in consumers:
            consumer._stop()
        deadline = time.monotonic() + grace
        for consumer in consumers:
            if not await consumer._close(max(deadline - time.monotonic(), 0.0), again=again):
                consumer._then = self._close  # when the caller's own loop over it has ended
                return
        with self._lock:
            first, self._ended = not self._ended, True
        if first:
            for part in sorted(self._parts, key=lambda part: isinstance(part, ProducerBase)):
                await part._close()
            await self._waiting.away(self._end)

    def _end(self) -> None:
        self.router.close()
        if self._owns_links:
            for link in self.router.links:  # first, because a connection may block a thread of the others
                link.close()
        self._waiting.close()

    def _need_open(self) -> None:
        if self._closed:
            raise Unknown(Code.CLOSED, "the bus is closed")

    def _keep(self, part: PartT) -> PartT:
        with self._lock:
            self._need_open()
            self._parts.append(part)
        return part


class BusCalls(BusBase[ProducerT, ConsumerT, ReaderT], Generic[ProducerT, ConsumerT, ReaderT, MessageT]):
    """The calls of a bus that wait."""

    async def consumer(
        self,
        group: str,
        topics: str | Sequence[str],
        *,
        tags: str | Sequence[str] | None = None,
        ordered: bool = False,
        start: str | datetime | None = None,
        lease: float | None = None,
        max_attempts: int | None = None,
        retry_backoff: float | None = None,
        retry_backoff_max: float | None = None,
        redelivery: str | Sequence[float] | None = None,
        prefetch: int = 2,
        max_bytes: int = 16 << 20,
        qos: int = 1,
        seen: Callable[[MessageT], bool] | None = None,
        timeout: float = 30.0,
        instance: str | None = None,
        in_doubt: str = "redeliver",
    ) -> ConsumerT:
        """Return a consumer of consumer group ``group``, which is made if it does not exist.

        All consumers of a group have the same topics, ``tags`` and order. ``tags`` (None: all) is ``"a||b"`` or a list;
        ``ordered`` gives the messages of each key in order, also after one failed (without a key: those of each queue);
        handle them in one thread or task, and if you do not iterate, check ``message.withdrawn``; ``start``: where a
        new group begins, ``"earliest"`` (the default), ``"latest"`` or a datetime. ``lease`` seconds until
        unacknowledged messages are redelivered, ``retry_backoff`` and ``retry_backoff_max`` seconds before the second
        and before later deliveries, ``max_attempts`` deliveries until a message is a dead letter (None, each: the
        broker's); instead of a back-off ``redelivery``, the seconds before each: a list, or a name, ``"3x5min"``,
        ``"rocketmq"`` or ``"forever"`` (never a dead letter). Options that are given must be those of an existing group
        (else SUBSCRIPTION_MISMATCH; :meth:`Admin.alter_group` changes them). ``prefetch`` (2) receives ahead, of up to
        ``max_bytes`` (16 MiB) each; ``timeout`` (30.0) seconds per call; ``qos`` (1) and ``seen`` (a plain function; on
        an event loop it runs on a thread) as in :mod:`escrowmq.client.consuming.consumer`.

        With ``in_doubt="hold"`` (a choice of the group; else ``"redeliver"``) leases do not expire: the messages of a
        silent consumer wait until the next process of its ``instance`` name gets them again, or :meth:`Admin.fence`
        returns them to the group. The replaced or fenced process gets Fenced from its next receive, and LEASE_LOST for
        late acknowledgements.

        ``topics`` may be one system view instead (``"%half"``, ``"%op"``, ``"%acks"``, ``"%group-acts"``,
        ``"%dead-letters.GROUP"``). It is browsed, as by :meth:`reader`: no group is made, every consumer gets all of it
        from ``start`` on, and ``ack``, ``nack`` and ``extend`` raise DENIED, options of groups BAD_ARGUMENT.
        """
        self._need_open()
        backoff = (max_attempts, retry_backoff, retry_backoff_max, redelivery)
        options = ConsumerOptions(
            tags, ordered, start, lease, *backoff, prefetch, max_bytes, qos, seen, timeout, instance, in_doubt
        )
        if (view := view_among(topics)) is not None:
            check_browsing(view, options)
            browsed = Reading(self.router, self._waiting, view, None, start or "earliest", tags, None, timeout)
            await self._waiting.away(browsed.assign)
            return self._keep(self._make_consumer(Browsing(group, browsed)))
        options.check()
        consumption = Consumption(self.router, self._waiting, subscription(group, topics, options), options)
        await self._waiting.away(consumption.subscribe)
        return self._keep(self._make_consumer(consumption))

    async def reader(
        self,
        topic: str,
        *,
        queues: Sequence[int | Partition] | None = None,
        start: Start = "earliest",
        tags: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        key: str | None = None,
        of_group: str | None = None,
        timeout: float = 30.0,
    ) -> ReaderT:
        """Read queues of a topic from given offsets, without a group: nothing is leased, the caller keeps the offsets.

        ``topic`` may be a system view, too: ``%half``, ``%op``, ``%acks`` and ``%group-acts``, whose one queue counts
        by log positions, or ``%dead-letters.GROUP``, which counts by the time of death (microseconds since 1970).
        :mod:`escrowmq.client.reading.views` describes their rows as messages; ``arrow`` has the view's own columns.

        ``queues``: numbers (at every broker), or (shard or number of the broker, queue); None, the default: all, those
        made later too. ``start``: ``"earliest"`` (the default), ``"latest"``, a datetime (the first that became visible
        then), or the *next* offset of each partition, ``{(shard or number of the broker, queue): offset}``, as
        :meth:`Reader.positions` gives it; partitions that it does not name begin with their first message. ``tags`` as
        for a consumer; ``columns`` of DELIVERY or of the view (None: all); ``key`` (None: any) is that of the messages,
        ``of_group`` (None: any) the consumer group of ``%acks``; ``timeout`` (30.0) seconds per call.

        Raises UNKNOWN_TOPIC, UNKNOWN_GROUP, BAD_QUEUE, Misuse(BAD_ARGUMENT), Unknown(TIMED_OUT) if a broker does not
        answer.
        """
        self._need_open()
        reading = Reading(self.router, self._waiting, topic, queues, start, tags, columns, timeout, key, of_group)
        await self._waiting.away(reading.assign)
        return self._keep(self._make_reader(reading))

    async def view_message(
        self, topic: str, id_or_key: str | bytes | uuid.UUID, *, timeout: float = 30.0
    ) -> StoredMessage | None:
        """Return the message of a topic with an id, in any form that :func:`escrowmq.model.message_id` takes; else the
        newest one with that key (a text).

        Finds prepared messages, too, with their ``state``. None if it was rolled back, has expired, was removed by
        retention, or never existed. Asks all brokers. Its cost does not depend on the size of the log.

        Raises Overloaded(BROKER_AWAY) if no reachable broker has it while another is away, BAD_TOPIC_NAME,
        Corrupt(DAMAGED) if an unreadable message may be it, Unknown(TIMED_OUT) after ``timeout`` (30.0) seconds.
        """
        self._need_open()
        return await self._waiting.away(view_message, self.router, topic, id_or_key, timeout)

    async def close(self, grace: float = GRACE_SECONDS) -> None:
        """Close consumers and readers, then producers (after their requests in flight), then the connections.

        All consumers stop first; loops over them may take ``grace`` seconds together, as in :meth:`Consumer.close`.
        Within such a loop, or in a signal handler that interrupted one, it returns at once, and the end of the loop
        closes the rest. Thread-safe; a second call does not wait for loops. A silent broker takes the ``timeout`` of
        each part and some seconds for the connections. In a forked child it does nothing.
        """
        await self._close(grace)


class AsyncBus(BusCalls[AsyncProducer, AsyncConsumer, AsyncReader, AsyncReceived], AsyncCloses):
    """A bus for asyncio, made by :func:`escrowmq.aconnect`. It belongs to that event loop; ``async with`` closes it."""

    def __init__(self, links: Sequence[Link], *, owns_links: bool = True) -> None:
        super().__init__(links, Loop(links), AsyncProducer, AsyncConsumer, AsyncReader, owns_links=owns_links)
        self.admin = AsyncAdmin(Admin(self.router))
