"""One connection to a broker: sending requests, receiving answers, and its end. ``docs/reference/protocol.md``
describes the bytes.

Without an event loop a thread reads and calls back; with one, the loop reads. Writing is the same in both: the sender
writes at once, and bytes that the socket does not accept are queued in order. A sending thread waits for the socket for
a limited time; the loop and the reading thread do not wait, so reading never stops because the broker does not read.

Only the reader ends a connection: it notices the end, fails pending requests, oldest first, and closes the socket.
Other threads shut the socket down (``cut``), which the reader notices.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import select
import socket
import threading
import time
from collections import deque
from typing import Protocol

from escrowmq.client.links.exchanges import (
    STALL_SECONDS,
    NotLeading,
    Request,
    Waiting,
    Watch,
)
from escrowmq.client.links.seeking import Met
from escrowmq.errors import Code, EscrowError, Unknown, unsent
from escrowmq.wire import channel, frames
from escrowmq.wire.frames import Frame, Gatherer, Kind, Pieces

UNSENT_BYTES = 64 << 20
"""Queued bytes above which a request is rejected as not sent."""
WRITE_SECONDS = STALL_SECONDS
"""A socket that accepts nothing for this long is shut down."""
TICK_SECONDS = 1.0
SILENT_TICKS, GONE_TICKS = 3, 12
"""Ticks of silence with pending requests after which a ping is sent, and after which the connection is broken."""

_log = logging.getLogger(__name__)


class Owner(Protocol):
    """The link of a connection. Its methods are called on the thread that reads, or on the loop."""

    def on_ended(self, connection: Connection) -> None:
        """Remove the connection: it has ended, and all pending requests have failed. Called once."""

    def on_gone(self, connection: Connection) -> None:
        """Send no more over the connection: the broker is stopping."""

    def on_drained(self, connection: Connection) -> None:
        """Continue without the connection: it accepts no more, and has no pending requests."""

    def on_not_leading(self, connection: Connection, problem: NotLeading) -> None:
        """Leave the connection: its broker does not lead."""


class Connection:
    """A connection after the broker's welcome.

    ``loop``: the event loop that reads; None: a thread reads. ``patience``: ticks of silence with pending requests
    after which a ping is sent; fewer if another broker may lead.
    """

    def __init__(
        self, met: Met, owner: Owner, loop: asyncio.AbstractEventLoop | None = None, *, patience: int = SILENT_TICKS
    ) -> None:
        self.met = met
        self._patience = patience
        welcome = met.welcome
        self.most = welcome.max_request_bytes
        self._channel = met.channel
        self._channel.setblocking(loop is None)
        self._gatherer = Gatherer(welcome.max_answer_bytes)
        self._assembler = met.assembler
        self._assembler.most = welcome.max_answer_bytes + frames.FRAME_ROOM
        self._assembler.place = self._gatherer.place
        self._owner = owner
        self._ids = itertools.count(1)
        self._pending: dict[int, Waiting] = {}
        self._to_cancel: deque[int] = deque()  # reads to cancel
        self._lock = threading.RLock()  # guards sending, and orders the last request before the end
        self._out: deque[frames.Piece] = deque()  # bytes that the socket did not accept
        self._accepted = self._left = 0  # bytes accepted and sent since the start
        self._reason: EscrowError | None = None  # why it ends or accepts no more
        self._dead = False
        self._leaving = False  # GOODBYE was sent, after which no frame may follow
        self._over = threading.Event()
        self._quiet = threading.Event()  # no request is pending, and none is accepted
        self.lost_requests = False
        """Whether it ended with pending requests."""
        self.answers = 0
        self._silent = 0  # ticks since the last received byte
        self._ticking = False
        self._loop, self._reader = loop, 0
        self._watching = False  # the loop waits until the socket is writable
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start reading answers, on a thread or on the loop. If no thread can be started, or the loop is closed, the
        connection ends instead."""
        try:
            if self._loop is None:
                self._thread = threading.Thread(target=self._run, name="escrowmq-reader", daemon=True)
                self._thread.start()
            else:
                self._loop.call_soon_threadsafe(self._begin_on_loop, self._loop)
        except RuntimeError as problem:
            self._thread = None
            self.give_up(Unknown(Code.DISCONNECTED, f"the connection cannot be read: {problem}"))

    def is_reading(self) -> bool:
        """Return whether the caller runs on the reading thread or loop."""
        if self._loop is None:
            return threading.get_ident() == self._reader
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    @property
    def usable(self) -> bool:
        """Return whether the connection accepts requests."""
        return self._reason is None

    @property
    def is_drained(self) -> bool:
        """Return whether no request with rows and no receive is pending: a newer one must not overtake it over another
        connection."""
        return not any(isinstance(one, Request) for one in list(self._pending.values()))

    @property
    def doubtful(self) -> bool:
        """Return whether requests are pending and the broker did not answer a ping."""
        return self._silent > self._patience and any(one.is_owed for one in list(self._pending.values()))

    @property
    def watches(self) -> bool:
        """Return whether a check-back subscription is open."""
        return any(isinstance(one, Watch) for one in list(self._pending.values()))

    # Requests

    def send(self, one: Waiting) -> None:
        """Give a request a number and send it. Raises ``unsent(...)`` if it was not accepted and nothing was sent,
        Unknown(CLOSED) after the connection was closed, and the errors of encoding it."""
        number = one.number = next(self._ids)
        pieces = one.encode(number, self.most)
        with self._lock:
            if self._reason is not None:
                closed = self._reason.code is Code.CLOSED
                raise Unknown(Code.CLOSED, self._reason.message) if closed else unsent(self._reason.message)
            if self._accepted - self._left > UNSENT_BYTES:
                raise unsent("the connection is full")
            self._pending[number] = one
            mark = self._put(pieces)
        if mark:
            self._wait_sent(mark)

    def cancel(self, number: int) -> None:
        """Withdraw the receive, or end the read or watch, with this number. Returns at once; the answer follows."""
        self._send_control(number, frames.cancel(number))

    def add_credit(self, number: int, size: int) -> None:
        """Let the broker send ``size`` bytes more of a read."""
        self._send_control(number, frames.credit(number, size))

    def cancel_later(self, number: int) -> None:
        """Withdraw or end the exchange with this number within a tick; for finalizers, which may run anywhere."""
        self._to_cancel.append(number)

    def _send_control(self, number: int, frame: bytes) -> None:
        with self._lock:
            sends = not (self._dead or self._leaving) and number in self._pending
            if sends and self._put([frame]) and self._loop is not None:
                self._watch_later()

    def tick(self) -> bool:
        """Check whether the broker responds, and send late cancellations. Called every ``TICK_SECONDS`` while requests
        are pending. Returns whether it must be called again."""
        while self._to_cancel:
            self.cancel(self._to_cancel.popleft())
        if self._loop is None:
            self._check(time.monotonic())
        elif not self._ticking:  # a blocked loop does not mean a silent broker
            self._ticking = True
            try:
                self._loop.call_soon_threadsafe(self._tick_on_loop)
            except RuntimeError:
                self.give_up(Unknown(Code.DISCONNECTED, "the event loop is closed"))
        return bool(self._pending) or not self.usable

    def retire(self, reason: EscrowError) -> None:
        """Accept no more requests, because of ``reason``: the broker withdraws waiting receives, and ends reads and
        watches. Other pending requests are still answered."""
        with self._lock:
            if self._reason is None:
                self._reason, self._leaving = reason, True
                if self._put([frames.goodbye()]) and self._loop is not None:
                    self._watch_later()
        self._check_drained()

    def end(self, deadline: float) -> None:
        """After :meth:`retire`: wait for pending requests until ``deadline`` (monotonic seconds), then shut down, and
        wait shortly for the end. Does not wait on the reading thread or loop."""
        reading = self.is_reading()
        if not reading and not self._dead:
            self._quiet.wait(max(deadline - time.monotonic(), 0.0))
        self.cut(self._reason or Unknown(Code.CLOSED))
        if reading:
            if self._loop is not None:
                self.give_up(self._reason or Unknown(Code.CLOSED))
            return
        if not self._over.wait(1.0) and self._loop is not None:  # the loop has stopped
            self.give_up(self._reason or Unknown(Code.CLOSED))
        if self._thread is not None and self._over.is_set():
            self._thread.join(1.0)

    def cut(self, reason: EscrowError) -> None:
        """Shut the connection down from any thread; the reader notices."""
        with self._lock:
            self._cut(reason)

    def ends_by(self, deadline: float) -> None:
        """Wait until the reading thread has ended, at most until ``deadline`` (monotonic seconds)."""
        if self._thread is not None and not self.is_reading():
            self._thread.join(max(deadline - time.monotonic(), 0.0))

    def on_fork(self) -> None:
        """Close only the descriptor in a forked child: the connection is the parent's."""
        self._lock = threading.RLock()
        self._reason, self._dead = Unknown(Code.CLOSED), True
        self._pending, self._out = {}, deque()
        self._channel.close()

    # Sending

    def _put(self, pieces: Pieces) -> int:
        """Send bytes, or queue those that the socket does not accept. Returns the count of all sent bytes at which
        these will have been sent; 0 if they are sent already. Requires the lock."""
        size = frames.size_of(pieces)
        self._accepted += size
        if not self._out:
            sent = self._push(pieces, size)
            if sent == size:
                return self._accepted if self._channel.unsent else 0
            pieces = frames.drop_bytes(pieces, sent)
        if self._dead:
            return 0
        self._out.extend(pieces)
        return self._accepted

    def _push(self, pieces: Pieces, size: int) -> int:
        """Send as much of the pieces, of ``size`` bytes together, as the socket accepts. Returns the number of bytes;
        an error shuts the connection down. Requires the lock."""
        total = 0
        try:
            while total < size and (sent := self._channel.send(pieces)):
                total += sent
                self._left += sent
                if total < size:
                    pieces = frames.drop_bytes(pieces, sent)
        except OSError as problem:
            self._cut(Unknown(Code.DISCONNECTED, f"the connection broke: {problem}"))
        except BaseException:  # an interrupt: it is unknown how much was sent
            self._cut(Unknown(Code.DISCONNECTED, "interrupted"))
            raise
        return total

    def _flush(self) -> None:
        """Send queued bytes, as far as the socket accepts them. Requires the lock."""
        try:
            if not self._channel.flush():
                return
        except OSError as problem:
            self._cut(Unknown(Code.DISCONNECTED, f"the connection broke: {problem}"))
            return
        while self._out and not self._dead:
            some = [self._out[at] for at in range(min(len(self._out), channel.MAX_PIECES))]
            size = frames.size_of(some)
            sent = self._push(some, size)
            for _ in some:
                self._out.popleft()
            if sent < size:
                self._out.extendleft(reversed(frames.drop_bytes(some, sent)))
                return

    @property
    def _waits(self) -> bool:
        return bool(self._out) or self._channel.unsent

    def _wait_sent(self, mark: int) -> None:
        """Wait until ``mark`` bytes were sent over the connection, or shut it down if the socket accepts nothing for
        ``WRITE_SECONDS``. Does not wait on the reading thread or loop."""
        if self._loop is not None:
            self._watch_later()
            return
        if self.is_reading():
            return
        left, since = self._left, time.monotonic()
        poll = select.poll()
        while True:
            with self._lock:
                self._flush()
                if self._dead or (self._left >= mark and not self._channel.unsent):
                    return
                poll.register(self._channel, select.POLLOUT)
                if self._left > left:
                    left, since = self._left, time.monotonic()
                elif time.monotonic() - since > WRITE_SECONDS:
                    self._cut(Unknown(Code.DISCONNECTED, "the broker does not read"))
                    return
            poll.poll(1000)

    def _cut(self, reason: EscrowError) -> None:
        """Shut the socket down, and accept no more requests, because of ``reason``. Requires the lock."""
        if self._reason is None:
            self._reason = reason
        if not self._dead:
            try:
                self._channel.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended: the reader notices

    # Receiving

    def _run(self) -> None:
        """Read on a thread until the connection ends."""
        self._reader = threading.get_ident()
        problem: EscrowError
        try:
            while True:
                if self._waits:
                    self._flush_while_waiting()
                count = self._channel.recv_into(self._assembler.target(), self._assembler.rest)
                if not count:
                    problem = Unknown(Code.DISCONNECTED, "the broker closed the connection")
                    break
                self._process(count)
        except EscrowError as raised:
            problem = raised
        except OSError as raised:
            problem = Unknown(Code.DISCONNECTED, f"the connection broke: {raised}")
        except Exception as raised:
            _log.exception("an answer could not be processed")
            problem = Unknown(Code.DISCONNECTED, f"an answer could not be processed: {raised!r}")
        self.give_up(problem)

    def _flush_while_waiting(self) -> None:
        """Wait for bytes to read, and meanwhile send queued bytes."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | select.POLLOUT)
        while self._waits and not self._channel.buffered:
            if any(event & ~select.POLLOUT for _, event in poll.poll(1000)):
                return
            with self._lock:
                self._flush()

    def _process(self, count: int) -> None:
        """Pass the answers in ``count`` received bytes to their requests. Raises EscrowError for unreadable bytes: the
        connection is unusable then."""
        self._silent = 0
        pending = self._pending
        for frame in self._assembler.filled(count):
            number = frame.number
            if number == 0:
                self._on_connection_frame(frame)
                continue
            one = pending.get(number)
            if one is None:
                raise Unknown(Code.DISCONNECTED, "an answer without a request")
            body: memoryview | None = frame.body
            if frame.kind in frames.IN_PARTS and (body := self._gatherer.add(frame)) is None:
                continue
            if frame.kind not in frames.CONTINUED:
                del pending[number]
                if frame.kind == Kind.ERROR:
                    self._gatherer.forget(number)
            try:
                answer = one.decode(frame, body)
            except EscrowError as problem:
                garbage = Unknown(Code.DISCONNECTED, f"an answer cannot be read: {problem.message}")
                self.cut(garbage)  # first, so that nothing more is sent
                pending.pop(number, None)
                one.finish(garbage)
                raise garbage from None
            self.answers += 1
            if isinstance(answer, NotLeading):  # first, so that repeated requests do not use this connection
                self._owner.on_not_leading(self, answer)
            one.finish(answer)
        if self._reason is not None:
            self._check_drained()

    def _check_drained(self) -> None:
        if self._reason is not None and not self._quiet.is_set() and self.is_drained:
            self._quiet.set()
            self._owner.on_drained(self)

    def _on_connection_frame(self, frame: Frame) -> None:
        """Handle a frame that belongs to no request: GONE (the broker is stopping), PONG, or the reason why the broker
        ends the connection, which is raised."""
        if frame.kind == Kind.ERROR:
            problem = frames.read_refusal(frame)
            raise Unknown(Code.DISCONNECTED, f"the broker ends the connection: {problem.message}", problem.hint)
        if frame.kind == Kind.GONE:
            with self._lock:
                if self._reason is None:
                    self._reason = Unknown(Code.DISCONNECTED, "the broker is stopping")
            self._owner.on_gone(self)
        elif frame.kind != Kind.PONG:
            raise Unknown(Code.DISCONNECTED, f"a frame of kind {frame.kind:#04x} that belongs to no request")

    def _check(self, now: float) -> None:
        """Shut the connection down if an answer is overdue or the broker is silent for too long; after some silence,
        send a ping. Called once per tick."""
        pending = [one for one in list(self._pending.values()) if one.is_owed]
        if not pending and self.usable:
            self._silent = 0
            return
        self._silent += 1  # of one that takes no more, too: its broker is to end it
        if self._waits and self._loop is None:
            with self._lock:
                self._flush()
        if any(0.0 < one.expiry < now for one in pending):
            self.cut(Unknown(Code.DISCONNECTED, "an answer is overdue"))
        elif self._silent >= GONE_TICKS:
            self.cut(Unknown(Code.DISCONNECTED, "the broker is silent"))
        elif self._silent == self._patience:
            with self._lock:
                if not (self._dead or self._leaving or self._out):
                    self._put([frames.ping()])
                    if self._waits and self._loop is not None:
                        self._watch_later()

    def give_up(self, problem: EscrowError) -> None:
        """End the connection: close the socket, fail all pending requests, oldest first, and notify the owner. Only the
        first call counts."""
        with self._lock:
            if self._dead:
                return
            self._dead = True
            self._reason = problem = self._reason or problem
            self._out.clear()
            self.lost_requests = not self.is_drained
            left, self._pending = self._pending, {}
        self._close_channel()
        if problem.code is not Code.CLOSED:
            problem = Unknown(Code.DISCONNECTED, problem.message, problem.hint)
        for number in sorted(left):
            left[number].finish(Unknown(problem.code, problem.message, problem.hint))
        self._quiet.set()
        self._owner.on_ended(self)
        self._over.set()

    def _close_channel(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed() and loop.is_running() and not self.is_reading():
            try:
                loop.call_soon_threadsafe(self._close_channel)
                return
            except RuntimeError:
                pass  # closed by now
        with self._lock:
            if loop is not None and not loop.is_closed() and self._channel.fileno() >= 0:
                loop.remove_reader(self._channel)
                loop.remove_writer(self._channel)
            self._channel.close()

    # On an event loop

    def _begin_on_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._dead:
            loop.add_reader(self._channel, self._readable)
            if self._channel.buffered:
                self._readable()

    def _readable(self) -> None:
        if self._dead:
            return
        try:
            while True:
                count = self._channel.recv_into(self._assembler.target(), self._assembler.rest)
                if not count:
                    raise Unknown(Code.DISCONNECTED, "the broker closed the connection")
                self._process(count)
                if self._dead or not self._channel.buffered:
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except EscrowError as problem:
            self.give_up(problem)
        except OSError as problem:
            self.give_up(Unknown(Code.DISCONNECTED, f"the connection broke: {problem}"))
        except Exception as problem:
            _log.exception("an answer could not be processed")
            self.give_up(Unknown(Code.DISCONNECTED, f"an answer could not be taken in: {problem!r}"))

    def _watch_later(self) -> None:
        """Make the loop send the queued bytes when the socket accepts them."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._watch_on_loop, self._loop)
        except RuntimeError:
            pass  # the loop is closed: the next tick ends the connection

    def _watch_on_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waits and not self._watching and not self._dead:
            self._watching = True
            loop.add_writer(self._channel, self._writable)

    def _writable(self) -> None:
        with self._lock:
            self._flush()
            if self._waits or self._dead:
                return
            self._watching = False
        assert self._loop is not None
        self._loop.remove_writer(self._channel)

    def _tick_on_loop(self) -> None:
        self._ticking = False
        self._readable()  # what came while the loop was busy
        if not self._dead:
            self._check(time.monotonic())
