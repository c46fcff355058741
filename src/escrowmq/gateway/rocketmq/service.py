"""The calls of ``apache.rocketmq.v2.MessagingService``."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from escrowmq.client.consuming.delivery import Rows
from escrowmq.client.consuming.options import ConsumerOptions, delay_us, subscription
from escrowmq.errors import Code, EscrowError, Rejected
from escrowmq.gateway.callers import Callers
from escrowmq.gateway.core import Gateway
from escrowmq.gateway.producers import outcomes_of
from escrowmq.gateway.rocketmq import mapping
from escrowmq.gateway.rocketmq.access_keys import AccessKeys
from escrowmq.gateway.rocketmq.clients import Clients, complete_settings
from escrowmq.gateway.rocketmq.endpoints import Endpoints
from escrowmq.gateway.rocketmq.mapping import consumer_group, duration_seconds, name_of
from escrowmq.gateway.rocketmq.protocol import definition, service, service_grpc
from escrowmq.gateway.rocketmq.renewing import RENEWED_SECONDS, Renewing
from escrowmq.gateway.rocketmq.statuses import OK, Refusal, Status, status_of
from escrowmq.gateway.settling import LeaseHandle
from escrowmq.model import Act, Outcome, Receipt, TransactionId

_log = logging.getLogger(__name__)

LEAST_INVISIBLE, MOST_INVISIBLE = 1.0, 12 * 3600.0
"""Bounds (s) of an invisible duration."""
DEFAULT_WAIT = 20.0
RESERVE_SECONDS = 0.5
"""Time (s) before a client's deadline at which a receive without messages ends."""
UNREAD_SECONDS = 60.0
"""Time (s) without a message that a client reads of an answer, after which the rest is given back."""
MAX_ENTRIES = 1000
"""Messages, or receipt handles, of one request."""
_OUTCOMES = {definition.COMMIT: Outcome.COMMIT, definition.ROLLBACK: Outcome.ROLLBACK}
_TYPES = (definition.NORMAL, definition.FIFO, definition.DELAY, definition.TRANSACTION)


class MessagingService(service_grpc.MessagingServiceServicer):  # type: ignore[misc]
    """The service over the connections of callers. Answers carry a status; errors of a call never break the stream."""

    def __init__(
        self, callers: Callers, endpoints: Endpoints, keys: AccessKeys | None, fifo: Callable[[str], bool]
    ) -> None:
        self._callers = callers
        self._endpoints = endpoints
        self._keys = keys
        self._is_fifo = fifo
        self._settings = callers.own.settings
        self.clients = Clients(self._settings.timeout, self._settings_for)
        self.renewing = Renewing()

    def _settings_for(self, given: Any) -> Any:
        fifo = given.HasField("subscription") and self._is_fifo(given.subscription.group.name)
        return complete_settings(given, fifo)

    @asynccontextmanager
    async def _caller(self, context: Any) -> AsyncIterator[tuple[Gateway, str]]:
        """Provide the gateway of a request's credential, and the client's id."""
        headers = dict(context.invocation_metadata())
        client = headers.get("x-mq-client-id", "")
        if not client:
            raise Refusal(Status.CLIENT_ID_REQUIRED, "the header x-mq-client-id is missing")
        source = context.peer().rpartition(":")[0]
        try:
            bearer = self._keys.bearer_of(headers) if self._keys is not None else ""
        except EscrowError:
            await self._callers.fail(source)
            raise
        key, gateway = await self._callers.enter(bearer, source)
        problem: BaseException | None = None
        try:
            yield gateway, client[:255]
        except BaseException as raised:
            problem = raised
            raise
        finally:
            await self._callers.leave(key, gateway, source, problem)

    async def QueryRoute(self, request: Any, context: Any) -> Any:
        """Answer with this gateway as the one broker of a topic."""

        async def answer(gateway: Gateway, client: str) -> Any:
            queue = self._queue(request.topic, request.endpoints)
            return service.QueryRouteResponse(status=OK, message_queues=[queue])

        return await self._answer(context, service.QueryRouteResponse, answer)

    async def QueryAssignment(self, request: Any, context: Any) -> Any:
        """Assign the one queue of a topic to every consumer: the broker distributes the messages."""

        async def answer(gateway: Gateway, client: str) -> Any:
            queue = self._queue(request.topic, request.endpoints)
            return service.QueryAssignmentResponse(status=OK, assignments=[definition.Assignment(message_queue=queue)])

        return await self._answer(context, service.QueryAssignmentResponse, answer)

    def _queue(self, topic: Any, endpoints: Any) -> Any:
        name = name_of(topic, Status.ILLEGAL_TOPIC)
        return definition.MessageQueue(
            topic=definition.Resource(name=name),
            id=0,
            permission=definition.READ_WRITE,
            broker=definition.Broker(name="escrowmq", id=0, endpoints=self._endpoints.choose(endpoints)),
            accept_message_types=_TYPES,
        )

    async def Heartbeat(self, request: Any, context: Any) -> Any:
        """Acknowledge a heartbeat: the telemetry stream shows whether a client is there."""

        async def answer(gateway: Gateway, client: str) -> Any:
            self.renewing.on_heartbeat((gateway, client))
            return service.HeartbeatResponse(status=OK)

        return await self._answer(context, service.HeartbeatResponse, answer)

    async def NotifyClientTermination(self, request: Any, context: Any) -> Any:
        """Stop renewing the leases of a client that ends."""

        async def answer(gateway: Gateway, client: str) -> Any:
            self.renewing.drop((gateway, client))
            return service.NotifyClientTerminationResponse(status=OK)

        return await self._answer(context, service.NotifyClientTerminationResponse, answer)

    # Producers

    async def SendMessage(self, request: Any, context: Any) -> Any:
        """Send messages, or half messages. An entry is answered when its message is durable."""

        async def answer(gateway: Gateway, client: str) -> Any:
            if not 1 <= len(request.messages) <= MAX_ENTRIES:
                raise Refusal(Status.BAD_REQUEST, f"{len(request.messages)} messages; 1 to {MAX_ENTRIES} at a time")
            incoming = [mapping.to_message(one, client) for one in request.messages]
            for one in incoming:
                if one.transactional:  # what is refused is refused before anything is sent
                    self.clients.transactional(gateway, one.message.topic)
                    self.clients.declare_sender(gateway, client, one.message.topic)
            results = await outcomes_of([self._send(gateway, one) for one in incoming])
            entries = [_to_entry(one, result) for one, result in zip(incoming, results, strict=True)]
            return service.SendMessageResponse(status=_overall(entries), entries=entries)

        return await self._answer(context, service.SendMessageResponse, answer)

    async def _send(self, gateway: Gateway, incoming: mapping.Incoming) -> Receipt:
        message = incoming.message
        if not incoming.transactional:
            return await self.clients.plain(gateway).send(message)
        return await self.clients.transactional(gateway, message.topic).prepare(message)

    async def RecallMessage(self, request: Any, context: Any) -> Any:
        """Drop a delayed message by its handle; answered when that is durable. Repeats are harmless."""

        async def answer(gateway: Gateway, client: str) -> Any:
            topic = name_of(request.topic, Status.ILLEGAL_TOPIC)
            try:
                identity = bytes.fromhex(request.recall_handle)
            except ValueError:
                identity = b""
            if len(identity) != 16:
                raise Refusal(Status.BAD_REQUEST, f"{request.recall_handle!r:.80} is not a recall handle")
            try:
                await self.clients.plain(gateway).recall(topic, identity)
            except Rejected as problem:
                if problem.code is not Code.NOT_FOUND:
                    raise
                raise Refusal(Status.MESSAGE_NOT_FOUND, str(problem)) from None
            message_id = mapping.client_message_id(identity)
            return service.RecallMessageResponse(status=OK, message_id=message_id)

        return await self._answer(context, service.RecallMessageResponse, answer)

    async def EndTransaction(self, request: Any, context: Any) -> Any:
        """Commit or roll back by id; answered when that is durable. Repeats are harmless, and any client may end."""

        async def answer(gateway: Gateway, client: str) -> Any:
            topic = name_of(request.topic, Status.ILLEGAL_TOPIC)
            if not request.transaction_id.strip():
                raise Refusal(Status.INVALID_TRANSACTION_ID, "the transaction id is empty")
            outcome = _OUTCOMES.get(request.resolution, Outcome.UNKNOWN)
            if outcome is not Outcome.UNKNOWN:
                try:
                    identity = TransactionId.parse(request.transaction_id)
                except EscrowError as problem:
                    raise Refusal(Status.INVALID_TRANSACTION_ID, str(problem)) from None
                producer = self.clients.transactional(gateway, topic)
                await (producer.commit(identity) if outcome is Outcome.COMMIT else producer.rollback(identity))
            self.clients.on_answer(gateway, request.transaction_id, outcome)
            return service.EndTransactionResponse(status=OK)

        return await self._answer(context, service.EndTransactionResponse, answer)

    async def Telemetry(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Exchange settings with a client, and send check-backs to it, until one of them ends the stream."""
        try:
            async with self._caller(context) as (gateway, client):
                await self._converse(gateway, client, requests, context)
        except (EscrowError, Refusal) as problem:
            await context.write(service.TelemetryCommand(status=status_of(problem)))

    async def _converse(self, gateway: Gateway, client: str, requests: AsyncIterator[Any], context: Any) -> None:
        stream = self.clients.enter(gateway, client)

        async def read() -> None:
            async for command in requests:
                if command.HasField("settings"):
                    self.clients.learn(stream, command.settings)

        async def write() -> None:
            while (command := await stream.take()) is not None:
                await context.write(command)

        tasks = [asyncio.create_task(read()), asyncio.create_task(write())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.clients.leave(stream)
            tasks[0].cancel()
            stream.end()  # gRPC fails if a write is cancelled
            await asyncio.gather(*tasks, return_exceptions=True)

    # Consumers

    async def ReceiveMessage(self, request: Any, context: Any) -> None:
        """Lease messages: a status, the messages, then the time of delivery. Messages that a client does not read, also
        because it is gone, are given back."""
        received: list[Any] = []
        try:
            async with self._caller(context) as (gateway, client):
                received = await self._receive(gateway, client, request, context.time_remaining())
                status = OK if received else _status(Status.MESSAGE_NOT_FOUND, "no message came in time")
        except (EscrowError, Refusal) as problem:
            status = status_of(problem)
        unsent = deque(received)
        writing = asyncio.create_task(_write(context, status, unsent))
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # of a client that is gone
        left = -1
        try:
            while not writing.done() and left != len(unsent):
                left = len(unsent)
                await asyncio.wait({writing}, timeout=UNREAD_SECONDS)
        finally:
            if unsent:  # leases of those that were written end by themselves
                self.renewing.stop((gateway, client), [_handle_of(one) for one in received])
                handles = [_handle_of(one) for one in unsent]
                unsent.clear()
                group = consumer_group(request.group.name, request.message_queue.topic.name)
                with suppress(EscrowError):
                    await gateway.settler.settle(group, handles, Act.RELEASE, 0, None)
        await writing  # the call counts among max_requests as long as its client keeps it open

    async def _receive(self, gateway: Gateway, client: str, request: Any, remaining: float | None) -> list[Any]:
        group = name_of(request.group, Status.ILLEGAL_CONSUMER_GROUP)
        topic = name_of(request.message_queue.topic, Status.ILLEGAL_TOPIC)
        lease = RENEWED_SECONDS if request.auto_renew else _invisible(request.invisible_duration)
        given = request.HasField("long_polling_timeout")
        wait = duration_seconds(request.long_polling_timeout) if given else DEFAULT_WAIT
        if not 0 <= wait < 3600:
            raise Refusal(Status.ILLEGAL_POLLING_TIME, f"{wait} s")
        if remaining is not None:  # some clients give no polling time, only a deadline
            wait = max(min(wait, remaining - RESERVE_SECONDS), 0.0)
        if request.batch_size < 1:
            raise Refusal(Status.BAD_REQUEST, f"a batch of {request.batch_size}")
        name = consumer_group(group, topic)
        options = ConsumerOptions(tags=mapping.tags_of(request.filter_expression), ordered=self._is_fifo(group))
        await gateway.subscribe(subscription(name, topic, options))
        never = asyncio.get_running_loop().create_future()  # a client that is gone cancels this call
        wanted, wait = min(request.batch_size, gateway.settings.max_messages), min(wait, gateway.settings.max_wait)
        found = await gateway.receiving.receive(name, wanted, wait, round(lease * 1000), never)
        if found is None:
            return []
        number, batch = found
        try:
            rows, shard = Rows(number, batch), await gateway.shard(number)
            messages = [_to_delivery(rows, row, topic, shard, lease) for row in range(rows.count)]
        except BaseException:
            gateway.settler.give_back(number, name, batch)
            raise
        if request.auto_renew:
            self.renewing.add((gateway, client), name, [_handle_of(one) for one in messages])
        return messages

    async def AckMessage(self, request: Any, context: Any) -> Any:
        """Acknowledge messages by their handles."""

        async def answer(gateway: Gateway, client: str) -> Any:
            group = self._group_of(request)
            if not 1 <= len(request.entries) <= MAX_ENTRIES:
                raise Refusal(Status.BAD_REQUEST, f"{len(request.entries)} entries; 1 to {MAX_ENTRIES} at a time")
            handles = [entry.receipt_handle for entry in request.entries]
            self.renewing.stop((gateway, client), handles)
            outcomes = await gateway.settler.settle(group, handles, Act.ACK, 0, None)
            entries = [
                service.AckMessageResultEntry(
                    message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=_receipt_status(outcome)
                )
                for entry, outcome in zip(request.entries, outcomes, strict=True)
            ]
            return service.AckMessageResponse(status=_overall(entries), entries=entries)

        return await self._answer(context, service.AckMessageResponse, answer)

    async def ChangeInvisibleDuration(self, request: Any, context: Any) -> Any:
        """Set the time until a message is delivered again, from now on. LEAST_INVISIBLE replaces a shorter one."""

        async def answer(gateway: Gateway, client: str) -> Any:
            # RocketMQ accepts 0 here, though not in a receive; Node's push consumer asks for milliseconds.
            seconds = max(_invisible(request.invisible_duration, least=0.0), LEAST_INVISIBLE)
            self.renewing.stop((gateway, client), [request.receipt_handle])
            status = await self._settle(gateway, request, Act.EXTEND, delay_us(seconds), None)
            return service.ChangeInvisibleDurationResponse(status=status, receipt_handle=request.receipt_handle)

        return await self._answer(context, service.ChangeInvisibleDurationResponse, answer)

    async def ForwardMessageToDeadLetterQueue(self, request: Any, context: Any) -> Any:
        """Make a message a dead letter: the consumer has tried it as often as its settings say."""

        async def answer(gateway: Gateway, client: str) -> Any:
            self.renewing.stop((gateway, client), [request.receipt_handle])
            cause = f"given up by its consumer after {request.delivery_attempt} attempts"
            status = await self._settle(gateway, request, Act.REJECT, 0, cause)
            return service.ForwardMessageToDeadLetterQueueResponse(status=status)

        return await self._answer(context, service.ForwardMessageToDeadLetterQueueResponse, answer)

    async def _settle(self, gateway: Gateway, request: Any, act: Act, delay: int, cause: str | None) -> Any:
        """Settle the message of a request. Returns the status."""
        [outcome] = await gateway.settler.settle(self._group_of(request), [request.receipt_handle], act, delay, cause)
        return _receipt_status(outcome)

    @staticmethod
    def _group_of(request: Any) -> str:
        group = name_of(request.group, Status.ILLEGAL_CONSUMER_GROUP)
        return consumer_group(group, name_of(request.topic, Status.ILLEGAL_TOPIC))

    # The rest

    async def PullMessage(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Refuse: no client calls it."""
        yield service.PullMessageResponse(status=_unsupported("PullMessage"))

    async def _answer(self, context: Any, response: Any, work: Callable[[Gateway, str], Awaitable[Any]]) -> Any:
        """Run a call for its caller. Errors become the status of an empty ``response``."""
        try:
            async with self._caller(context) as (gateway, client):
                return await work(gateway, client)
        except (EscrowError, Refusal) as problem:
            return response(status=status_of(problem))
        except (UnicodeError, ValueError) as problem:
            return response(status=_status(Status.BAD_REQUEST, str(problem)[:1000]))


def _refuse(response: Any, name: str) -> Any:
    async def call(self: MessagingService, request: Any, context: Any) -> Any:
        return response(status=_unsupported(name))

    return call


def _unsupported(name: str) -> Any:
    return _status(Status.NOT_IMPLEMENTED, f"{name} is not supported by this server")


for _name in ("UpdateOffset", "GetOffset", "QueryOffset", "SyncLiteSubscription"):
    setattr(MessagingService, _name, _refuse(getattr(service, f"{_name}Response"), _name))


def _status(code: int, text: str) -> Any:
    return definition.Status(code=code, message=text)


def _invisible(duration: Any, least: float = LEAST_INVISIBLE) -> float:
    seconds = duration_seconds(duration)
    if not least <= seconds <= MOST_INVISIBLE:
        text = f"an invisible duration of {seconds:g} s: {least:g} to {MOST_INVISIBLE:g}"
        raise Refusal(Status.ILLEGAL_INVISIBLE_TIME, text)
    return seconds


def _to_entry(sent: mapping.Incoming, result: Receipt | EscrowError) -> Any:
    if isinstance(result, EscrowError):
        return service.SendResultEntry(status=status_of(result), message_id=sent.client_id)
    return service.SendResultEntry(
        status=OK,
        message_id=sent.client_id,
        transaction_id="" if result.transaction_id is None else str(result.transaction_id),
        offset=result.offset or 0,
        recall_handle=result.message_id.hex() if sent.delayed else "",
    )


def _receipt_status(outcome: Code | EscrowError) -> Any:
    if isinstance(outcome, EscrowError) and outcome.code in (Code.BAD_ARGUMENT, Code.WRONG_SHARD):
        return _status(Status.INVALID_RECEIPT_HANDLE, str(outcome)[:1000])
    return status_of(outcome) if isinstance(outcome, EscrowError) else OK


async def _write(context: Any, status: Any, unsent: deque[Any]) -> None:
    """Write the answer of a receive, and take each message from ``unsent`` that is written."""
    await context.write(service.ReceiveMessageResponse(status=status))
    while unsent:
        await context.write(service.ReceiveMessageResponse(message=unsent[0]))
        if unsent:
            unsent.popleft()
    now = service.ReceiveMessageResponse()
    now.delivery_timestamp.FromDatetime(datetime.now(UTC))
    await context.write(now)


def _handle_of(message: Any) -> str:
    return str(message.system_properties.receipt_handle)


def _overall(entries: Sequence[Any]) -> Any:
    """Return the status of a response: that of all its entries, if it is the same."""
    codes = {entry.status.code for entry in entries}
    return entries[0].status if len(codes) == 1 else _status(Status.MULTIPLE_RESULTS, "see each entry")


def _to_delivery(rows: Rows, row: int, topic: str, shard: int, lease: float) -> Any:
    names = ("body", "key", "tag", "properties", "message_id", "born_us", "lease", "offset", "attempt", "stored_us")
    values = {name: rows.list(name)[row] for name in names}
    message = mapping.to_client(topic, values)
    system = message.system_properties
    system.receipt_handle = str(LeaseHandle(shard, values["lease"], values["offset"]))
    system.queue_id, system.queue_offset = 0, values["offset"]
    system.delivery_attempt = values["attempt"]
    system.store_timestamp.FromMicroseconds(values["stored_us"])
    system.invisible_duration.FromMilliseconds(round(lease * 1000))
    return message
