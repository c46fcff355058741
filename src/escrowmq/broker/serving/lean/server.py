"""The lean carrier's server: one thread that accepts, reads and closes; answers are sent by the threads that have them.

Rules of a look, a few times a second:

1. A connection that has not greeted after ``SILENT_SECONDS`` is closed; under pressure (more than half of the bound) after
   ``PRESSED_SECONDS``. A frame must be whole ``FRAME_SECONDS`` after its first byte.
2. Over the bound of connections, one that never greeted is closed; when a further client greets, one without a request under way; then
   any other. Among equals the one that has been silent longest. Nothing is accepted while there is no descriptor for it.
3. Frames that are not whole may together have a quarter of all room; over it, the largest is closed.
4. What goes wrong with one connection closes that one. What goes wrong with the thread itself is logged, all connections are closed,
   and it begins anew; meanwhile Flight serves.
"""

from __future__ import annotations

import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from escrowmq.broker.calls import Dispatcher
from escrowmq.broker.serving.connections import PRESSED_SECONDS, SILENT_SECONDS
from escrowmq.broker.serving.lean.connection import Connection
from escrowmq.broker.serving.lean.listening import tune
from escrowmq.broker.serving.lean.requests import MAX_REQUESTS, Requests
from escrowmq.broker.serving.room import Room
from escrowmq.platform.descriptors import connection_share
from escrowmq.wire import PROTOCOL_VERSION, lean
from escrowmq.wire.lean.requests import MAX_HELLO_BYTES

LOOK_SECONDS = 0.25
HURRIED_SECONDS = 0.02
"""Between two looks while a request waits for room."""
FRAME_SECONDS = 60.0
NO_DESCRIPTOR_SECONDS = 0.2
RESTART_SECONDS = 1.0
ACCEPTED_AT_ONCE = 64
READ_AT_ONCE = 64
"""Connections that are read before their requests are begun: bounds the bytes that are read and not yet counted."""
OVER_BOUND = 8
"""Connections over the bound that may wait for their greeting."""
ANSWER_ROOM = 16 << 20
"""What an answer may have beside the bytes that its request allowed: columns that are not counted there, frames, padding."""

logger = logging.getLogger(__name__)


class LeanServer:
    """Serves the calls of one broker on sockets that listen; closes them in the end. ``room`` bounds what is under way."""

    def __init__(self, calls: Dispatcher, room: Room, listeners: Sequence[socket.socket], version: str) -> None:
        settings = calls.settings
        self._calls = calls
        self._room = room
        self._listeners = list(listeners)
        self._most = settings.max_connections
        self._unfinished = room.most_bytes // 4
        most_answer = settings.max_batch_bytes + ANSWER_ROOM
        self._version = version
        self._most_answer = most_answer
        self._clients: dict[Connection, Requests] = {}
        self._needing: deque[Connection] = deque()  # attention
        self._numbers = itertools.count(1)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._called = False
        self._ending: float | None = None  # by when all connections are closed
        self._listen_again: float | None = None  # while nothing is accepted
        self._complained = 0.0
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._past = [0, 0, 0]  # requests, bytes in and out, of connections that are closed
        self.accepted = 0
        """Connections, ever."""
        self._thread = threading.Thread(target=self._work, name="escrowmq-lean", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def stop(self, grace: float = 0.25) -> None:
        """Accept no more, say goodbye, let answers go out for ``grace`` seconds, then close everything.

        Stop the engine first: then every call is answered.
        """
        self._ending = time.monotonic() + grace
        self._call()
        if self._thread.ident is not None:
            self._thread.join()
        for one in (*self._listeners, self._wake, self._woken):
            one.close()
        self._selector.close()

    def _welcome(self) -> lean.Welcome:
        """Whom a client finds here, now."""
        shard, epoch = self._calls.identity
        return lean.Welcome(
            lean.FORMAT_VERSION,
            PROTOCOL_VERSION,
            shard,
            epoch,
            self._version,
            lean.MAX_REQUEST_BYTES,
            MAX_REQUESTS,
            self._most_answer,
        )

    @property
    def bound(self) -> int:
        """How many connections there may be."""
        return min(self._most, connection_share())

    def numbers(self) -> dict[str, float]:
        """For the action ``stats``."""
        clients = list(self._clients.items())
        requests, received, sent = self._past
        return {
            "lean_connections": len(clients),
            "lean_connections_total": self.accepted,
            "lean_requests_total": requests + sum(asked.count for _, asked in clients),
            "lean_received_bytes_total": received + sum(connection.received for connection, _ in clients),
            "lean_sent_bytes_total": sent + sum(connection.sent for connection, _ in clients),
        }

    def _call(self, connection: Connection | None = None) -> None:
        """Wake the loop, for a connection or for all. From any thread."""
        if connection is not None:
            self._needing.append(connection)
        if not self._called:
            self._called = True
            with suppress(OSError):  # full: it is awake; closed: it has ended
                self._wake.send(b"\0")

    # The loop. All that follows runs on its thread.

    def _work(self) -> None:
        while self._ending is None or self._clients:
            try:
                self._loop()
            except Exception:
                logger.exception("the lean carrier failed; its connections are closed, and it begins anew")
                self._begin_anew()

    def _begin_anew(self) -> None:
        for connection in list(self._clients):
            self._close(connection)
        self._selector.close()
        self._selector = selectors.DefaultSelector()
        if self._ending is None:
            time.sleep(RESTART_SECONDS)  # what fails at once must not fail without a pause

    def _loop(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listen()
        next_look = 0.0
        said_goodbye = False
        self._calls.run_rounds_here()
        while self._ending is None or self._clients:
            ready = self._selector.select(max(next_look - time.monotonic(), 0.0))
            try:
                self._work_on(ready)
                if self._ending is not None and not said_goodbye:
                    said_goodbye = True
                    self._say_goodbye()
                now = time.monotonic()
                if now >= next_look:
                    next_look = now + (HURRIED_SECONDS if self._look(now) else LOOK_SECONDS)
            finally:
                self._calls.run()  # what was begun, whatever came after

    def _work_on(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Read what came, accept who comes, see to those for whom somebody called."""
        came: list[tuple[Connection, bytes]] = []
        for key, mask in ready:
            if isinstance(key.fileobj, Connection):
                self._ready(key.fileobj, mask, came)
            elif key.fileobj is self._woken:
                self._called = False
                self._woken.recv(4096)
            else:
                self._accept(key.fileobj)  # type: ignore[arg-type]  # a listening socket
        self._take(came)
        self._attend()

    def _listen(self) -> None:
        self._listen_again = None
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def _pause(self, seconds: float) -> None:
        """Accept nothing for a while."""
        if self._listen_again is None:
            self._listen_again = time.monotonic() + seconds
            for listener in self._listeners:
                self._selector.unregister(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if self._listen_again is not None or self._ending is not None:
                return
            try:
                accepted, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as problem:  # no descriptor, or no memory
                if time.monotonic() - self._complained > 10.0:
                    self._complained = time.monotonic()
                    logger.warning("a connection cannot be accepted: %s", problem)
                self._evict(greeted=False)
                self._pause(NO_DESCRIPTOR_SECONDS)
                return
            self._enter(accepted, address)

    def _enter(self, accepted: socket.socket, address: object) -> None:
        try:
            tune(accepted)
        except OSError:  # gone already
            accepted.close()
            return
        peer = f"lean:{next(self._numbers)}:{address or 'unix'}"
        reader = lean.Reader(MAX_HELLO_BYTES)
        connection = Connection(accepted, peer, self._most_answer, self._call, reader)
        over = len(self._clients) - self.bound
        if over >= 0 and not self._evict(greeted=False) and over >= OVER_BOUND:
            connection.close()
            return
        self.accepted += 1
        self._clients[connection] = Requests(self._calls, self._room, connection, self._welcome)
        self._wait_for(connection, selectors.EVENT_READ)

    def _evict(self, *, greeted: bool, but: Connection | None = None) -> bool:
        """Close the connection that can be missed most; whether there was one. ``greeted``: those that have, too."""
        others = [
            (asked.welcomed, asked.busy, connection.heard if asked.welcomed else connection.opened, number)
            for number, (connection, asked) in enumerate(self._clients.items())
            if connection is not but and (greeted or not asked.welcomed)
        ]
        if not others:
            return False
        number = min(others)[-1]
        connection = next(itertools.islice(self._clients, number, None))
        logger.info("closing a lean connection, there are too many: %s", connection.peer)
        self._close(connection)
        return True

    def _ready(self, connection: Connection, mask: int, came: list[tuple[Connection, bytes]]) -> None:
        """Write and read what can be, of one connection. What was read joins ``came``.

        Requests of several connections are begun together, after all of these were read: reading lets go of the interpreter, and
        the writer would begin its round with the first of them alone.
        """
        if mask & selectors.EVENT_WRITE:
            self._serve(connection)
        if not mask & selectors.EVENT_READ or connection not in self._clients:
            return
        try:
            data = connection.receive()
        except Exception:
            logger.exception("a lean connection failed: %s", connection.peer)
            data = None
        if data is None:
            self._close(connection)
        elif data:
            came.append((connection, data))
            if len(came) >= READ_AT_ONCE:
                self._take(came)

    def _take(self, came: list[tuple[Connection, bytes]]) -> None:
        """Begin what was read."""
        for connection, data in came:
            self._serve(connection, data)
        came.clear()

    def _serve(self, connection: Connection, data: bytes = b"") -> None:
        """Take what was read of one connection, and write what can be."""
        asked = self._clients.get(connection)
        if asked is None:
            return
        try:
            if connection.unsent_bytes:
                connection.flush()
            if data:
                greeted = asked.welcomed
                asked.take(data)
                if asked.welcomed and not greeted and len(self._clients) > self.bound:
                    self._evict(greeted=True, but=connection)
            self._see_to(connection, asked)
        except Exception:
            logger.exception("a lean connection failed: %s", connection.peer)
            self._close(connection)

    def _attend(self) -> None:
        """See to the connections for which somebody called."""
        while self._needing:
            connection = self._needing.popleft()
            if connection in self._clients:
                self._serve(connection)

    def _see_to(self, connection: Connection, asked: Requests) -> None:
        """Go on with a connection as its state says."""
        if asked.paused:
            asked.go_on()
        if connection.broken or (asked.done and not asked.no_longer):
            self._close(connection)
            return
        events = selectors.EVENT_WRITE if connection.unsent_bytes else 0
        if not asked.paused:
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
        asked = self._clients.pop(connection, None)
        if asked is None:
            return
        if connection.events:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(connection)
            connection.events = 0
        past = self._past
        self._past = [past[0] + asked.count, past[1] + connection.received, past[2] + connection.sent]
        connection.close()
        asked.end()

    def _look(self, now: float) -> bool:
        """See the rules above; whether somebody waits for room."""
        if self._ending is not None and now >= self._ending:
            for connection in list(self._clients):
                self._close(connection)
            return False
        if self._listen_again is not None and now >= self._listen_again and self._ending is None:
            self._listen()
        patience = PRESSED_SECONDS if len(self._clients) > self.bound // 2 else SILENT_SECONDS
        waiting, unfinished = False, 0
        for connection, asked in list(self._clients.items()):
            size = connection.reader.waiting
            unfinished += size
            late = now - connection.opened >= patience if not asked.welcomed else self._drips(connection, asked, now)
            if late or (asked.no_longer and now >= asked.no_longer):
                self._close(connection)
            elif asked.paused:
                self._serve(connection)
                waiting = waiting or asked.paused
        while unfinished > self._unfinished:
            largest = max(self._clients, key=lambda connection: connection.reader.waiting)
            unfinished -= largest.reader.waiting
            logger.warning("closing a connection that sends much and ends nothing: %s", largest.peer)
            self._close(largest)
        return waiting or self._ending is not None

    def _drips(self, connection: Connection, asked: Requests, now: float) -> bool:
        """Whether its frame takes too long to become whole."""
        if not connection.reader.waiting or asked.frames_then != connection.reader.frames:
            asked.frames_then, asked.whole_since = connection.reader.frames, now
        return now - asked.whole_since >= FRAME_SECONDS

    def _say_goodbye(self) -> None:
        """The broker stops."""
        self._pause(0.0)
        for connection, asked in list(self._clients.items()):
            if asked.welcomed:
                asked.say_goodbye()
                self._see_to(connection, asked)
