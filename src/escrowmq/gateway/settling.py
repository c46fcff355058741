"""Settlement of messages by their handles. Each names message, lease and broker, so that no consumer is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from escrowmq.client.aio import AsyncBus
from escrowmq.client.consuming.settling import SettlingCodec, lease_runs, settling_batch
from escrowmq.client.lanes.coalescer import Lane
from escrowmq.errors import Code, EscrowError, Misuse, Rejected
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.message.names import check_name
from escrowmq.model import Act
from escrowmq.wire import Exchange

_NO_NEIGHBOUR = -2
"""Value for the codec that keeps a row separate, so that each handle gets its own result."""


@dataclass(frozen=True, slots=True)
class LeaseHandle:
    """Identifies a leased message: ``SHARD-LEASE-OFFSET``, hexadecimal. Valid at every gateway until the lease ends."""

    shard: int
    lease: int
    offset: int

    def __str__(self) -> str:
        return f"{self.shard:08x}-{self.lease:x}-{self.offset:x}"

    @classmethod
    def parse(cls, text: str) -> LeaseHandle:
        """Parse a handle from its printed form. Raises Misuse(BAD_ARGUMENT) for anything else."""
        try:
            shard, lease, offset = (int(part, 16) if part.isalnum() else -1 for part in text.split("-"))
        except ValueError:
            shard = lease = offset = -1
        if not (0 <= shard < 1 << 32 and 0 <= lease < 1 << 63 and 0 <= offset < 1 << 63):
            raise Misuse(Code.BAD_ARGUMENT, f"{text!r:.100} is not a handle", "give it back as it was received")
        return cls(shard, lease, offset)


class Settler:
    """Sends the acknowledgements of all requests, coalesced by broker and consumer group."""

    def __init__(self, bus: AsyncBus, settings: GatewaySettings) -> None:
        self._bus = bus
        self._settings = settings
        self._lanes: dict[tuple[int, str], Lane] = {}

    async def settle(
        self, group: str, texts: Sequence[str], act: Act, delay_us: int, cause: str | None
    ) -> list[Code | EscrowError]:
        """Settle messages of a consumer group by their printed handles. Returns OK or an error for each, in order."""
        check_name(group, Code.BAD_GROUP_NAME)
        handles = [_parse(text) for text in texts]
        numbers = await self._numbers({handle.shard for handle in handles if isinstance(handle, LeaseHandle)})
        waiting: list[Awaitable[Code] | EscrowError] = []
        for handle in handles:
            if isinstance(handle, EscrowError):
                waiting.append(handle)
                continue
            number = numbers[handle.shard]
            if isinstance(number, EscrowError):
                waiting.append(number)
                continue
            row = (handle.lease, handle.offset, _NO_NEIGHBOUR, act, delay_us, cause)
            try:
                waiting.append(self._lane(number, group).call(row, 64))
            except EscrowError as problem:
                waiting.append(problem)
        return [await _await_outcome(one) for one in waiting]

    def give_back(self, number: int, group: str, batch: pa.RecordBatch) -> None:
        """Return messages that no client received: they are redelivered at once, with the same attempt number."""
        leases, starts, counts = lease_runs(batch)
        try:
            settle = settling_batch(leases, starts, counts, Act.RELEASE, 0, None)
            self._lane(number, group).add_batch(settle, None)
        except EscrowError:
            pass  # their leases will expire

    async def close(self) -> None:
        """Send pending acknowledgements, then reject new ones."""
        lanes = list(self._lanes.values())
        await asyncio.gather(*(asyncio.to_thread(lane.drain, 5.0) for lane in lanes))
        for lane in lanes:
            lane.close()

    async def _numbers(self, shards: set[int]) -> dict[int, int | EscrowError]:
        found: dict[int, int | EscrowError] = {}
        for shard in shards:
            known = self._bus.router.known_shard(shard)
            try:
                find = self._bus.router.of_shard
                found[shard] = await asyncio.to_thread(find, shard, self._settings.timeout) if known is None else known
            except EscrowError as problem:
                found[shard] = problem
        return found

    def _lane(self, number: int, group: str) -> Lane:
        lane = self._lanes.get((number, group))
        if lane is None:
            if len(self._lanes) >= self._settings.max_groups * len(self._bus.router):
                raise Rejected(Code.TOO_MANY, "the gateway speaks for too many consumer groups already")
            lane = self._lanes[number, group] = self._bus.lane(
                self._bus.router.links[number],
                Exchange.SETTLE,
                SettlingCodec(),
                lambda: {"group": group},
                timeout=self._settings.timeout,
            )
        return lane


def _parse(text: str) -> LeaseHandle | EscrowError:
    """Parse a handle. Returns the error instead of raising it, because the other handles are independent."""
    try:
        return LeaseHandle.parse(text)
    except EscrowError as problem:
        return problem


async def _await_outcome(one: Awaitable[Code] | EscrowError) -> Code | EscrowError:
    if isinstance(one, EscrowError):
        return one
    try:
        return await one
    except EscrowError as problem:
        return problem
