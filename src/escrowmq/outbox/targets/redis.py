"""Redis Streams as a target, by ``redis`` (the extra ``redis``): topic → stream.

A batch is one script that Redis runs as one step: it skips ids that are marked as sent, adds the others with their
marks, and stops at a key's first failure. So no row is added twice, and none overtakes. For one primary, with or
without replicas; not for Redis Cluster, where a batch's streams are on several nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.retry import Retry

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.targets.rows import Int64s, Rows, behind_failures, hold_back
from escrowmq.outbox.targets.seam import Codes, Promise

BODY_FIELD = "escrowmq-body"
ROWS_A_SCRIPT = 500
BYTES_A_SCRIPT = 8 << 20
"""Limits of one script, because Redis serves no other client while it runs."""
MAX_PROPERTIES = 1000
"""Lua cannot pass more than a few thousand arguments to one command."""

SCRIPT = """
local max_length, mark_seconds = ARGV[1], ARGV[2]
local at, failed, answers = 3, {}, {}
for row = 1, #KEYS / 2 do
  local stream, mark, key, content = KEYS[2 * row - 1], KEYS[2 * row], ARGV[at], ARGV[at + 1]
  local count = tonumber(ARGV[at + 2])
  local known = mark_seconds ~= '0' and redis.call('GET', mark)
  if failed[key] then
    answers[row] = 'held back'
  elseif known and (known == content or string.find(known, '-', 1, true)) then
    answers[row] = ''
  elseif known then
    failed[key] = true
    answers[row] = 'taken'
  else
    local added
    if max_length == '0' then
      added = redis.pcall('XADD', stream, '*', unpack(ARGV, at + 3, at + 2 + count))
    else
      added = redis.pcall('XADD', stream, 'MAXLEN', '~', max_length, '*', unpack(ARGV, at + 3, at + 2 + count))
    end
    if type(added) == 'table' and added.err then
      failed[key] = true
      answers[row] = added.err
    else
      answers[row] = ''
      if mark_seconds ~= '0' then
        redis.call('SET', mark, content, 'EX', mark_seconds)
      end
    end
  end
  at = at + 3 + count
end
return answers
"""
"""A mark is the digest of the message's content; in version 0.1.0 it was the entry's id, which has a dash."""

DURABILITY = {
    "always": "it is in Redis's append-only file, synced to disk (appendfsync always)",
    "everysec": "Redis has it; a crash of its machine loses the last second or two (appendfsync everysec)",
    "memory": "Redis has it in memory; a restart may lose it",
}
"""The values of ``durability``, best first, and the guarantee of an OK."""
STRENGTH = ("no", "everysec", "always")


class RedisTarget:
    """Sends to the streams of one Redis."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        durability: str = "always",
        dedup_seconds: int = 3600,
        max_length: int = 0,
        wait_replicas: int = 0,
        prefix: str = "",
        max_body_bytes: int = 64 << 20,
    ) -> None:
        """``timeout``: seconds of one request. ``durability``: required of the server, see :data:`DURABILITY`; with a
        weaker server ``send`` raises Misuse(BAD_SETTING). ``dedup_seconds``: how long a sent id is stored (0: not at
        all). ``max_length``: trim streams to about so many entries (0: never), **read or unread**. ``wait_replicas``:
        OK only when so many replicas have it. ``prefix``: of every stream's name. Does not connect yet."""
        if durability not in DURABILITY:
            raise Misuse(Code.BAD_ARGUMENT, f"durability {durability!r}", f"one of {', '.join(DURABILITY)}")
        try:
            self._pool = redis.ConnectionPool.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0)
            )
        except ValueError as problem:
            raise Misuse(Code.BAD_URL, str(problem), "redis://[:PASSWORD@]HOST:PORT/DATABASE") from None
        self._timeout, self._durability, self._prefix = timeout, durability, prefix
        self._dedup_seconds, self._max_length, self._replicas = dedup_seconds, max_length, wait_replicas
        self._max_body_bytes = max_body_bytes
        self._client: redis.Redis | None = None
        self._closed = False

    @property
    def promise(self) -> Promise:
        """The guarantees by the options; a weaker server is refused."""
        copies = f", and {self._replicas} replicas have it in memory" if self._replicas else ""
        window = f"; an id is remembered for {self._dedup_seconds} s" if self._dedup_seconds else ""
        trimmed = f"; streams are trimmed to about {self._max_length} entries" if self._max_length else ""
        durable = DURABILITY[self._durability] + copies + window + trimmed
        return Promise("redis", durable, self._dedup_seconds > 0, max_body_bytes=self._max_body_bytes)

    def send(self, batch: Any) -> Codes:
        """Add the rows of a batch to their streams; return one code per row, see :mod:`escrowmq.outbox.targets.seam`.
        Raises Misuse(BAD_SETTING) if the server cannot keep the promise."""
        if self._closed:
            raise Misuse(Code.BAD_ARGUMENT, "the target is closed")
        rows = Rows(batch)
        codes = rows.refused(max_body_bytes=self._max_body_bytes, queues=False)
        for row, properties in enumerate(rows.properties):
            if properties and len(properties) > MAX_PROPERTIES:
                codes[row] = Code.PROPERTIES_TOO_LARGE
        hold_back(codes, rows.key_numbers)
        lost = False
        for part in _parts(np.flatnonzero(codes == Code.OK), rows):
            if lost:
                codes[part] = Code.QUEUE_FULL
                continue
            part = part[~behind_failures(codes, rows.key_numbers)[part]]
            if problem := self._run(rows, part, codes):
                codes[part] = problem
                lost = True
        hold_back(codes, rows.key_numbers)
        return codes

    def close(self) -> None:
        self._closed = True
        self._drop()

    def _run(self, rows: Rows, part: Int64s, codes: Codes) -> Code:
        """Add the rows numbered ``part`` to their streams by one script, and set their ``codes``. Returns OK, or the
        code that holds for all of them instead: the request failed, its result is unknown, or too few replicas have
        it."""
        try:
            client = self._connect()
            keys, arguments = self._arguments(rows, part)
            answers: list[bytes] = client.eval(SCRIPT, len(keys), *keys, *arguments)
            replicas: int = client.wait(self._replicas, int(self._timeout * 900)) if self._replicas else 0
        except redis.TimeoutError:
            self._drop()
            return Code.TIMED_OUT
        except (redis.ConnectionError, OSError) as problem:
            self._drop()
            return Code.DENIED if isinstance(problem, AuthenticationError) else Code.DISCONNECTED
        except ResponseError as problem:
            return _code(str(problem))
        codes[part] = [_code(answer.decode(errors="replace")) for answer in answers]
        return Code.TIMED_OUT if replicas < self._replicas else Code.OK

    def _arguments(self, rows: Rows, part: Int64s) -> tuple[list[str], list[Any]]:
        keys: list[str] = []
        arguments: list[Any] = [self._max_length, self._dedup_seconds]
        for row in part.tolist():
            stream = self._prefix + rows.topics[row]
            keys += [stream, f"escrowmq:sent:{stream}:{rows.ids[row]}"]
            fields: list[Any] = [BODY_FIELD, rows.bodies[row]]
            for name, value in rows.headers(row, key=True):
                fields += [name, value]
            arguments += [int(rows.key_numbers[row]), _digest(fields), len(fields), *fields]
        return keys, arguments

    def _connect(self) -> redis.Redis:
        if self._client is None:
            client = redis.Redis(connection_pool=self._pool, single_connection_client=True)
            try:
                self._check(client)
            except BaseException:
                client.close()
                raise
            self._client = client
        return self._client

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._pool.disconnect()

    def _check(self, client: redis.Redis) -> None:
        """Raise Misuse(BAD_SETTING) if the server's settings keep less than the promise, or may evict entries. Runs on
        every new connection."""
        try:
            settings = {**client.config_get("append*"), **client.config_get("maxmemory*")}
        except (ResponseError, NoPermissionError):
            if self._durability == "memory" and not self._dedup_seconds:
                return
            text = "this Redis does not show its settings, so it is unknown when an entry is durable"
            hint = "allow CONFIG GET, or require only durability='memory' and dedup_seconds=0"
            raise Misuse(Code.BAD_SETTING, text, hint) from None
        kept = settings.get("appendfsync", "no") if settings.get("appendonly") == "yes" else "no"
        if STRENGTH.index(kept) < STRENGTH.index(self._durability if self._durability != "memory" else "no"):
            text = f"durability={self._durability!r} is required, and this Redis guarantees less"
            hint = f"set appendonly yes and appendfsync {self._durability}, or require less of the target"
            raise Misuse(Code.BAD_SETTING, text, hint)
        policy = settings.get("maxmemory-policy", "noeviction")
        if settings.get("maxmemory", "0") != "0" and policy != "noeviction":
            text = f"this Redis evicts entries or marks when its memory is full (maxmemory-policy {policy})"
            raise Misuse(Code.BAD_SETTING, text, "set maxmemory-policy noeviction")


def _parts(wanted: Int64s, rows: Rows) -> Iterator[Int64s]:
    """Split row numbers into those of one script each, by its limits of rows and bytes; a row alone may be larger."""
    start, size = 0, 0
    for at, row in enumerate(wanted.tolist()):
        size += int(rows.body_bytes[row])
        if at > start and (size > BYTES_A_SCRIPT or at - start == ROWS_A_SCRIPT):
            yield wanted[start:at]
            start, size = at, int(rows.body_bytes[row])
    if len(wanted) > start:
        yield wanted[start:]


def _digest(fields: list[Any]) -> str:
    """Return the hexadecimal digest of a message's field names and values; equal for equal messages."""
    found = hashlib.blake2b(digest_size=16)
    for field in fields:
        raw = field if isinstance(field, bytes) else str(field).encode()
        found.update(len(raw).to_bytes(8, "big") + raw)
    return found.hexdigest()


def _code(answer: str) -> Code:
    """Return the code of the script's answer for a row (empty: OK) or of an error of Redis, which begins with a name in
    capitals. DISCONNECTED if it is not known."""
    if not answer:
        return Code.OK
    if "OOM" in answer:
        return Code.DISK_FULL
    return _CODES.get(answer.split(maxsplit=1)[0], Code.DISCONNECTED)


_CODES = {
    "taken": Code.MESSAGE_ID_TAKEN,
    "MISCONF": Code.DISK_FULL,
    "WRONGTYPE": Code.UNKNOWN_TOPIC,
    **dict.fromkeys(("held", "NOREPLICAS", "BUSY", "LOADING", "READONLY"), Code.QUEUE_FULL),
    **dict.fromkeys(("NOPERM", "NOAUTH", "WRONGPASS"), Code.DENIED),
}
