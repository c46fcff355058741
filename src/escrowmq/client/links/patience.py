"""Retries an admin action while its broker cannot be reached, until a deadline."""

from __future__ import annotations

import time

from escrowmq.errors import Code, EscrowError, Unknown
from escrowmq.platform.backoff import Backoff
from escrowmq.wire import Call, Link, ask
from escrowmq.wire.actions.action import Answer


def patient_action(link: Link, call: Call[Answer], deadline: float) -> Answer:
    """The answer to an action that may be repeated; repeats it until ``deadline`` (monotonic seconds) while the broker is
    away, then raises Unknown(TIMED_OUT)."""
    backoff = Backoff(0.02, 1.0)
    while True:
        left = deadline - time.monotonic()
        try:
            return ask(link, call, max(left, 0.001))
        except EscrowError as problem:
            if problem.code is not Code.DISCONNECTED:
                raise
            pause = backoff.failed()
            if left <= pause:
                raise Unknown(Code.TIMED_OUT, f"{link.address}: {problem.message}") from problem
        time.sleep(pause)
