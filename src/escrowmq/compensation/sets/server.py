"""One Redis, as the set store uses it: connections that are checked when they are made, exchanges of several commands,
and what errors mean.

``redis``'s own pipelines hide what is sent when, and which connection a WATCH is on; here an exchange is one write and
its answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ExecAbortError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from escrowmq.errors import Code, Denied, EscrowError, Misuse, Overloaded, Unknown
from escrowmq.outbox.targets.redis import DURABILITY, STRENGTH

Command = tuple[str | bytes | int | float, ...]

_NOT_NOW = ("LOADING", "READONLY", "MASTERDOWN", "NOREPLICAS", "BUSY", "CLUSTERDOWN", "TRYAGAIN")
_DENIED = ("NOPERM", "NOAUTH", "WRONGPASS")


class RedisServer:
    """The connections to one Redis. May be used from any thread, each exchange on a connection of its own."""

    def __init__(self, url: str, *, timeout: float, durability: str) -> None:
        """``timeout``: seconds of one answer. ``durability``: what the server must keep to at least, see
        :data:`escrowmq.outbox.targets.redis.DURABILITY`. Does not connect yet. Raises Misuse (BAD_URL, BAD_ARGUMENT).
        """
        if durability not in DURABILITY:
            raise Misuse(Code.BAD_ARGUMENT, f"durability {durability!r}", f"one of {', '.join(DURABILITY)}")
        try:
            self._pool = redis.ConnectionPool.from_url(
                url, protocol=2, socket_timeout=timeout, socket_connect_timeout=timeout
            )
        except ValueError as problem:
            raise Misuse(Code.BAD_URL, str(problem), "redis://[:PASSWORD@]HOST:PORT/DATABASE") from None
        if str(self._pool.connection_kwargs["protocol"]) != "2":
            raise Misuse(Code.BAD_URL, "the set store speaks RESP 2", "leave protocol out of the URL")
        # whatever the URL says: answers as this module reads them, and nothing is ever sent twice
        self._pool.connection_kwargs |= {
            "decode_responses": False,
            "retry": Retry(NoBackoff(), 0),
            "redis_connect_func": self._on_connect,
        }
        self._durability = durability

    @contextmanager
    def link(self) -> Iterator[Link]:
        """Yield a connection for some exchanges; after any error it is given up, with whatever was queued or
        watched on it."""
        try:
            connection: Any = self._pool.get_connection()
        except EscrowError:
            raise
        except (RedisError, OSError) as problem:
            raise failure(problem, sent=False) from problem
        try:
            yield Link(connection)
        except BaseException:
            with suppress(RedisError, OSError):
                connection.disconnect()
            raise
        finally:
            self._pool.release(connection)

    def close(self) -> None:
        """Let idle connections go; those in use go when they are done."""
        pool: Any = self._pool
        pool.disconnect(inuse_connections=False)

    def _on_connect(self, connection: Any) -> None:
        connection.on_connect()
        try:
            self.check(Link(connection))
        except EscrowError:
            connection.disconnect()
            raise

    def check(self, link: Link) -> dict[str, str]:
        """Return the server keeps what it is given, or Misuse(BAD_SETTING); what it says of itself (INFO). Asked on
        every new connection.

        A replica is Overloaded(QUEUE_FULL): what it takes, if it does, is gone when its primary is reachable again.
        """
        [raw] = link.ask(("INFO",))
        pairs = [line.partition(":") for line in raw.decode(errors="replace").splitlines() if ":" in line]
        told = {name: value.strip() for name, _, value in pairs}
        if told.get("role") == "slave":
            raise Overloaded(
                Code.QUEUE_FULL, "this Redis is a replica", "name its primary, or wait until this one takes over"
            )
        policy = told.get("maxmemory_policy", "noeviction")
        if told.get("maxmemory", "0") != "0" and policy.startswith("allkeys"):
            text = f"this Redis throws the sets away when its memory is full (maxmemory-policy {policy})"
            raise Misuse(Code.BAD_SETTING, text, "set maxmemory-policy noeviction")
        if self._durability != "memory":
            self._check_durable(link)
        return told

    def _check_durable(self, link: Link) -> None:
        [answer] = link.ask(("CONFIG", "GET", "append*"))
        settings = dict(zip(map(bytes.decode, answer[::2]), map(bytes.decode, answer[1::2]), strict=True))
        kept = settings.get("appendfsync", "no") if settings.get("appendonly") == "yes" else "no"
        if STRENGTH.index(kept) < STRENGTH.index(self._durability):
            raise Misuse(
                Code.BAD_SETTING,
                f"durability={self._durability!r} is asked for, and this Redis keeps to less",
                f"set appendonly yes and appendfsync {self._durability}, or ask the set store for less",
            )


class Link:
    """One connection, for the time of some exchanges."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def ask(self, *commands: Command) -> list[Any]:
        """Return the answers to commands that are sent together, each a step of its own. Raises the first error
        among them."""
        answers = self._exchange(commands)
        for answer in answers:
            if isinstance(answer, Exception):
                raise failure(answer)
        return answers

    def step(self, *commands: Command) -> list[Any] | None:
        """Return the answers to commands that Redis runs as one step (MULTI ... EXEC), all in one write; None: what
        was watched has changed,
        and nothing was done. An error while they are queued, such as a full memory, means that none of them was done.
        An error of one of them while they run undoes nothing: it stands in its place among the answers, for the
        caller to mend."""
        *queued, done = self._exchange([("MULTI",), *commands, ("EXEC",)])
        for answer in (*queued, done):
            if isinstance(answer, Exception) and not isinstance(answer, ExecAbortError):
                raise failure(answer)
        if isinstance(done, Exception):
            raise failure(done)
        answers: list[Any] | None = done
        return answers

    def unwatch(self) -> None:
        """Forget what was watched."""
        self.ask(("UNWATCH",))

    def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        connection = self._connection
        answers: list[Any] = []
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            for _ in commands:
                try:
                    answers.append(connection.read_response())
                except (ResponseError, BusyLoadingError) as problem:
                    answers.append(problem)
                    if isinstance(problem, BusyLoadingError):  # the client has hung up on it
                        raise
        except (RedisError, OSError) as problem:
            raise failure(problem) from problem
        return answers


def raise_first(answers: Sequence[Any]) -> None:
    """Raise the first error among the answers of a step."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise failure(answer)


def failure(problem: Exception, *, sent: bool = True) -> EscrowError:
    """Convert an error of Redis or of its client; ``sent``: whether a command may have reached the server."""
    text = str(problem) or type(problem).__name__
    # the client takes the first word away from the errors that it knows
    word = getattr(problem, "status_code", None) or text.split(maxsplit=1)[0]
    if isinstance(problem, OutOfMemoryError) or word in ("OOM", "MISCONF") or "OOM" in text:
        return Overloaded(
            Code.DISK_FULL, f"the Redis of the sets is full: {text}", "give it memory or disk; nothing was recorded"
        )
    if isinstance(problem, BusyLoadingError | ReadOnlyError) or word in _NOT_NOW:
        return Overloaded(
            Code.QUEUE_FULL, f"the Redis of the sets does not take this now: {text}", "repeat it; nothing was recorded"
        )
    if isinstance(problem, AuthenticationError | NoPermissionError) or word in _DENIED:
        return Denied(
            Code.DENIED,
            f"the Redis of the sets: {text}",
            "give the user all commands on keys escrowmq:sets:*, and INFO",
        )
    if word == "WRONGTYPE":
        return wrong_type(text)
    if isinstance(problem, ResponseError) and not isinstance(problem, redis.ConnectionError):
        return Misuse(
            Code.BAD_SETTING,
            f"the Redis of the sets refuses a command: {text}",
            "it must be Redis 6.2 or later, or what speaks as it does",
        )
    late = isinstance(problem, redis.TimeoutError) or text.startswith("Timeout")  # while connecting it is wrapped
    hint = None if sent else "is the server there, and the URL right? Nothing was sent to it"
    unknown = Unknown(Code.TIMED_OUT if late else Code.DISCONNECTED, f"the Redis of the sets: {text}", hint)
    unknown.left = sent
    return unknown


def wrong_type(text: str) -> Misuse:
    """For a key of ours that holds something else."""
    return Misuse(
        Code.BAD_SETTING,
        f"a key of the sets holds something else: {text}",
        "keys escrowmq:sets:* are the store's own: remove it, or use another database",
    )
