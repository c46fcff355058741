"""Bugs in the broker: an exception that is no refusal goes to the log with its traceback, and to the caller as a code."""

from __future__ import annotations

import logging

from escrowmq.errors import Code, EscrowError, error

logger = logging.getLogger(__name__)


def broker_failed(what: str, problem: BaseException) -> EscrowError:
    """The error for the caller of ``what`` (for the log), in which ``problem`` was raised: Unknown(BROKER_FAILED)."""
    logger.error("the broker failed: %s", what, exc_info=problem)
    return error(Code.BROKER_FAILED, f"the broker failed on this request: {problem!r}")
