"""Builds the error for a failed request, and sets the result or the error of a future. Bugs in the broker are
logged, and are a code to the caller.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TypeVar

from escrowmq.errors import Code, EscrowError, error

T = TypeVar("T")

logger = logging.getLogger(__name__)


def broker_failed(what: str, problem: BaseException) -> EscrowError:
    """Return the error for the caller of ``what`` (for the log), in which ``problem`` was raised.

    An EscrowError is a refusal and stays what it is; anything else is a bug: logged with its traceback,
    Unknown(BROKER_FAILED).
    """
    if isinstance(problem, EscrowError):
        return problem
    logger.error("the broker failed: %s", what, exc_info=problem)
    return error(Code.BROKER_FAILED, f"the broker failed on this request: {problem!r}")


def answer(future: Future[T], outcome: T | BaseException) -> Future[T]:
    """Give ``outcome`` as the result of a future, or raise it there; the future."""
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future


def for_client(problem: EscrowError) -> EscrowError:
    """Return the error as a client of a served broker sees it.

    CLOSED means here that the broker stopped while it worked on the request. LOG_FAILED means that its log did: a disk
    failed, or another node took the log over. Both are SHARD_STOPPED: the client finds the broker that leads, or waits
    for a restart.
    """
    if problem.code not in (Code.CLOSED, Code.LOG_FAILED):
        return problem
    return error(Code.SHARD_STOPPED, f"the broker is stopping: {problem.message}")
