"""One producer per group in the gateway, so that requests of all connections share its batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TypeVar

from escrowmq.client.aio import AsyncBus
from escrowmq.client.producing.ending import require
from escrowmq.client.producing.oneway import Confirm
from escrowmq.client.producing.producer import AsyncProducer
from escrowmq.errors import Code, EscrowError, Rejected
from escrowmq.gateway.asking import HttpChecker
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.model import Message, Outcome, Receipt, TransactionId
from escrowmq.platform import failpoints

T = TypeVar("T")


class Producers:
    """The producers of one gateway, created when a group is first used; those with a check-back URL at once."""

    def __init__(self, bus: AsyncBus, settings: GatewaySettings, checkers: Mapping[str, HttpChecker]) -> None:
        self._bus = bus
        self._settings = settings
        self._checkers = checkers
        self._producers: dict[str, AsyncProducer] = {}
        for group in checkers:
            self.of(group)

    def of(self, group: str) -> AsyncProducer:
        """Return the producer of a group. Raises BAD_GROUP_NAME, Rejected(TOO_MANY)."""
        producer = self._producers.get(group)
        if producer is None:
            if len(self._producers) >= self._settings.max_groups:
                raise Rejected(Code.TOO_MANY, f"the gateway speaks for {len(self._producers)} producer groups already")
            asker = self._checkers.get(group)
            producer = self._producers[group] = self._bus.producer(
                group,
                timeout=self._settings.timeout,
                checker=None if asker is None else asker.decide,
                unasked=asker is None,
            )
            if asker is not None:
                asker.attend = producer.attend
        return producer

    async def send(self, group: str, message: Message) -> Receipt:
        """Send one plain message. Raises the producer's error if it is not accepted."""
        return await self.of(group).send(message)

    async def send_several(self, group: str, messages: Sequence[Message]) -> list[Receipt | EscrowError]:
        """Send plain messages. Returns a receipt or an error for each."""
        producer = self.of(group)
        return await outcomes_of([producer.send(message) for message in messages])

    async def prepare(self, group: str, messages: Sequence[Message], join: TransactionId | None) -> list[Receipt]:
        """Prepare the half messages of one transaction; the first begins it unless ``join`` names it. If a message is
        rejected, the error carries the ``message_ids`` and ``transaction_id`` for a retry. Nothing is decided here: the
        prepared messages wait for the retry or for the decision."""
        producer, receipts = self.of(group), list[Receipt | EscrowError]()
        if join is None:
            receipts += await outcomes_of([producer.prepare(messages[0])])
            first = receipts[0]
            if isinstance(first, EscrowError):
                raise _add_retry_ids(first, receipts, len(messages), None)
            join = first.transaction_id
        rest = messages[len(receipts) :]
        receipts += await outcomes_of([producer.prepare(message, transaction_id=join) for message in rest])
        for outcome in receipts:
            if isinstance(outcome, EscrowError):
                raise _add_retry_ids(outcome, receipts, len(messages), join)
        failpoints.reach("gateway.prepared")
        return [receipt for receipt in receipts if isinstance(receipt, Receipt)]

    async def end(
        self, group: str, transaction: TransactionId, outcome: Outcome, confirm: Confirm = "answered"
    ) -> Code:
        """End a transaction of the group, from any process. Raises CONFLICT and so on. Returns SENT if unconfirmed."""
        return require(outcome, await self.of(group).end(transaction, outcome, confirm=confirm))


async def outcomes_of(calls: Iterable[Awaitable[T]]) -> list[T | EscrowError]:
    """Await concurrent calls. Returns a value or an EscrowError for each; other errors are raised."""
    results: list[T | EscrowError] = []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, EscrowError):
            raise result
        results.append(result)
    return results


def _add_retry_ids(
    problem: EscrowError, so_far: Sequence[Receipt | EscrowError], total: int, transaction: TransactionId | None
) -> EscrowError:
    """Attach the ids for a retry, and the transaction that exists, to an error."""
    ids = [getattr(one, "message_id", None) for one in so_far]
    hexed = [one.hex() if isinstance(one, bytes) else None for one in ids] + [None] * (total - len(ids))
    problem.message_ids = hexed  # type: ignore[attr-defined]
    if transaction is not None:
        problem.transaction_id = str(transaction)  # type: ignore[attr-defined]
    return problem
