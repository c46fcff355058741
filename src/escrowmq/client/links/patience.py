"""Retries an admin action while its broker cannot be reached, until a deadline."""

from __future__ import annotations

import time
from math import inf

from escrowmq.client.lanes.returning import rest
from escrowmq.client.links.presence import Attendance
from escrowmq.errors import AWAY, Code, EscrowError, Unknown
from escrowmq.platform.backoff import Backoff
from escrowmq.wire import Call, Link, ask
from escrowmq.wire.actions.action import Answer

TRY_SECONDS = 5.0
"""How long one of several brokers may be silent to one try of an action that is quickly done."""
_LOST = frozenset({Code.DISCONNECTED})


def patient_action(
    link: Link,
    call: Call[Answer],
    deadline: float,
    attendance: Attendance | None = None,
    *,
    longest: float = TRY_SECONDS,
) -> Answer:
    """The answer to an action that may be repeated; repeats it until ``deadline`` (monotonic seconds) while the broker is
    away, then raises Unknown(TIMED_OUT).

    With an ``attendance``, of one of several brokers, it is given up with Overloaded(BROKER_AWAY) once that broker counts as away,
    and one try takes no longer than ``longest`` seconds.
    """
    backoff = Backoff(0.02, 1.0)
    again, most = (_LOST, inf) if attendance is None else (AWAY, longest)
    while True:
        left = deadline - time.monotonic()
        if attendance is not None and attendance.away:
            raise attendance.refusal()
        try:
            return ask(link, call, min(max(left, 0.001), most))
        except EscrowError as problem:
            if problem.code not in again:
                raise
            if attendance is not None:
                attendance.suspect()
            pause = backoff.failed()
            if left <= pause:
                raise _unanswered(link, call, problem) from problem
        rest(link, pause)


def _unanswered(link: Link, call: Call[Answer], problem: EscrowError) -> Unknown:
    hint = None
    if call.reads_only:
        hint = "it was a question only: nothing was changed; is a broker running there (escrowmq serve)?"
    return Unknown(Code.TIMED_OUT, f"{link.address}: {problem.message}", hint)
