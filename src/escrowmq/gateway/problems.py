"""Conversion of errors into HTTP responses: a status and a JSON problem document."""

from __future__ import annotations

import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from escrowmq import errors
from escrowmq.errors import Code, EscrowError, Overloaded, Unknown, error
from escrowmq.gateway.models import Problem

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
SOME_REFUSED = 207
"""Status if some items of a request failed: each has its own result."""

_BRANCHES: tuple[tuple[type[EscrowError], int], ...] = (
    (errors.Misuse, 400),
    (errors.Rejected, 400),
    (errors.Fenced, 409),
    (errors.Overloaded, 503),
    (errors.Unknown, 504),
    (errors.Denied, 403),
    (errors.Corrupt, 500),
)
_STATUSES: dict[int, tuple[Code, ...]] = {
    401: (Code.UNAUTHENTICATED,),
    403: (Code.NO_PERMISSION, Code.WRONG_GROUP),
    404: (Code.UNKNOWN_TRANSACTION, Code.UNKNOWN_TOPIC, Code.UNKNOWN_GROUP, Code.NOT_FOUND, Code.WRONG_SHARD),
    409: (
        Code.CONFLICT,
        Code.TRANSACTION_DECIDED,
        Code.GROUP_KIND,
        Code.GROUP_RULES,
        Code.MESSAGE_ID_TAKEN,
        Code.LEASE_LOST,
        Code.ALREADY_EXISTS,
        Code.SUBSCRIPTION_MISMATCH,
        Code.TOO_MANY,
    ),
    410: (Code.EXPIRED, Code.RANGE_PURGED),
    413: tuple(code for code in Code if code.name.endswith("_TOO_LARGE")),
    429: (Code.TOO_MANY_OPEN,),
}
_CODES = {code: status for status, codes in _STATUSES.items() for code in codes}


def status_of(problem: EscrowError) -> int:
    """Return the HTTP status of an error: by its code, else by its class."""
    if problem.code in _CODES:
        return _CODES[problem.code]
    return next((status for branch, status in _BRANCHES if isinstance(problem, branch)), 500)


def to_problem(problem: EscrowError) -> Problem:
    """Convert an error to its model, with ``message_ids`` and ``transaction_id`` if a route attached them."""
    identity = getattr(problem, "message_id", None)
    return Problem(
        code=int(problem.code),
        name=problem.code.name,
        message=problem.message,
        hint=problem.hint,
        retry_after=problem.retry_after if isinstance(problem, Overloaded) else None,
        message_id=identity.hex() if isinstance(identity, bytes) else None,
        message_ids=getattr(problem, "message_ids", None),
        transaction_id=getattr(problem, "transaction_id", None),
    )


def problem_response(
    problem: EscrowError, status: int | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return the response for a rejected request."""
    given = dict(headers or {})
    if isinstance(problem, Overloaded):
        given["Retry-After"] = str(max(math.ceil(problem.retry_after), 1))
    content = to_problem(problem).model_dump(exclude_none=True)
    return JSONResponse(content, status or status_of(problem), given, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Register handlers so that every failure becomes a problem document."""
    app.add_exception_handler(EscrowError, _on_escrow_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


async def _on_escrow_error(_: Request, problem: Any) -> JSONResponse:
    return problem_response(problem)


async def _on_invalid_request(_: Request, problem: Any) -> JSONResponse:
    first = problem.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(problem.errors()) - 1} more)" if len(problem.errors()) > 1 else ""
    text = f"{place}: {first['msg']}{more}".encode("utf-8", "backslashreplace").decode()
    return problem_response(error(Code.BAD_REQUEST, text[:1000], "see /docs"))


async def _on_http_error(_: Request, problem: Any) -> JSONResponse:
    code = Code.NOT_FOUND if problem.status_code == 404 else Code.BAD_REQUEST
    return problem_response(
        error(code, str(problem.detail), "see /docs"), problem.status_code, dict(problem.headers or {})
    )


async def _on_bug(_: Request, problem: Exception) -> JSONResponse:
    logger.error("a request failed", exc_info=problem)
    return problem_response(Unknown(Code.CLOSED, "the gateway failed on this request"), 500)
