"""The status codes of RocketMQ's protocol for the errors of the broker."""

from __future__ import annotations

from typing import Any

from escrowmq import errors
from escrowmq.errors import Code, EscrowError
from escrowmq.gateway.rocketmq.protocol import definition

Status = definition.Code
OK = definition.Status(code=Status.OK, message="OK")

_CODES = {
    Code.BAD_TOPIC_NAME: Status.ILLEGAL_TOPIC,
    Code.BAD_GROUP_NAME: Status.ILLEGAL_CONSUMER_GROUP,
    Code.UNKNOWN_TOPIC: Status.TOPIC_NOT_FOUND,
    Code.UNKNOWN_GROUP: Status.CONSUMER_GROUP_NOT_FOUND,
    Code.UNKNOWN_TRANSACTION: Status.INVALID_TRANSACTION_ID,
    Code.CONFLICT: Status.INVALID_TRANSACTION_ID,
    Code.EXPIRED: Status.INVALID_TRANSACTION_ID,
    Code.WRONG_GROUP: Status.INVALID_TRANSACTION_ID,
    Code.WRONG_SHARD: Status.INVALID_TRANSACTION_ID,
    Code.MESSAGE_ID_TAKEN: Status.ILLEGAL_MESSAGE_ID,
    Code.LEASE_LOST: Status.INVALID_RECEIPT_HANDLE,
    Code.BODY_TOO_LARGE: Status.MESSAGE_BODY_TOO_LARGE,
    Code.KEY_TOO_LARGE: Status.ILLEGAL_MESSAGE_KEY,
    Code.TAG_TOO_LARGE: Status.ILLEGAL_MESSAGE_TAG,
    Code.PROPERTIES_TOO_LARGE: Status.MESSAGE_PROPERTIES_TOO_LARGE,
    Code.BAD_DELAY: Status.ILLEGAL_DELIVERY_TIME,
    Code.BATCH_TOO_LARGE: Status.PAYLOAD_TOO_LARGE,
    Code.TOO_MANY_OPEN: Status.TOO_MANY_REQUESTS,
    Code.QUEUE_FULL: Status.TOO_MANY_REQUESTS,
    Code.UNAUTHENTICATED: Status.UNAUTHORIZED,
    Code.NO_PERMISSION: Status.FORBIDDEN,
    Code.DISK_FULL: Status.HA_NOT_AVAILABLE,
    Code.BROKER_AWAY: Status.HA_NOT_AVAILABLE,
    Code.TIMED_OUT: Status.PROXY_TIMEOUT,
}
_BRANCHES = (
    (errors.Denied, Status.FORBIDDEN),
    (errors.Misuse, Status.BAD_REQUEST),
    (errors.Rejected, Status.BAD_REQUEST),
    (errors.Overloaded, Status.TOO_MANY_REQUESTS),
    (errors.Unknown, Status.PROXY_TIMEOUT),
)


class Refusal(Exception):
    """A request that this gateway rejects itself, with a status code of the protocol."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.status = definition.Status(code=code, message=text)


def status_of(problem: EscrowError | Refusal) -> Any:
    """Return the status of an error: by its code, else by its class."""
    if isinstance(problem, Refusal):
        return problem.status
    found = _CODES.get(problem.code)
    if found is None:
        found = next((code for branch, code in _BRANCHES if isinstance(problem, branch)), Status.INTERNAL_SERVER_ERROR)
    return definition.Status(code=found, message=str(problem)[:1000])
