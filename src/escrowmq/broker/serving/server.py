"""The server: one thread accepts, reads and closes all connections; the threads that produce answers send them.

Rules, checked a few times a second:

1. A connection without a greeting is closed after ``SILENT_SECONDS``; under pressure (more than half of the limit)
   after ``PRESSED_SECONDS``. A frame must be complete ``FRAME_SECONDS`` after its first byte.
2. Above the limit of connections one without a greeting is closed; when another client greets, one that never sent a
   request; then one without pending work; then any other. Among equals the one that was silent longest. Nothing is
   accepted while no descriptor is free.
3. Incomplete frames may together announce a quarter of all room; above, the connection that has sent nothing for
   longest, and at least for ``STUCK_SECONDS``, is closed. Their received bytes have the same limit; above, the largest
   is closed.
4. A failure of one connection closes that connection. A failure of the thread is logged, all connections are closed,
   and the thread begins again.
5. A connection that does not read its answers while memory is short is closed.
6. After more than a sixteenth of all room was in use, freed memory is returned to the system: glibc would keep it.
7. While ``MOST_WAITING`` refusals are delayed, connections from addresses with failures are closed unread. Once
   connections without a greeting have taken ``STRANGERS_SECONDS`` since the last check, and some of them greeted with a
   wrong token, all wait for the next check: half of the time is for clients that are known.
"""

from __future__ import annotations

import itertools
import logging
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from escrowmq.broker.calls import Dispatcher
from escrowmq.broker.serving.connection import Connection
from escrowmq.broker.serving.eviction import find_least_useful, find_unfinished
from escrowmq.broker.serving.requests import MAX_REQUESTS, Requests
from escrowmq.broker.serving.room import Room
from escrowmq.broker.serving.streams import Workers
from escrowmq.errors import EscrowError
from escrowmq.platform.descriptors import connection_share
from escrowmq.platform.listening import shown
from escrowmq.platform.memory import return_freed_memory
from escrowmq.rights import Guard
from escrowmq.wire import PROTOCOL_VERSION, Json, frames
from escrowmq.wire.actions import brokers
from escrowmq.wire.channel import Channel, PlainChannel, TlsChannel
from escrowmq.wire.frames import FRAME_ROOM, MAX_HELLO_BYTES, Frame
from escrowmq.wire.packing import MAX_REQUEST_BYTES

SILENT_SECONDS = 5.0
PRESSED_SECONDS = 0.1
LOOK_SECONDS = 0.25
HURRIED_SECONDS = 0.02
"""Retry interval while a request waits for room."""
FRAME_SECONDS = 60.0
NO_DESCRIPTOR_SECONDS = 0.2
QUIET_SECONDS = 1.0
"""Little memory must be in use this long before freed memory is returned to the system."""
RESTART_SECONDS = 1.0
ACCEPTED_AT_ONCE = 64
ATTACKED_AT_ONCE = 4
"""Connections that are accepted, and greetings that are read, between two rounds while greetings are wrong."""
STRANGERS_SECONDS = LOOK_SECONDS / 2
"""See rule 7. Refusing a greeting takes about 100 µs of processor time, closing it unread about 20 µs."""
READ_AT_ONCE = 64
"""Connections that are read before their requests start: limits the bytes that are read but not counted."""
OVER_BOUND = 8
"""Connections above the limit that may wait for their greeting."""
ANSWER_ROOM = 16 << 20
"""Bytes of an answer beyond the limit of its request: uncounted columns, frames, padding."""

logger = logging.getLogger(__name__)


class Server:
    """Serves the calls of one broker on listening sockets, and closes these at the end.

    ``room`` limits pending work; by default it follows the broker's settings. ``tls``: settings of TCP connections;
    None: without TLS, like Unix sockets. ``guard``: the rights of clients; None: everybody may do everything.
    """

    def __init__(
        self,
        calls: Dispatcher,
        listeners: Sequence[socket.socket],
        version: str,
        *,
        tls: ssl.SSLContext | None = None,
        room: Room | None = None,
        guard: Guard | None = None,
    ) -> None:
        settings = calls.settings
        self._calls = calls
        self.room = room or Room(settings.max_held_bytes, settings.max_calls, calls.refused)
        self._listeners = list(listeners)
        self._tls = tls
        self._guard = guard
        self._max_connections = settings.max_connections
        self._unfinished = self.room.most_bytes // 4
        self._version = version
        self._most_request = max(2 * settings.max_batch_bytes, MAX_REQUEST_BYTES) + FRAME_ROOM
        self._most_answer = settings.max_batch_bytes + ANSWER_ROOM
        self._workers = Workers()
        self._scratch = memoryview(bytearray(frames.SCRATCH_BYTES))
        self._clients: dict[Connection, Requests] = {}
        self._reported: deque[Connection] = deque()  # connections that other threads report
        self._paused: dict[Connection, None] = {}  # wait for answers, for the client to read, or for room
        self._numbers = itertools.count(1)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._awake = self._closing_all = False
        self._ending: float | None = None  # deadline to close all connections
        self._listen_again: float | None = None  # while nothing is accepted
        self._return_at = 0.0  # when freed memory is returned (monotonic seconds); 0: there is little
        self._last_warning = 0.0
        self._wrong_then = 0  # wrong greetings before the last check
        self._strangers_took = 0.0  # seconds since then
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._past = [0, 0, 0]  # requests, bytes in and out, of closed connections
        self._counting = threading.Lock()  # so that each connection is counted once, open or closed
        self.accepted = 0
        """Accepted connections since the start."""
        self._thread = threading.Thread(target=self._work, name="escrowmq-server", daemon=True)

    def start(self) -> None:
        """Start the server's thread, which accepts connections."""
        self._thread.start()

    def stop(self, grace: float = 0.25) -> None:
        """Accept no more, send GONE, send pending answers for up to ``grace`` seconds, then close everything.

        Stop the engine first: then every call has an answer.
        """
        self._ending = time.monotonic() + grace
        self._wake_loop()
        if self._thread.ident is not None:
            self._thread.join()
        self._workers.close()
        for one in (*self._listeners, self._wake, self._woken):
            one.close()
        self._selector.close()

    def close_all(self) -> None:
        """Close the connections of all clients soon, so that they search for the leader. From any thread."""
        self._closing_all = True
        self._wake_loop()

    def _welcome(self) -> tuple[frames.Welcome, Json]:
        """Return the limits of this server, and the broker's answer to ``hello``, for a client that greets."""
        limits = frames.Welcome(
            frames.FORMAT_VERSION, PROTOCOL_VERSION, self._version, self._most_request, MAX_REQUESTS, self._most_answer
        )
        return limits, self._calls.action(brokers.HELLO.name, {})

    @property
    def bound(self) -> int:
        """The limit of open connections: the setting, or less if the process may not have as many descriptors."""
        return min(self._max_connections, connection_share())

    def numbers(self) -> dict[str, float]:
        """Return the metrics of connections, a number by name, for the action ``stats``."""
        with self._counting:
            clients = list(self._clients.items())
            requests, received, sent = self._past
        return {
            "connections": len(clients),
            "connections_total": self.accepted,
            "requests_total": requests + sum(asked.count for _, asked in clients),
            "received_bytes_total": received + sum(connection.received for connection, _ in clients),
            "sent_bytes_total": sent + sum(connection.sent for connection, _ in clients),
        }

    def _wake_loop(self, connection: Connection | None = None) -> None:
        """Wake the server's thread; with a connection, it then updates that one. From any thread."""
        if connection is not None:
            self._reported.append(connection)
        if not self._awake:
            self._awake = True
            with suppress(OSError):  # full: the loop is awake; closed: it has ended
                self._wake.send(b"\0")

    # The loop: everything below runs on its thread.

    def _work(self) -> None:
        while self._ending is None or self._clients:
            try:
                self._loop()
            except Exception:
                logger.exception("the server failed; its connections are closed, and it begins again")
                self._begin_anew()

    def _begin_anew(self) -> None:
        for connection in list(self._clients):
            self._close(connection)
        self._selector.close()
        self._selector = selectors.DefaultSelector()
        if self._ending is None:
            time.sleep(RESTART_SECONDS)  # a permanent failure must not repeat without a pause

    def _loop(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listen()
        next_check = next_retry = 0.0
        sent_gone = False
        self._calls.run_rounds_here()
        while self._ending is None or self._clients:
            ready = self._selector.select(max(min(next_check, next_retry) - time.monotonic(), 0.0))
            try:
                self._work_on(ready)
                if self._closing_all:
                    self._closing_all = False
                    for connection in list(self._clients):
                        self._close(connection)
                if self._ending is not None and not sent_gone:
                    sent_gone = True
                    self._send_gone()
                now = time.monotonic()
                if now >= next_check:
                    self._check_rules(now)
                    next_check = now + (LOOK_SECONDS if self._ending is None else HURRIED_SECONDS)
                if now >= next_retry:
                    self._retry_paused()
                    next_retry = now + (HURRIED_SECONDS if self._paused else LOOK_SECONDS)
            finally:
                self._calls.run()  # started requests, even after a failure

    def _work_on(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Read what clients sent and start their requests; then accept connections, and update those that other threads
        reported. ``ready``: sockets with their events."""
        came: list[tuple[Connection, list[Frame]]] = []
        strangers: list[tuple[selectors.SelectorKey, int]] = []
        for key, mask in ready:
            asked = self._clients.get(key.fileobj) if isinstance(key.fileobj, Connection) else None
            if asked is not None and asked.welcomed:
                self._ready(cast(Connection, key.fileobj), mask, came)
            elif key.fileobj is self._woken:
                self._awake = False
                self._woken.recv(4096)
            else:
                strangers.append((key, mask))
        self._take(came)
        if strangers:
            self._calls.run()
            began = time.monotonic()
            self._work_on_strangers(strangers)
            self._strangers_took += time.monotonic() - began
        self._attend()

    def _work_on_strangers(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Accept connections, and read greetings; only a few at a time while greetings have wrong tokens (rule 7)."""
        came: list[tuple[Connection, list[Frame]]] = []
        is_attacked = self._guard is not None and self._guard.unauthenticated > self._wrong_then
        most = ATTACKED_AT_ONCE if is_attacked else ACCEPTED_AT_ONCE
        for key, mask in ready[:most]:
            if isinstance(key.fileobj, Connection):
                self._ready(key.fileobj, mask, came)
            elif is_attacked and self._strangers_took >= STRANGERS_SECONDS:
                self._pause(0.0)
            else:
                self._accept(key.fileobj, most)  # type: ignore[arg-type]  # a listening socket
        self._take(came)

    def _listen(self) -> None:
        self._listen_again = None
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def _pause(self, seconds: float) -> None:
        """Stop accepting connections for ``seconds``."""
        if self._listen_again is None:
            self._listen_again = time.monotonic() + seconds
            for listener in self._listeners:
                self._selector.unregister(listener)

    def _accept(self, listener: socket.socket, most: int) -> None:
        """Accept up to ``most`` connections. Those that are closed unread do not count, up to ``ACCEPTED_AT_ONCE``."""
        for _ in range(ACCEPTED_AT_ONCE):
            if self._listen_again is not None or self._ending is not None or not most:
                return
            try:
                accepted, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as problem:  # no descriptor, or no memory
                if time.monotonic() - self._last_warning > 10.0:
                    self._last_warning = time.monotonic()
                    logger.warning("a connection cannot be accepted: %s", problem)
                self._evict(greeted=False)
                self._pause(NO_DESCRIPTOR_SECONDS)
                return
            source = str(address[0]) if isinstance(address, tuple) else "unix"
            if self._guard is not None and self._guard.failures.is_unread(source):
                accepted.close()
            else:
                self._add(accepted, address, source)
                most -= 1

    def _add(self, accepted: socket.socket, address: object, source: str) -> None:
        accepted.setblocking(False)
        at = f"{shown(source)}:{address[1]}" if isinstance(address, tuple) else source
        peer = f"{next(self._numbers)}:{at}"
        local = accepted.family == socket.AF_UNIX
        channel: Channel = (
            PlainChannel(accepted) if self._tls is None or local else TlsChannel(accepted, self._tls, server=True)
        )
        assembler = frames.Assembler(MAX_HELLO_BYTES, self._scratch)
        connection = Connection(channel, peer, self._most_answer, self._wake_loop, assembler)
        over = len(self._clients) - self.bound
        if over >= 0 and not self._evict(greeted=False) and over >= OVER_BOUND:
            connection.close()
            return
        self.accepted += 1
        self._clients[connection] = Requests(
            self._calls, self.room, connection, self._workers, self._welcome, self._guard, source
        )
        self._wait_for(connection, selectors.EVENT_READ)

    def _evict(self, *, greeted: bool, but: Connection | None = None) -> bool:
        """Close the least useful connection, except ``but`` (rule 2). Returns whether there was one. ``greeted``: also
        among those that have greeted."""
        connection = find_least_useful(self._clients, greeted=greeted, but=but)
        if connection is None:
            return False
        logger.info("closing a connection, there are too many: %s", connection.peer)
        self._close(connection)
        return True

    def _ready(self, connection: Connection, mask: int, came: list[tuple[Connection, list[Frame]]]) -> None:
        """Write to and read from one connection, by the events in ``mask``. Received frames are appended to ``came``.

        Requests of several connections start together, after all were read: reading releases the interpreter lock, and
        the writer would start its round with the first request alone.
        """
        if mask & selectors.EVENT_WRITE:
            self._serve(connection)
        asked = self._clients.get(connection)
        if asked is None or not mask & selectors.EVENT_READ:
            return
        try:
            found = connection.receive()
            if connection.buffered:
                self._wake_loop(connection)  # the socket will report no event for it
        except EscrowError as problem:
            found = []
            asked.refuse(problem)
        except Exception:
            logger.exception("a connection failed: %s", connection.peer)
            found = None
        if found is None:
            self._close(connection)
            return
        came.append((connection, found))
        if len(came) >= READ_AT_ONCE:
            self._take(came)

    def _take(self, came: list[tuple[Connection, list[Frame]]]) -> None:
        """Process the frames that were read from connections, which starts their requests; empties ``came``."""
        for connection, found in came:
            self._serve(connection, found)
        came.clear()

    def _serve(self, connection: Connection, came: list[Frame] | None = None) -> None:
        """Send queued bytes of one connection, process its received frames, and update it."""
        asked = self._clients.get(connection)
        if asked is None:
            return
        try:
            if connection.owes:
                connection.flush()
            if came is not None:
                greeted = asked.welcomed
                asked.take(came)
                if asked.welcomed and not greeted:
                    connection.tune()
                    if len(self._clients) > self.bound:
                        self._evict(greeted=True, but=connection)
            self._update(connection, asked)
        except Exception:
            logger.exception("a connection failed: %s", connection.peer)
            self._close(connection)

    def _attend(self) -> None:
        """Update the connections that other threads reported, because they have answers or must be closed."""
        for _ in range(len(self._reported)):  # later ones are updated in the next turn
            connection = self._reported.popleft()
            asked = self._clients.get(connection)
            if asked is None:
                continue
            if connection.buffered and not asked.paused:
                came: list[tuple[Connection, list[Frame]]] = []
                self._ready(connection, selectors.EVENT_READ, came)
                self._take(came)
            else:
                self._serve(connection)

    def _update(self, connection: Connection, asked: Requests) -> None:
        """Start a connection's waiting requests if it may continue; then close it, or select the events it waits
        for."""
        if asked.paused:
            asked.go_on()
        if connection.broken or (asked.done and not asked.no_longer):
            self._close(connection)
            return
        events = selectors.EVENT_WRITE if connection.owes else 0
        if asked.paused:
            self._paused[connection] = None
        else:
            if connection in self._paused:
                del self._paused[connection]
                if connection.buffered:
                    self._wake_loop(connection)
            events |= selectors.EVENT_READ
        self._wait_for(connection, events)

    def _wait_for(self, connection: Connection, events: int) -> None:
        if events == connection.events:
            return
        if not connection.events:
            self._selector.register(connection, events)
        elif not events:
            self._selector.unregister(connection)
        else:
            self._selector.modify(connection, events)
        connection.events = events

    def _close(self, connection: Connection) -> None:
        self._paused.pop(connection, None)
        with self._counting:
            if (asked := self._clients.pop(connection, None)) is None:
                return
            past = self._past
            self._past = [past[0] + asked.count, past[1] + connection.received, past[2] + connection.sent]
        if connection.events:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(connection)
            connection.events = 0
        connection.close()
        asked.end()

    def _retry_paused(self) -> None:
        """Retry the requests that wait for room."""
        for connection in list(self._paused):
            self._serve(connection)

    def _check_rules(self, now: float) -> None:
        """Apply the rules of the module: close connections that are late or too many, and return memory. Closes all
        when the grace of :meth:`stop` is over."""
        if self._ending is not None and now >= self._ending:
            for connection in list(self._clients):
                self._close(connection)
            return
        if self._guard is not None:
            self._wrong_then, self._strangers_took = self._guard.unauthenticated, 0.0
        if self._listen_again is not None and now >= self._listen_again and self._ending is None:
            self._listen()
        self.room.relieve()
        patience = PRESSED_SECONDS if len(self._clients) > self.bound // 2 else SILENT_SECONDS
        for connection, asked in list(self._clients.items()):
            late = (
                now - connection.opened >= patience if not asked.welcomed else self._is_too_slow(connection, asked, now)
            )
            asked.refuse_postponed(now)
            if late or (asked.no_longer and now >= asked.no_longer):
                self._close(connection)
        self._limit_unfinished(now)
        self._return_memory(now)

    def _return_memory(self, now: float) -> None:
        """Return freed memory to the system once little has been in use for ``QUIET_SECONDS`` (rule 6)."""
        if self.room.used > self._unfinished // 4:
            self._return_at = now + QUIET_SECONDS
        elif self._return_at and now >= self._return_at:
            self._return_at = 0.0
            return_freed_memory()

    def _limit_unfinished(self, now: float) -> None:
        """Close connections whose incomplete frames announce or hold too many bytes (rule 3)."""
        read = [connection for connection in self._clients if connection not in self._paused]
        for connection, reason in find_unfinished(read, self._unfinished, now):
            logger.warning("closing a connection %s: %s", reason, connection.peer)
            self._close(connection)

    def _is_too_slow(self, connection: Connection, asked: Requests, now: float) -> bool:
        """Return whether the connection's incomplete frame takes longer than ``FRAME_SECONDS``."""
        if not connection.assembler.waiting or asked.frames_then != connection.assembler.frames:
            asked.frames_then, asked.whole_since = connection.assembler.frames, now
        return now - asked.whole_since >= FRAME_SECONDS

    def _send_gone(self) -> None:
        """Stop accepting, and send GONE to all clients: the broker stops."""
        self._pause(0.0)
        for connection, asked in list(self._clients.items()):
            if asked.welcomed:
                asked.send_gone()
                self._update(connection, asked)
