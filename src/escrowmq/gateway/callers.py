"""The callers of the gateway: it passes each request on with the token of its ``Authorization`` header.

The gateway has no rights of its own. Requests with the same token share one connection to the broker; requests without
a token share one that has none, which a broker with a rights file rejects. Only check-backs, which no request carries,
use the credential of the gateway's process.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from escrowmq.client.aio import AsyncBus
from escrowmq.errors import Code, EscrowError, Overloaded, error
from escrowmq.gateway.addresses import Address
from escrowmq.gateway.core import Gateway
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.rights.failures import Failures
from escrowmq.wire.link import ReturningLink

MOST_CALLERS = 256
"""Tokens with an open connection. Above, the one idle longest is closed; if none is idle, the request is refused."""
_ENDED = frozenset({Code.UNAUTHENTICATED, Code.CLOSED})
"""Errors after which a connection is not used again: its token was revoked, or it is closed."""

Connect = Callable[[str | None], Awaitable[AsyncBus]]
"""Connects with a token; "" stands for none, None for the credential of this process."""


@dataclass(eq=False)
class _Caller:
    gateway: asyncio.Future[Gateway]
    requests: int = 0


class Callers:
    """A :class:`Gateway` for each token. ``own`` answers health checks and sends check-backs to their addresses; unless
    it has a credential, it serves requests without a token, too."""

    def __init__(
        self,
        connect: Connect,
        settings: GatewaySettings,
        addresses: Mapping[str, Address],
        own: AsyncBus,
        *,
        has_credential: bool,
    ) -> None:
        self._connect = connect
        self._has_credential = has_credential
        self._settings = settings
        self.own = Gateway(own, settings, addresses)
        self._callers: dict[bytes, _Caller] = {}  # by the token's hash, the one used last at the end
        self._failures = Failures()
        self._is_closed = False

    async def enter(self, authorization: str, source: str) -> tuple[bytes, Gateway]:
        """Return the gateway for an ``Authorization`` header, and the key for :meth:`leave`, which must follow.
        ``source``: the client's address; after failures its unknown tokens wait.

        Raises Denied(UNAUTHENTICATED) for another scheme than Bearer, Overloaded(QUEUE_FULL), Unknown(CLOSED) while the
        gateway stops, or what the broker answers to the token.
        """
        if self._is_closed:
            raise error(Code.CLOSED)
        scheme, _, token = authorization.partition(" ")
        key = hashlib.sha256(token.strip().encode()).digest()
        if not self._is_known(key):
            await self._failures.wait(source)
        if authorization and (scheme.lower() != "bearer" or not token.strip()):
            self._failures.note(source)
            raise error(Code.UNAUTHENTICATED, "the Authorization header has no bearer token")
        if not token.strip() and not self._has_credential:
            return b"", self.own
        caller = self._callers.pop(key, None)
        if caller is None:
            idle = self._take_idle() if len(self._callers) >= MOST_CALLERS else None
            caller = _Caller(asyncio.ensure_future(self._open(token.strip(), idle)))
        self._callers[key] = caller
        caller.requests += 1
        try:
            return key, await asyncio.shield(caller.gateway)
        except BaseException:
            caller.requests -= 1
            if caller.gateway.done() and caller.gateway.exception() and self._callers.get(key) is caller:
                del self._callers[key]
            raise

    def _is_known(self, key: bytes) -> bool:
        """Return whether a broker has accepted the token."""
        caller = self._callers.get(key)
        if caller is None or not caller.gateway.done() or caller.gateway.exception():
            return False
        links = caller.gateway.result().bus.router.links
        return any(isinstance(link, ReturningLink) and link.state.is_there for link in links)

    async def _open(self, token: str, idle: Gateway | None) -> Gateway:
        if idle is not None:
            await idle.close()
        return Gateway(await self._connect(token), self._settings, {})

    def _take_idle(self) -> Gateway | None:
        """Remove the caller that is idle longest; return its gateway, None if it could not connect."""
        for key, caller in self._callers.items():
            if caller.gateway.done() and not caller.requests:
                del self._callers[key]
                return None if caller.gateway.exception() else caller.gateway.result()
        raise Overloaded(Code.QUEUE_FULL, f"{MOST_CALLERS} tokens have requests at the gateway at the same time")

    async def leave(self, key: bytes, gateway: Gateway, source: str, problem: BaseException | None) -> None:
        """End a request. ``problem``: the error that it raised; after some the connection is not used again."""
        if isinstance(problem, EscrowError) and problem.code is Code.UNAUTHENTICATED:
            self._failures.note(source)
        caller = self._callers.get(key)
        if caller is None or not caller.gateway.done() or caller.gateway.result() is not gateway:
            return
        caller.requests -= 1
        if isinstance(problem, EscrowError) and problem.code in _ENDED:
            del self._callers[key]
            await gateway.close(problem)

    async def fail(self, source: str) -> None:
        """Count a wrong credential of an address that no broker has seen, and wait as long as the address must."""
        self._failures.note(source)
        await self._failures.wait(source)

    async def end_waiting(self) -> None:
        """End waiting receives, without messages."""
        for gateway in self._gateways():
            await gateway.receiving.close()

    async def close(self) -> None:
        """Finish work in flight within a short time, then close all connections."""
        self._is_closed = True
        for gateway in self._gateways():
            await gateway.close()

    def _gateways(self) -> list[Gateway]:
        opened = [caller.gateway for caller in self._callers.values() if caller.gateway.done()]
        return [self.own, *(one.result() for one in opened if one.exception() is None)]
