"""Recorded histories: one JSON line per event, written before a call and after it returns. A call is *invoked*, and
then *ok* (it took effect), *fail* (it did not) or *unknown* (a timeout, a broken connection, a killed process).
Messages are named by their ``value`` (``writer-counter``), transactions by the name that their writer chose;
observations (deliveries, check-backs, the contents of a queue at the end) are recorded as *ok* only."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from escrowmq.errors import NOT_APPLIED, EscrowError


class Act(StrEnum):
    """The kinds of events."""

    SEND = "send"  # a plain message
    PREPARE = "prepare"  # a half message
    COMMIT = "commit"
    ROLLBACK = "rollback"
    ANSWER = "answer"  # the response of a checker; ``value`` is the outcome
    ASKED = "asked"  # a check-back; ``attempt`` counts from 1
    RECEIVE = "receive"  # a delivery to a consumer group
    ACK = "ack"
    STANDS = "stands"  # the last phase: a message in its queue
    STATE = "state"  # the last phase: a transaction; ``value`` is its state, ``attempt`` its checks
    KILL = "kill"
    EFFECT = "effect"  # the effect of a delivery in the consumer's database
    RECHECK = "recheck"  # an operator restarts the check-back of a transaction
    OPERATE = "operate"  # another operator action; named in ``note``
    DISCARD = "discard"  # an operator discards a dead letter
    RESET = "reset"  # an operator resets a group, ``value`` "forward" or "back", or deletes it
    MOVED = "moved"  # the result of a reset: the group continues in the queue at ``offset``
    PAUSED = "paused"  # an operator pauses a group (``position``: the log's, afterwards) or, ``value`` "no", resumes it
    FATE = "fate"  # the last phase: the state of a message for a group, other than "acked", in ``note``


class Kind(StrEnum):
    """The result of a call, as far as known."""

    INVOKE = "invoke"
    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Event:
    """One line. ``at_us``: wall time, microseconds, for people; only the order of lines counts."""

    process: str
    act: Act
    kind: Kind
    value: str | None = None
    transaction: str | None = None
    message_id: str | None = None
    broker: str | None = None
    topic: str | None = None
    queue: int | None = None
    offset: int | None = None
    group: str | None = None
    attempt: int | None = None
    intact: bool | None = None
    """Whether the payload matches its hash."""
    key: str | None = None
    position: int | None = None
    """Position in the log of its broker."""
    lease: int | None = None
    """Lease of a delivery or an acknowledgement; leases of one broker increase."""
    due_us: int | None = None
    """Earliest delivery time, by the broker's clock."""
    note: str | None = None
    at_us: int = 0

    def line(self) -> str:
        """Encode the event as a line of JSON, without absent fields."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({name: value for name, value in fields.items() if value is not None})

    @classmethod
    def parse(cls, line: str) -> Event:
        """Parse the event of a line; ValueError or KeyError for anything else."""
        fields = json.loads(line)
        return cls(**{**fields, "act": Act(fields["act"]), "kind": Kind(fields["kind"])})


class History:
    """A growing history, in memory and, if a path is given, in a file that survives its process. Thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        self.events: list[Event] = []
        self._file = path.open("a", encoding="utf-8") if path is not None else None
        self._lock = threading.Lock()

    def add(self, process: str, act: Act, kind: Kind, **details: Any) -> None:
        """Record an event now."""
        event = Event(process, act, kind, **details, at_us=time.time_ns() // 1000)
        with self._lock:
            self.events.append(event)
            if self._file is not None:
                self._file.write(event.line() + "\n")
                self._file.flush()

    @contextlib.contextmanager
    def call(self, process: str, act: Act, **details: Any) -> Iterator[Call]:
        """Record an invocation and its result, *ok*, *fail* or *unknown* by the exception; suppresses EscrowErrors."""
        self.add(process, act, Kind.INVOKE, **details)
        call, note = Call(details), None
        try:
            yield call
            call.result = Kind.OK
        except BaseException as raised:
            call.result, note = kind_of(raised), f"{type(raised).__name__}: {raised}"[:200]
            if not isinstance(raised, EscrowError):
                raise
        finally:
            self.add(process, act, call.result, **{**call.details, "note": note})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


@dataclass(slots=True)
class Call:
    """An invoked call with its ``result``; set ``details`` while it runs to extend the record."""

    details: dict[str, Any]
    result: Kind = Kind.INVOKE


def kind_of(problem: BaseException) -> Kind:
    """Return the result of a call that raised an exception: *fail* only if it was certainly not applied."""
    if isinstance(problem, EscrowError) and problem.code in NOT_APPLIED:
        return Kind.FAIL
    return Kind.UNKNOWN


def read(path: Path) -> Iterator[Event]:
    """Read the events of a file; the last line of a killed process may be incomplete and is skipped."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield Event.parse(line)


def payload(value: str, size: int = 200, **more: Any) -> bytes:
    """Return a verifiable body: JSON with the value, filler and a hash over all of it."""
    content = {"value": value, **more, "filler": "x" * max(size - len(value), 0)}
    text = json.dumps(content, sort_keys=True)
    return json.dumps({"hash": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), "content": content}).encode()


def unpack(body: bytes) -> tuple[dict[str, Any], bool]:
    """Return the content of a payload, and whether it is intact; ({}, False) for garbage."""
    try:
        parsed = json.loads(body)
        content = dict(parsed["content"])
        text = json.dumps(content, sort_keys=True)
        return content, parsed["hash"] == hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    except (ValueError, KeyError, TypeError):
        return {}, False
