"""Redis connections of the set store: checked when opened, exchanges of several commands, conversion of errors.

``redis``'s own pipelines hide when a command is sent, and which connection a WATCH is on; here an exchange is one write
and its responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ExecAbortError, NoPermissionError, RedisError, ResponseError
from redis.retry import Retry

from escrowmq.errors import Code, Denied, EscrowError, Misuse, Overloaded, Unknown
from escrowmq.outbox.targets.redis import DURABILITY, STRENGTH

Command = tuple[str | bytes | int | float, ...]

_NOT_NOW = ("LOADING", "READONLY", "MASTERDOWN", "NOREPLICAS", "BUSY", "CLUSTERDOWN", "TRYAGAIN")
_DENIED = ("NOPERM", "NOAUTH", "WRONGPASS")


class RedisServer:
    """Connections to one Redis. Thread-safe: each exchange uses a separate connection."""

    def __init__(self, url: str, *, timeout: float, durability: str) -> None:
        """Store the settings without connecting. ``timeout``: seconds per response. ``durability``: minimum of the
        server, see :data:`escrowmq.outbox.targets.redis.DURABILITY`. Raises Misuse (BAD_URL, BAD_ARGUMENT)."""
        if durability not in DURABILITY:
            raise Misuse(Code.BAD_ARGUMENT, f"durability {durability!r}", f"one of {', '.join(DURABILITY)}")
        try:
            timeouts = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
            self._pool = redis.ConnectionPool.from_url(url, protocol=2, **timeouts)
        except ValueError as problem:
            raise Misuse(Code.BAD_URL, str(problem), "redis://[:PASSWORD@]HOST:PORT/DATABASE") from None
        if str(self._pool.connection_kwargs["protocol"]) != "2":
            raise Misuse(Code.BAD_URL, "the set store speaks RESP 2", "leave protocol out of the URL")
        # overrides the URL: raw responses as this module reads them, and no command is ever sent twice
        self._pool.connection_kwargs |= {
            "decode_responses": False,
            "retry": Retry(NoBackoff(), 0),
            "redis_connect_func": self._on_connect,
        }
        self._durability = durability

    @contextmanager
    def link(self) -> Iterator[Link]:
        """Open a connection for some exchanges; any error closes it, with its queued and watched state."""
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
        """Close idle connections; connections in use close after their use."""
        self._pool.disconnect(inuse_connections=False)

    def _on_connect(self, connection: Any) -> None:
        connection.on_connect()
        try:
            self.check(Link(connection))
        except EscrowError:
            connection.disconnect()
            raise

    def check(self, link: Link) -> dict[str, str]:
        """Check the server and return its INFO fields; done for every new connection. Raises Misuse(BAD_SETTING) if the
        server does not keep its data, Overloaded(QUEUE_FULL) for a replica, which loses data when its primary
        returns."""
        [raw] = link.execute(("INFO",))
        pairs = [line.partition(":") for line in raw.decode(errors="replace").splitlines() if ":" in line]
        info = {name: value.strip() for name, _, value in pairs}
        if info.get("role") == "slave":
            hint = "name its primary, or wait until this one takes over"
            raise Overloaded(Code.QUEUE_FULL, "this Redis is a replica", hint)
        policy = info.get("maxmemory_policy", "noeviction")
        if info.get("maxmemory", "0") != "0" and policy.startswith("allkeys"):
            text = f"this Redis evicts the sets when its memory is full (maxmemory-policy {policy})"
            raise Misuse(Code.BAD_SETTING, text, "set maxmemory-policy noeviction")
        if self._durability == "memory":
            return info
        [answer] = link.execute(("CONFIG", "GET", "append*"))
        settings = dict(zip(map(bytes.decode, answer[::2]), map(bytes.decode, answer[1::2]), strict=True))
        kept = settings.get("appendfsync", "no") if settings.get("appendonly") == "yes" else "no"
        if STRENGTH.index(kept) < STRENGTH.index(self._durability):
            text = f"durability={self._durability!r} is required, but this Redis guarantees less"
            hint = f"set appendonly yes and appendfsync {self._durability}, or give the set store a lower durability"
            raise Misuse(Code.BAD_SETTING, text, hint)
        return info


class Link:
    """One connection, for the duration of some exchanges."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def execute(self, *commands: Command) -> list[Any]:
        """Send commands together, each a separate step; return their responses. Raises the first error among them."""
        answers = self._exchange(commands)
        raise_first(answers)
        return answers

    def step(self, *commands: Command) -> list[Any] | None:
        """Run commands as one step (MULTI ... EXEC) in one write; return their responses. None: a watched key has
        changed, and nothing was applied. An error while they are queued, such as a full memory, means that none was
        applied. An error of one command while running undoes nothing: it is in its place among the responses, and the
        caller must handle it."""
        *queued, done = self._exchange([("MULTI",), *commands, ("EXEC",)])
        raise_first([answer for answer in (*queued, done) if not isinstance(answer, ExecAbortError)])
        raise_first([done])
        answers: list[Any] | None = done
        return answers

    def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        connection = self._connection
        answers: list[Any] = []
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            for _ in commands:
                try:
                    answers.append(connection.read_response())
                except (ResponseError, redis.BusyLoadingError) as problem:
                    answers.append(problem)
                    if isinstance(problem, redis.BusyLoadingError):  # the client has closed the connection
                        raise
        except (RedisError, OSError) as problem:
            raise failure(problem) from problem
        return answers


def raise_first(answers: Sequence[Any]) -> None:
    """Raise the first error among the responses of a step."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise failure(answer)


def failure(problem: Exception, *, sent: bool = True) -> EscrowError:
    """Convert an error of Redis or of its client; ``sent``: whether a command may have reached the server."""
    text = str(problem) or type(problem).__name__
    # the client removes the first word of the errors that it knows
    word = getattr(problem, "status_code", None) or text.split(maxsplit=1)[0]
    if isinstance(problem, redis.OutOfMemoryError) or word in ("OOM", "MISCONF") or "OOM" in text:
        hint = "give it memory or disk; nothing was recorded"
        return Overloaded(Code.DISK_FULL, f"the Redis of the sets is full: {text}", hint)
    if isinstance(problem, redis.BusyLoadingError | redis.ReadOnlyError) or word in _NOT_NOW:
        what = f"the Redis of the sets does not take this now: {text}"
        return Overloaded(Code.QUEUE_FULL, what, "repeat it; nothing was recorded")
    if isinstance(problem, redis.AuthenticationError | NoPermissionError) or word in _DENIED:
        hint = "give the user all commands on keys escrowmq:sets:*, and INFO"
        return Denied(Code.DENIED, f"the Redis of the sets: {text}", hint)
    if word == "WRONGTYPE":
        return wrong_type(text)
    if isinstance(problem, ResponseError) and not isinstance(problem, redis.ConnectionError):
        hint = "it must be Redis 6.2 or later, or a compatible server"
        return Misuse(Code.BAD_SETTING, f"the Redis of the sets rejects a command: {text}", hint)
    late = isinstance(problem, redis.TimeoutError) or text.startswith("Timeout")  # while connecting it is wrapped
    unsent = None if sent else "is the server there, and the URL right? Nothing was sent to it"
    unknown = Unknown(Code.TIMED_OUT if late else Code.DISCONNECTED, f"the Redis of the sets: {text}", unsent)
    unknown.left = sent
    return unknown


def wrong_type(text: str) -> Misuse:
    """Return the error for a key of the store that has another type."""
    hint = "keys escrowmq:sets:* are the store's own: remove it, or use another database"
    return Misuse(Code.BAD_SETTING, f"a key of the sets holds something else: {text}", hint)
