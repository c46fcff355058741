"""What stands for Arrow Flight: actions, subscriptions to checks, and batches that are too large for the lean carrier.

:class:`Desk` is the broker's end, :class:`SimulatedFlight` the client's. Arrow Flight brings its own threads and clocks, so it cannot
run in a simulation; these two keep to what its link promises (:mod:`escrowmq.wire.link`): requests of one exchange keep their
order, what may have left fails as DISCONNECTED, what surely did not as unsent.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pyarrow as pa

from escrowmq import wire
from escrowmq.broker.calls import Calls
from escrowmq.broker.failures import broker_failed
from escrowmq.broker.writer.checkback import Listener
from escrowmq.client.links.streams import perhaps_healing
from escrowmq.errors import Code, EscrowError, Unknown, unsent
from escrowmq.schemas import CHECKS
from escrowmq.simulation import threads
from escrowmq.simulation.network import End, Network
from escrowmq.wire import ANSWER, Exchange, ExchangeOptions, Json, Parcel, ReadRequest
from escrowmq.wire.lean.arrow import read_record_batch
from escrowmq.wire.parcels import Done, answer_of, batch_of

PORT = 7700
CONNECT_SECONDS = 5.0
_HEAD = struct.Struct("<II")


def pack(content: Mapping[str, Any], batch: pa.RecordBatch | None = None) -> bytes:
    """One message: JSON, and the body of a batch."""
    text = json.dumps(content).encode()
    body = b"" if batch is None else memoryview(batch.serialize()).tobytes()
    return _HEAD.pack(len(text), len(body)) + text + body


class Messages:
    """Takes what comes over a connection apart into messages."""

    def __init__(self, end: End) -> None:
        self._end = end
        self._rest = b""

    def __iter__(self) -> Iterator[tuple[Json, bytes]]:
        """Each message; ends with the connection. Raises OSError where that broke."""
        while True:
            while len(self._rest) >= _HEAD.size:
                text, body = _HEAD.unpack_from(self._rest)
                end = _HEAD.size + text + body
                if len(self._rest) < end:
                    break
                content = wire.unpack_json(self._rest[_HEAD.size : _HEAD.size + text])
                found, self._rest = self._rest[end - body : end], self._rest[end:]
                yield content, found
            if not (data := self._end.recv(1 << 18)):
                return
            self._rest += data


class Desk:
    """One connection at its broker. The first message says what it is for."""

    def __init__(self, end: End, calls: Calls) -> None:
        self._end, self._calls = end, calls

    def run(self) -> None:
        """Serve it until it ends."""
        messages = iter(Messages(self._end))
        self._receives: dict[int, Future[pa.RecordBatch]] = {}
        try:
            first, body = next(messages)
            if "action" in first:
                self._act(first)
            elif "watch" in first:
                self._watch(first, messages)
            else:
                self._exchange(first, body)
                for asked, more in messages:
                    self._exchange(asked, more)
        except (OSError, StopIteration):
            pass  # the client is gone
        self._end.close()
        for receive in list(self._receives.values()):
            receive.cancel()

    def _say(self, content: Mapping[str, Any], batch: pa.RecordBatch | None = None) -> bool:
        """Whether it left."""
        try:
            self._end.send(pack(content, batch))
        except OSError:
            return False
        return True

    def _act(self, asked: Json) -> None:
        try:
            answer = self._calls.action(asked["action"], asked["request"])
        except EscrowError as problem:
            self._say({"error": wire.pack_error(problem)})
        else:
            self._say({"answer": answer})

    def _exchange(self, asked: Json, body: bytes) -> None:
        kind, number = Exchange(asked["exchange"]), asked["number"]
        batch = None if kind is Exchange.RECEIVE else read_record_batch(body, wire.REQUEST[kind])

        def came(done: Future[pa.RecordBatch]) -> None:
            self._receives.pop(number, None)
            if done.cancelled():
                return
            problem = done.exception()
            if problem is not None:
                self._say({"number": number, "error": wire.pack_error(broker_failed("an exchange", problem))})
            elif not self._say({"number": number}, done.result()) and kind is Exchange.RECEIVE:
                self._calls.give_back_unseen(asked["options"]["group"], done.result())

        begun = self._calls.exchange(kind, batch, asked["options"])
        if kind is Exchange.RECEIVE:
            self._receives[number] = begun
        begun.add_done_callback(came)

    def _watch(self, asked: Json, messages: Iterator[tuple[Json, bytes]]) -> None:
        try:
            listener = self._calls.watch(asked["watch"])
        except EscrowError as problem:
            self._say({"error": wire.pack_error(problem)})
            return
        self._say({})
        threads.Thread(target=self._ask, args=(listener,), name="checks").start()
        try:
            for _ in messages:
                pass
        finally:
            self._calls.leave(listener)

    def _ask(self, listener: Listener) -> None:
        for batch in listener.batches():
            self._say({}, batch)
        if listener.problem is not None:
            self._say({"error": wire.pack_error(listener.problem)})
        self._end.close()


class Watch:
    """A subscription to checks; see :class:`escrowmq.wire.CheckStream`."""

    def __init__(self, end: End, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> None:
        self._end = end
        self._on_checks = on_checks
        self._closed = False
        self.broken = False
        self.problem: EscrowError | None = None
        self._messages = iter(Messages(end))
        end.settimeout(CONNECT_SECONDS)
        try:
            end.send(pack({"watch": session}))
            answer, _ = next(self._messages)
        except (OSError, StopIteration) as problem:
            end.close()
            raise Unknown(Code.DISCONNECTED, f"the subscription broke: {problem!r}") from None
        if "error" in answer:
            end.close()
            raise perhaps_healing(wire.unpack_error(answer["error"]))
        end.settimeout(None)
        threads.Thread(target=self._read, name="watch").start()

    def _read(self) -> None:
        try:
            for content, body in self._messages:
                if "error" in content:
                    self.problem = wire.unpack_error(content["error"])
                    break
                self._on_checks(read_record_batch(body, CHECKS))
        except OSError:
            pass
        self._end.close()
        self.broken = not self._closed

    def close(self) -> None:
        """Leave."""
        self._closed = True
        self._end.close()


class SimulatedFlight:
    """Stands for a :class:`~escrowmq.client.links.flight.FlightLink` to the broker ``host``."""

    def __init__(self, network: Network, host: str) -> None:
        self.host = host
        self.address = f"escrow://{host}:{PORT}"
        self.hello: Json | None = None
        self.several = False
        self.there = True
        self._network = network
        self._closed = False
        self._lock = threads.Lock()
        self._streams: dict[Any, _Stream] = {}
        self._watches: list[Watch] = []

    def _connect(self, bundle: object) -> End:
        if self._closed:
            raise Unknown(Code.CLOSED, "the connection is closed")
        try:
            return self._network.connect(self.host, PORT, CONNECT_SECONDS, bundle=bundle)
        except OSError as problem:
            raise unsent(f"no broker answers at {self.address}: {problem}") from None

    def action(self, name: str, request: Mapping[str, object], timeout: float) -> Json:
        """See :meth:`escrowmq.wire.Link.action`."""
        end = self._connect(
            None
        )  # calls beside each other, over connections given up and made anew: they come in any order
        end.settimeout(timeout)
        try:
            end.send(pack({"action": name, "request": dict(request)}))
            answer, _ = next(iter(Messages(end)))
        except TimeoutError:
            raise Unknown(Code.TIMED_OUT) from None
        except (OSError, StopIteration) as problem:
            raise Unknown(Code.DISCONNECTED, f"the connection broke: {problem!r}") from None
        finally:
            end.close()
        if "error" in answer:
            raise perhaps_healing(wire.unpack_error(answer["error"]))
        found: Json = answer["answer"]
        return found

    def greeting(self, timeout: float) -> Json:
        """What the broker says of itself; kept until :meth:`doubt`."""
        if self.hello is None:
            self.hello = self.action("hello", {}, timeout)
        return self.hello

    def doubt(self, problem: EscrowError) -> None:
        """The broker may be another."""
        self.hello = None

    def refused(self, hello: Json | None, problem: EscrowError) -> None:
        """A broker answered elsewhere that it does not lead; ``hello`` is of the connection to which that belongs."""
        if hello is self.hello:
            self.doubt(problem)

    def look_around(self, silent: Callable[[], bool]) -> None:
        """A simulated shard has one broker: there is no other to look for."""

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """See :meth:`escrowmq.wire.Link.exchange`."""
        key = (kind, options.get("member"))
        with self._lock:
            stream = self._streams.get(key)
            if stream is None or stream.broken:
                try:
                    stream = self._streams[key] = _Stream(self._connect(self), kind)
                except EscrowError as problem:
                    failed: Future[pa.RecordBatch] = Future()
                    failed.set_exception(problem)
                    return failed
            return stream.ask(batch, options)

    def parcel(self, parcel: Parcel, done: Done) -> None:
        """See :meth:`escrowmq.wire.Link.parcel`."""

        def came(answered: Future[pa.RecordBatch]) -> None:
            problem = answered.exception()
            if isinstance(problem, EscrowError):
                done(problem)
            else:
                done(answer_of(parcel.kind, answered.result()))

        self.exchange(parcel.kind, batch_of(parcel), parcel.options).add_done_callback(came)

    def read(self, request: ReadRequest) -> pa.RecordBatchReader:
        """Nothing in a simulation reads so."""
        raise Unknown(Code.DISCONNECTED, "a simulated broker has no reads")

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> Watch:
        """See :meth:`escrowmq.wire.Link.watch`."""
        watch = Watch(self._connect(self), session, on_checks)
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        """End everything."""
        self._closed = True
        for stream in self._streams.values():
            stream.close()
        for watch in self._watches:
            watch.close()


class _Stream:
    """Requests of one kind, in order, over one connection."""

    def __init__(self, end: End, kind: Exchange) -> None:
        self.broken = False
        self._end, self._kind = end, kind
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[pa.RecordBatch]] = {}
        threads.Thread(target=self._read, name="flight-stream").start()

    def ask(self, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """Send one request."""
        number, future = next(self._numbers), Future[pa.RecordBatch]()
        future.cancel = lambda: False  # type: ignore[method-assign]  # what was given meanwhile must still arrive
        self._pending[number] = future
        content = {"exchange": str(self._kind), "number": number, "options": dict(options)}
        try:
            self._end.send(pack(content, None if self._kind is Exchange.RECEIVE else batch))
        except OSError as problem:
            self._fail(f"{problem}")
        return future

    def _read(self) -> None:
        try:
            for content, body in Messages(self._end):
                future = self._pending.pop(content["number"])
                if "error" in content:
                    future.set_exception(perhaps_healing(wire.unpack_error(content["error"])))
                else:
                    future.set_result(read_record_batch(body, ANSWER[self._kind]))
        except OSError:
            pass
        self._fail("the stream ended")

    def _fail(self, why: str) -> None:
        self.broken = True
        left, self._pending = self._pending, {}
        for number in sorted(left):
            left[number].set_exception(Unknown(Code.DISCONNECTED, why))

    def close(self) -> None:
        """Give it up."""
        self._end.close()
