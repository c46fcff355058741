"""Interpretation of ids in the difference of the two sets, and their repair.

An id that was announced but not recorded as handled is looked up at all brokers:

===================  ==========================================================================================
open or parked       the confirm was lost: apply the remedy
committed, plain     still in consumption, or its entry was lost: run its handler, which finds the mark; or nothing
rolled back, expired it was announced, so its business change is committed: a conflict, an operator decides
nowhere              not stored anywhere, though all brokers responded: retried, then an operator decides
unknown              a broker is unavailable, and no other one has it: retried without limit
===================  ==========================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from escrowmq.client.bus import Bus
from escrowmq.errors import AWAY, Code, Corrupt, EscrowError, Meaning, Misuse, Overloaded, Rejected, Unknown
from escrowmq.model import TransactionId
from escrowmq.platform.failpoints import reach

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A looked-up message, for a handler: same attributes as a received message."""

    topic: str
    key: str | None
    tag: str | None
    properties: Mapping[str, str]
    body: bytes
    message_id: bytes
    transaction_id: TransactionId | None
    stored_us: int
    state: str
    """``open``, ``parked``, ``committed`` or ``plain``."""


class State(Enum):
    """State of an id at the brokers; see the table of the module."""

    OPEN = "open"
    VISIBLE = "visible"
    REFUSED = "refused"
    NOWHERE = "nowhere"
    AWAY = "away"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of the look-up of one id."""

    message_id: bytes
    state: State
    rows: tuple[Mapping[str, Any], ...]
    """Messages of this id in the topics, in the form of ``Admin.lookup``."""
    text: str = ""
    """Why it is REFUSED, NOWHERE or AWAY."""


class Fate(Enum):
    """Result of one try for an id."""

    DONE = "done"
    LATER = "later"
    """A broker is unavailable; this does not count as a try."""
    FAILED = "failed"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Result:
    """The fate of an id, its reason, and the work done."""

    fate: Fate
    reason: str = ""
    effects: int = 0
    """Number of its messages that had their effect in this try."""
    committed: int = 0
    """Number of transactions committed for it."""
    resent: int = 0


# Look-ups


class LookUps:
    """Looks up many ids at all brokers concurrently. Thread-safe."""

    def __init__(self, bus: Bus, topics: Iterable[str], threads: ThreadPoolExecutor) -> None:
        self._bus = bus
        self._topics = frozenset(topics)
        self._threads = threads

    def find(self, ids: Sequence[bytes]) -> list[Finding]:
        """Look up each id."""
        return list(self._threads.map(self._find, ids))

    def _find(self, identity: bytes) -> Finding:
        only = next(iter(self._topics)) if len(self._topics) == 1 else None
        try:
            answer = self._bus.admin.lookup(message_id=identity, topic=only)
        except Rejected as problem:
            if problem.code is not Code.UNKNOWN_TOPIC:
                raise
            return judge(identity, ())
        except (Overloaded, Unknown, Corrupt) as problem:
            return Finding(identity, State.AWAY, (), str(problem))
        rows = [row for row in answer if row["topic"] in self._topics]
        away = "; ".join(f"{one['broker']}: {one['reason']}" for one in answer.missing)
        return judge(identity, rows, away)


def judge(identity: bytes, rows: Sequence[Mapping[str, Any]], away: str = "") -> Finding:
    """Interpret the rows of a look-up; ``away`` lists the brokers that did not respond (empty: none). A visible or open
    message anywhere is decisive; a rolled back or missing one only if all brokers responded."""
    visible = tuple(row for row in rows if row["state"] in ("committed", "plain"))
    undecided = tuple(row for row in rows if row["state"] in ("open", "parked"))
    if undecided:
        return Finding(identity, State.OPEN, (*undecided, *visible))
    if visible:
        return Finding(identity, State.VISIBLE, visible)
    if away:
        return Finding(identity, State.AWAY, (), away)
    if rows:
        states = " and ".join(sorted({f"{row['state'].replace('_', ' ')} ({row['transaction']})" for row in rows}))
        return Finding(identity, State.REFUSED, tuple(rows), f"it was announced, but its transaction is {states}")
    return Finding(identity, State.NOWHERE, (), "no broker has it")


# Effects


class Effects(Protocol):
    """Applies messages that the scheduler has looked up."""

    def apply(self, messages: Sequence[Any]) -> list[bool | Exception]:
        """Apply each message: True (new effect), False (had it before), or an error (no effect; retry possible)."""
        ...


def apply_in_steps(
    messages: Sequence[Any], step: Callable[[Sequence[Any]], list[bool]], size: int, permanent: Collection[Code] = ()
) -> list[bool | Exception]:
    """Apply ``size`` messages per step; those of a failed step one by one. Raises Misuse of a ``permanent`` code."""
    results: list[bool | Exception] = []
    for at in range(0, len(messages), size):
        part = messages[at : at + size]
        try:
            results += step(part)
        except Exception as problem:
            if isinstance(problem, Misuse) and problem.code in permanent:
                raise
            if len(part) == 1:
                results.append(problem)
                continue
            logger.info("%d messages failed together; retrying them one by one: %r", len(part), problem)
            results += apply_in_steps(part, step, 1, permanent)
    return results


# Remedies


class Remedy(Protocol):
    """Repairs ids that were looked up, except REFUSED and AWAY ones; NOWHERE only if ``resends``."""

    @property
    def resends(self) -> bool:
        """Return whether it can repair an id that no broker has."""
        ...

    def apply(self, findings: Sequence[Finding]) -> list[Result]:
        """Repair ids; return one result per id, in order. May be called again for the same ids, also by two schedulers
        at once."""
        ...


class Commit:
    """``commit``: commits open transactions as an operator, which needs no session of the producer group, and leaves
    the effect to the consumers."""

    resends = False

    def __init__(self, bus: Bus, threads: ThreadPoolExecutor) -> None:
        self._bus = bus
        self._threads = threads

    def apply(self, findings: Sequence[Finding]) -> list[Result]:
        """Commit every open transaction of each finding."""
        return list(self._threads.map(self._commit, findings))

    def _commit(self, finding: Finding) -> Result:
        committed, why = 0, "its confirm was lost (compensation)"
        for transaction in sorted({row["transaction"] for row in finding.rows if row["state"] in ("open", "parked")}):
            try:
                committed += self._bus.admin.commit(transaction, why=why) is Code.COMMITTED
            except EscrowError as problem:
                if problem.code in (Code.CONFLICT, Code.EXPIRED):  # decided by another process since the look-up
                    return Result(Fate.CONFLICT, f"{transaction}: {problem}", committed=committed)
                if problem.meaning is Meaning.REFUSED:
                    return Result(Fate.FAILED, f"{transaction}: {problem}", committed=committed)
                return Result(Fate.LATER, str(problem), committed=committed)
        return Result(Fate.DONE, committed=committed)


class Handle:
    """``handle``: the effect first, with the mark of the consumer group, then the commit. A later delivery finds the
    mark. A delayed message that is not visible is only committed: the consumers apply its effect when the broker's
    clock permits."""

    resends = False

    def __init__(self, effects: Effects, commit: Commit) -> None:
        self._effects = effects
        self._commit = commit

    def apply(self, findings: Sequence[Finding]) -> list[Result]:
        """Apply all effects, then commit where that succeeded."""
        messages: list[LookedUp] = []
        owners: list[int] = []
        failed: dict[int, str] = {}
        for number, finding in enumerate(findings):
            for row in finding.rows:
                if row["body"] is None:
                    failed[number] = f"the log is damaged at this message: {row['damaged']}"
                elif row["visible"] or not row["visible_us"]:
                    messages.append(to_looked_up(row))
                    owners.append(number)
        effects = [0] * len(findings)
        for owner, result in zip(owners, self._effects.apply(messages), strict=True):
            if isinstance(result, Exception):
                failed[owner] = f"{type(result).__name__}: {result}"
            else:
                effects[owner] += result
        reach("compensation.handled")
        ends = iter(self._commit.apply([one for number, one in enumerate(findings) if number not in failed]))
        results: list[Result] = []
        for number, count in enumerate(effects):
            if number in failed:
                results.append(Result(Fate.FAILED, failed[number], count))
                continue
            end = next(ends)
            reason = f"it has had its effect, but the commit failed: {end.reason}" if end.reason else ""
            results.append(Result(end.fate, reason, count, end.committed))
        return results


Resender = Callable[[bytes, LookedUp | None], object]


class Resend:
    """``resend``: the application sends the message again under the same id, which at the broker is the same message.
    ``function(message_id, message)`` receives the known message (None: no broker has it) and must wait for the response
    to its end. A message that is not visible afterwards counts as a failed try."""

    resends = True

    def __init__(self, function: Resender, lookups: LookUps) -> None:
        self._function = function
        self._lookups = lookups

    def apply(self, findings: Sequence[Finding]) -> list[Result]:
        """Send open or missing messages again, then check whether they are visible."""
        results: list[Result] = [Result(Fate.DONE)] * len(findings)
        sent: list[int] = []
        for number, finding in enumerate(findings):
            if finding.state is State.VISIBLE:
                continue
            try:
                self._function(finding.message_id, to_looked_up(finding.rows[0]) if finding.rows else None)
                sent.append(number)
            except Exception as problem:
                away = isinstance(problem, EscrowError) and problem.code in AWAY
                results[number] = Result(Fate.LATER if away else Fate.FAILED, f"{type(problem).__name__}: {problem}")
        reach("compensation.handled")
        for number, now in zip(sent, self._lookups.find([findings[number].message_id for number in sent]), strict=True):
            still = f"it was sent again, but is still {now.state.value}"
            seen = {State.VISIBLE: (Fate.DONE, ""), State.AWAY: (Fate.LATER, now.text)}
            results[number] = Result(*seen.get(now.state, (Fate.FAILED, still)), resent=1)
        return results


def to_looked_up(row: Mapping[str, Any]) -> LookedUp:
    """Convert a row of a look-up for a handler."""
    plain = {name: row[name] for name in ("topic", "key", "tag", "properties", "body", "stored_us", "state")}
    transaction = None if row["transaction"] is None else TransactionId.parse(row["transaction"])
    return LookedUp(message_id=bytes.fromhex(row["message_id"]), transaction_id=transaction, **plain)
