"""Which client's stream gets a check-back when the sender is dying, or does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import escrowmq as mq
from escrowmq.gateway.callers import Callers
from escrowmq.gateway.core import Gateway
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.gateway.rocketmq import clients as clients_module
from escrowmq.gateway.rocketmq.clients import Clients
from escrowmq.gateway.rocketmq.endpoints import Endpoints
from escrowmq.gateway.rocketmq.mapping import CLIENT
from escrowmq.gateway.rocketmq.protocol import definition, service
from escrowmq.gateway.rocketmq.service import MessagingService
from escrowmq.model import Check, CheckedMessage, Outcome, TransactionId

PATIENCE = 90.0


class Call:
    """A client's telemetry call. A write takes until ``room`` is set."""

    def __init__(self, client: str, topic: str) -> None:
        self._client = client
        self._topic = topic
        self.writing, self.room = asyncio.Event(), asyncio.Event()
        self.checks: asyncio.Queue[Any] = asyncio.Queue()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-mq-client-id", self._client),)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def requests(self) -> AsyncIterator[Any]:
        publishing = definition.Publishing(topics=[definition.Resource(name=self._topic)])
        yield service.TelemetryCommand(settings=definition.Settings(publishing=publishing))
        await asyncio.Event().wait()

    async def write(self, command: Any) -> None:
        self.writing.set()
        await self.room.wait()
        if command.HasField("recover_orphaned_transaction_command"):
            self.checks.put_nowait(command.recover_orphaned_transaction_command.transaction_id)


class Asking:
    """Asks for one transaction as the broker does."""

    def __init__(self, clients: Clients, gateway: Gateway, check: Check) -> None:
        self._clients = clients
        self._gateway = gateway
        self._check = check
        self.id = str(check.transaction_id)

    async def ask(self) -> Outcome:
        return await self._clients.decide(self._gateway, self._check)

    async def answer(self, call: Call) -> Outcome:
        """Ask, and let the client of ``call`` commit."""
        deciding = asyncio.create_task(self.ask())
        assert await call.checks.get() == self.id
        self._clients.on_answer(self._gateway, self.id, Outcome.COMMIT)
        return await deciding


def run(broker: str, topic: str, folder: Path, body: Any) -> None:
    """Run a coroutine function with a gateway's clients, and the calls of two: the sender of ``check``, and another."""
    message = CheckedMessage(topic, b"half", None, None, {CLIENT: "sender"}, bytes(16), datetime.now(UTC))
    check = Check(TransactionId.from_bytes(bytes(15) + b"\1"), 1, (message,))

    async def main() -> None:
        callers = Callers(mq.aconnect, GatewaySettings(), {}, await mq.aconnect(broker), has_credential=False)
        made = MessagingService(callers, Endpoints((1, 2), folder, None), None, lambda group: False)
        calls = Call("sender", topic), Call("other", topic)
        tasks = [asyncio.create_task(made.Telemetry(call.requests(), call)) for call in calls]
        try:
            async with asyncio.timeout(PATIENCE):
                for call in calls:
                    await call.writing.wait()
                await body(Asking(made.clients, callers.own, check), *calls, tasks[0])
        finally:
            for call, task in zip(calls, tasks, strict=True):
                call.room.set()
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await callers.close()

    asyncio.run(main())


def test_a_client_that_died_while_it_was_written_to_is_not_asked(broker: str, topic: str, tmp_path: Path) -> None:
    async def body(asking: Asking, sender: Call, other: Call, serving: asyncio.Task[None]) -> None:
        other.room.set()
        for _ in range(2):  # gRPC cancels the call of a client that is gone, and again while the write is awaited
            serving.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
        assert await asking.answer(other) is Outcome.COMMIT
        assert sender.checks.empty()
        sender.room.set()
        with suppress(asyncio.CancelledError):
            await serving

    run(broker, topic, tmp_path, body)


def test_another_client_is_asked_after_the_sender_did_not_answer(
    broker: str, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(asking: Asking, sender: Call, other: Call, serving: asyncio.Task[None]) -> None:
        sender.room.set()
        other.room.set()
        monkeypatch.setattr(clients_module, "ANSWER_SECONDS", 0.05)
        assert await asking.ask() is Outcome.UNKNOWN
        assert await sender.checks.get() == asking.id
        monkeypatch.setattr(clients_module, "ANSWER_SECONDS", PATIENCE)
        assert await asking.answer(other) is Outcome.COMMIT
        assert sender.checks.empty()

    run(broker, topic, tmp_path, body)
