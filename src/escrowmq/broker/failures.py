"""Builds the error for a failed request, and sets the result or the error of a future."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TypeVar

from escrowmq.errors import Code, EscrowError, error

T = TypeVar("T")

logger = logging.getLogger(__name__)


def broker_failed(what: str, problem: BaseException) -> EscrowError:
    """Return the error for the caller of a request that failed with ``problem``: ``problem`` itself if it is an
    EscrowError. Anything else is a bug: it is logged with its traceback and ``what`` (the kind of request), and
    Unknown(BROKER_FAILED) is returned."""
    if isinstance(problem, EscrowError):
        return problem
    logger.error("the broker failed: %s", what, exc_info=problem)
    return error(Code.BROKER_FAILED, f"the broker failed on this request: {problem!r}")


def answer(future: Future[T], outcome: T | BaseException) -> Future[T]:
    """Set the result of a future, or its exception if ``outcome`` is one. Returns the future."""
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future


def for_client(problem: EscrowError) -> EscrowError:
    """Return the error as a client of a served broker gets it. CLOSED means here that the broker stopped during the
    request, LOG_FAILED that its log did: a disk failed, or another node took the log over. Both become SHARD_STOPPED:
    the client finds the leader, or waits for a restart."""
    if problem.code not in (Code.CLOSED, Code.LOG_FAILED):
        return problem
    return error(Code.SHARD_STOPPED, f"the broker is stopping: {problem.message}")
