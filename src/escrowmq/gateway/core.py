"""The gateway object that all routes share: a bus, a producer per group, receives, acknowledgements, look-ups."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from escrowmq.client.admin import Admin
from escrowmq.client.aio import AsyncBus
from escrowmq.client.consuming.options import subscribe
from escrowmq.client.entries import Health
from escrowmq.client.producing.own_ids import is_transaction_id, transaction_of_message
from escrowmq.errors import Code, EscrowError, Rejected
from escrowmq.gateway.addresses import Address
from escrowmq.gateway.asking import HttpChecker
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.gateway.producers import Producers
from escrowmq.gateway.receiving import Receiving
from escrowmq.gateway.settling import Settler
from escrowmq.model import TransactionId
from escrowmq.wire.actions import groups, transactions
from escrowmq.wire.actions.brokers import HELLO

T = TypeVar("T")
_log = logging.getLogger(__name__)

THREADS = 4
HEALTH_SECONDS = 2.0
SUBSCRIBED_SECONDS = 30.0
"""Cache lifetime (s) of a successful subscription."""


class Gateway:
    """Shared state of all routes over ``bus``, which it closes. It belongs to the event loop on which it is created.
    Producers for the groups with a check-back URL start at once."""

    def __init__(self, bus: AsyncBus, settings: GatewaySettings, addresses: Mapping[str, Address]) -> None:
        self.settings = settings
        self.bus = bus
        self._checkers = {group: HttpChecker(address) for group, address in addresses.items()}
        self.producers = Producers(bus, settings, self._checkers)
        self.settler = Settler(bus, settings)
        self.receiving = Receiving(bus, settings, self.settler)
        self.admin = Admin(bus.router, settings.timeout)
        self._threads = ThreadPoolExecutor(THREADS, "escrowmq-gateway")
        self._health_threads = ThreadPoolExecutor(1, "escrowmq-gateway-health")
        self._subscribed: dict[str, tuple[groups.Subscribe, float]] = {}
        self._shards: dict[int, int] = {}

    async def close(self, problem: EscrowError | None = None) -> None:
        """Finish work in flight within a short time, then close. Waiting receives end empty, or with the error."""
        await self.receiving.close(problem)
        await self.settler.close()
        await self.bus.close()
        for checker in self._checkers.values():
            await checker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._health_threads.shutdown(wait=False, cancel_futures=True)

    async def on_thread(self, function: Callable[..., T], *args: Any, **given: Any) -> T:
        """Run a blocking function on one of a few threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **given))

    async def subscribe(self, request: groups.Subscribe) -> None:
        """Create or join a consumer group, unless that was done recently. Raises SUBSCRIPTION_MISMATCH and so on."""
        group = request["group"]
        known = self._subscribed.get(group)
        if known is not None and known[0] == request and time.monotonic() < known[1]:
            return
        if known is None and len(self._subscribed) >= self.settings.max_groups:
            raise Rejected(Code.TOO_MANY, "the gateway speaks for too many consumer groups already")

        def subscribe_all() -> None:
            router, deadline = self.bus.router, time.monotonic() + self.settings.timeout
            answers = router.every(
                lambda n: subscribe(router.links[n], request, deadline, router.attendances[n]), self.settings.timeout
            )
            reached = {number for number, _ in answers.found}
            for number in set(range(len(router))) - reached:
                router.presence.when_back(number, partial(self._subscribe_late, number, request))

        await self.on_thread(subscribe_all)
        self._subscribed[group] = (request, time.monotonic() + SUBSCRIBED_SECONDS)

    def _subscribe_late(self, number: int, request: groups.Subscribe) -> None:
        """Create or join a consumer group at a broker that has become reachable."""
        deadline = time.monotonic() + self.settings.timeout
        try:
            self.bus.router.ask(number, groups.SUBSCRIBE(request), deadline)
        except EscrowError as problem:  # the next request subscribes again
            _log.warning("%s at %s: %s", request["group"], self.bus.router.links[number].address, problem)

    async def shard(self, number: int) -> int:
        """Return the shard of a broker by the broker's number; cached after the first request."""
        if number not in self._shards:
            router = self.bus.router
            deadline = time.monotonic() + self.settings.timeout
            answer = await self.on_thread(router.ask, number, HELLO({}), deadline)
            self._shards[number] = answer["shard"]
            router.learn_shard(number, self._shards[number])
        return self._shards[number]

    async def transaction_named(self, group: str, text: str) -> TransactionId:
        """Return the transaction that a text names: by its printed id, or by its producer's own message id. Raises
        UNKNOWN_TRANSACTION; BAD_ARGUMENT if several transactions of the group contain the message id."""
        if is_transaction_id(text):
            return TransactionId.parse(text)
        return await self.on_thread(transaction_of_message, self.bus.router, text, group, self.settings.timeout)

    async def transaction(self, identity: TransactionId) -> transactions.Transaction:
        """Return the state of a transaction, without message bodies. Raises UNKNOWN_TRANSACTION, WRONG_SHARD."""

        def ask() -> transactions.Transaction:
            number = self.bus.router.of_shard(identity.shard, self.settings.timeout)
            deadline = time.monotonic() + self.settings.timeout
            call = transactions.LIST({"after": identity.position - 1, "limit": 1})
            found = self.bus.router.ask(number, call, deadline)["transactions"]
            if not found or found[0]["id"] != str(identity):
                raise Rejected(Code.UNKNOWN_TRANSACTION, f"no transaction {identity} on this broker")
            return found[0]

        return await self.on_thread(ask)

    async def health(self) -> list[Health]:
        """Return the health that each broker reports, within HEALTH_SECONDS."""
        admin = Admin(self.bus.router, HEALTH_SECONDS)
        return await asyncio.get_running_loop().run_in_executor(self._health_threads, admin.health)
