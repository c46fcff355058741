"""Leases that the server renews while a push consumer handles its messages, as RocketMQ's proxy does.

A push consumer asks for ``auto_renew`` and never extends a lease itself. The server extends it, until the consumer
acknowledges or returns the message, has been silent for SILENT_SECONDS, or MOST_SECONDS have passed.

A client is its id at the gateway of its credential: ids are chosen by clients, so another credential with the same id
is another client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from escrowmq.client.consuming.options import delay_us
from escrowmq.errors import EscrowError
from escrowmq.gateway.core import Gateway
from escrowmq.model import Act

_log = logging.getLogger(__name__)

RENEWED_SECONDS = 60.0
"""Lease (s) of a message that is renewed, which is what RocketMQ's proxy uses."""
INTERVAL_SECONDS = 20.0
SILENT_SECONDS = 60.0
"""Time (s) without a heartbeat (every 10 s) after which a client's leases are left to end."""
MOST_SECONDS = 3 * 3600.0

Client = tuple[Gateway, str]


@dataclass(frozen=True, slots=True)
class _Renewed:
    group: str
    since: float


class Renewing:
    """The handles whose leases are renewed, by client."""

    def __init__(self) -> None:
        self._handles: dict[Client, dict[str, _Renewed]] = {}
        self._seen: dict[Client, float] = {}

    def add(self, client: Client, group: str, handles: Sequence[str]) -> None:
        """Renew the leases of messages that a client received."""
        self._seen[client] = time.monotonic()
        self._handles.setdefault(client, {}).update(dict.fromkeys(handles, _Renewed(group, time.monotonic())))

    def stop(self, client: Client, handles: Sequence[str]) -> None:
        """Stop renewing messages that a client settles."""
        if (own := self._handles.get(client)) is not None:
            for handle in handles:
                own.pop(handle, None)

    def drop(self, client: Client) -> None:
        """Stop renewing everything of a client."""
        self._handles.pop(client, None)
        self._seen.pop(client, None)

    def on_heartbeat(self, client: Client) -> None:
        """Note that a client is there, if leases of it are renewed."""
        if client in self._seen:
            self._seen[client] = time.monotonic()

    async def run(self) -> None:
        """Renew every INTERVAL_SECONDS, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            await self.renew(time.monotonic())

    async def renew(self, now: float) -> None:
        """Extend the leases of all clients that are there."""
        for client in [one for one, seen in self._seen.items() if now - seen > SILENT_SECONDS]:
            self.drop(client)
        batches: dict[tuple[Gateway, str], list[tuple[Client, str]]] = {}
        for client, handles in self._handles.items():
            for handle, renewed in list(handles.items()):
                if now - renewed.since > MOST_SECONDS:
                    del handles[handle]
                else:
                    batches.setdefault((client[0], renewed.group), []).append((client, handle))
        for (gateway, group), owned in batches.items():
            try:
                texts = [handle for _, handle in owned]
                outcomes = await gateway.settler.settle(group, texts, Act.EXTEND, delay_us(RENEWED_SECONDS), None)
            except EscrowError as problem:
                _log.warning("leases of %s could not be renewed: %s", group, problem)
                continue
            for (client, handle), outcome in zip(owned, outcomes, strict=True):
                if isinstance(outcome, EscrowError):
                    self.stop(client, [handle])
