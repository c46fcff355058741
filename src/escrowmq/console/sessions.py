"""Sessions of the console: each belongs to a token, which the brokers authenticate.

Rules:

1. A session begins with a token that all brokers accept, and has a random cookie. The token itself is in no cookie.
2. Sessions with the same token share a :class:`Console`. It is closed with its last session and page.
3. The brokers identify the token twice a second. A revoked or expired token ends its sessions; brokers that do not
   respond end nothing.
4. Without a session, pages are open if the brokers need no login, and otherwise lead to the login page. Until a broker
   has responded, nothing is shown.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from escrowmq.console.core import Console
from escrowmq.console.limits import ConsoleSettings
from escrowmq.errors import Code, EscrowError, Overloaded, error
from escrowmq.rights.failures import Failures

logger = logging.getLogger(__name__)

CHECKED_SECONDS = 0.5
"""How long the brokers' answer about a token holds."""
PROBE_SECONDS = 5.0
"""How long the brokers' answer about the need to log in holds."""
MOST_LOGINS = 8
"""Logins at the same time. Above: 503."""
MAX_TOKEN = 1024
_ENDED = frozenset({Code.UNAUTHENTICATED, Code.CLOSED})
"""Errors after which a token is not used again: it was revoked, or its connection ended with it."""

Make = Callable[[str], Console]
"""Makes the console of a token; "" stands for none."""


class LoginNeeded(Exception):
    """The page needs a session."""


@dataclass(eq=False)
class _Entry:
    """A console with the number of its sessions and pages."""

    key: bytes
    console: Console
    uses: int = 0
    checked: float = -math.inf
    check: asyncio.Future[None] | None = None


@dataclass(eq=False)
class _Session:
    entry: _Entry
    began: float
    used: float


class Sessions:
    """The sessions of one console server, used on its event loop alone.

    ``needs_login``: whether the brokers need a login; None: they are asked.
    """

    def __init__(self, make: Make, settings: ConsoleSettings, *, needs_login: bool | None) -> None:
        self._make = make
        self._settings = settings
        self._asks_brokers = needs_login is None
        self._needs_login = needs_login
        self._open = None if needs_login else _Entry(b"", make(""), uses=1)
        self._sessions: dict[str, _Session] = {}  # by cookie, the one used last at the end
        self._entries: dict[bytes, _Entry] = {}  # by the token's hash
        self._logins = ThreadPoolExecutor(MOST_LOGINS, "escrowmq-console-login")
        self._logging_in = 0
        self._failures = Failures()
        self._unclaimed: set[Console] = set()  # of logins that have not come to their end
        self._closing: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to sample for pages without a session."""
        if self._open is not None:
            self._open.console.sampler.is_active = self._needs_login is False
            self._open.console.start()

    def close(self) -> None:
        """Close all consoles, after the event loop has ended."""
        self._logins.shutdown(wait=True, cancel_futures=True)
        entries = [*self._entries.values(), *([self._open] if self._open is not None else [])]
        for console in [*self._unclaimed, *(entry.console for entry in entries)]:
            self._close_later(console)
        for thread in self._closing:
            thread.join()

    # Pages

    @asynccontextmanager
    async def enter(self, cookie: str | None) -> AsyncIterator[Console]:
        """Provide the console for a page. Raises LoginNeeded."""
        session = self._find(cookie)
        entry = await self._open_entry() if session is None else session.entry
        entry.uses += 1
        try:
            if session is not None:
                await self._check(entry)
                if self._entries.get(entry.key) is not entry:
                    raise LoginNeeded
            try:
                yield entry.console
            except EscrowError as problem:
                if problem.code is Code.UNAUTHENTICATED and self._reject(entry):
                    raise LoginNeeded from problem
                raise
        finally:
            self._release(entry)

    def _find(self, cookie: str | None) -> _Session | None:
        """Return the session of a cookie, unless it has expired."""
        session = self._sessions.pop(cookie or "", None)
        if session is None or cookie is None:
            return None
        self._sessions[cookie] = session
        if self._is_expired(session):
            self.end(cookie)
            return None
        session.used = time.monotonic()
        return session

    def _is_expired(self, session: _Session) -> bool:
        now, settings = time.monotonic(), self._settings
        idle = now - session.used >= settings.idle_seconds and not session.entry.console.jobs.is_running
        return idle or now - session.began >= settings.session_seconds

    async def _open_entry(self) -> _Entry:
        if self._open is not None and self._asks_brokers:
            await self._check(self._open)
        if self._needs_login is None:
            text = "no broker has responded yet, so it is not known whether a login is needed"
            raise Overloaded(Code.BROKER_AWAY, text, "start the broker, then load this page again")
        if self._needs_login or self._open is None:
            raise LoginNeeded
        return self._open

    def _reject(self, entry: _Entry) -> bool:
        """Act on the answer UNAUTHENTICATED. Returns whether a login helps."""
        if entry is not self._open:
            self._end_all(entry)
        elif self._asks_brokers:
            self._needs_login = True
            entry.console.sampler.is_active = False
        return entry is not self._open or self._asks_brokers

    # Checks

    async def _check(self, entry: _Entry) -> None:
        """Have the brokers identify the caller, unless they did so a moment ago."""
        holds = PROBE_SECONDS if entry is self._open and self._needs_login is not None else CHECKED_SECONDS
        if entry.check is None and time.monotonic() - entry.checked < holds:
            return
        if entry.check is None:
            entry.check = asyncio.ensure_future(self._identify(entry))
        await asyncio.shield(entry.check)

    async def _identify(self, entry: _Entry) -> None:
        entry.uses += 1
        began = time.monotonic()
        try:
            await asyncio.get_running_loop().run_in_executor(entry.console.checks, entry.console.identify)
            if entry is self._open:
                self._needs_login = False
        except EscrowError as problem:
            if problem.code in _ENDED:
                self._reject(entry)
            else:
                began = time.monotonic()  # pages do not wait for it again at once
        finally:
            entry.checked, entry.check = began, None
            self._release(entry)

    async def watch(self) -> None:
        """Check the tokens of all sessions twice a second, and end sessions that have expired."""
        while True:
            await asyncio.sleep(CHECKED_SECONDS)
            for cookie in [cookie for cookie, session in self._sessions.items() if self._is_expired(session)]:
                self.end(cookie)
            await asyncio.gather(*map(self._check, list(self._entries.values())), return_exceptions=True)
            self._closing = [thread for thread in self._closing if thread.is_alive()]

    # Begin and end

    async def needs_login(self) -> bool:
        """Return whether pages need a session. Raises Overloaded(BROKER_AWAY) while it is not known."""
        try:
            await self._open_entry()
        except LoginNeeded:
            return True
        return False

    async def begin(self, token: str, source: str, old: str | None, cookie: str) -> None:
        """Begin a session of a token under a new cookie, in place of that of the old cookie. ``source``: the visitor's
        address; after failures it waits.

        Raises Denied(UNAUTHENTICATED), Overloaded, or what prevents the brokers from answering.
        """
        await self._failures.wait(source)
        try:
            if not 0 < len(token) <= MAX_TOKEN:
                raise error(Code.UNAUTHENTICATED)
            entry = await self._authenticate(token)
        except EscrowError as problem:
            if problem.code is Code.UNAUTHENTICATED:
                self._failures.note(source)
            raise
        entry.uses += 1
        self.end(old)
        while len(self._sessions) >= self._settings.max_sessions:
            self.end(next(iter(self._sessions)))
        now = time.monotonic()
        self._sessions[cookie] = _Session(entry, now, now)

    async def _authenticate(self, token: str) -> _Entry:
        """Return the entry of a token that the brokers accept now."""
        if self._logging_in >= MOST_LOGINS:
            raise Overloaded(Code.QUEUE_FULL, "too many logins at once", "try again")
        began = time.monotonic()
        self._logging_in += 1
        opening = asyncio.get_running_loop().run_in_executor(self._logins, self._open_console, token)
        opening.add_done_callback(self._on_opened)
        try:
            console = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._discard)
            raise
        self._unclaimed.discard(console)
        logger.info("%s logged in", console.user)
        key = hashlib.sha256(token.encode()).digest()
        if (entry := self._entries.get(key)) is not None:
            self._close_later(console)
            return entry
        entry = self._entries[key] = _Entry(key, console, checked=began)
        console.start()
        return entry

    def _open_console(self, token: str) -> Console:
        console = self._make(token)
        try:
            console.identify()
        except BaseException:
            console.close()
            raise
        self._unclaimed.add(console)
        return console

    def _on_opened(self, _: object) -> None:
        self._logging_in -= 1

    def _discard(self, opening: asyncio.Future[Console]) -> None:
        """Close the console of a login whose request was cancelled."""
        if not opening.cancelled() and opening.exception() is None:
            self._unclaimed.discard(opening.result())
            self._close_later(opening.result())

    def end(self, cookie: str | None) -> None:
        """End the session of a cookie, if there is one."""
        if (session := self._sessions.pop(cookie or "", None)) is not None:
            self._release(session.entry)

    def _end_all(self, entry: _Entry) -> None:
        """End all sessions of a token."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        for cookie in [cookie for cookie, session in self._sessions.items() if session.entry is entry]:
            self.end(cookie)

    def _release(self, entry: _Entry) -> None:
        entry.uses -= 1
        if not entry.uses:
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
            self._close_later(entry.console)

    def _close_later(self, console: Console) -> None:
        """Close a console on a thread: running jobs first finish their batch."""
        thread = threading.Thread(target=console.close, name="escrowmq-console-close")
        thread.start()
        self._closing.append(thread)
