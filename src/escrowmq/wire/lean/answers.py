"""What a broker says: its welcome, the answers to requests, refusals. Each as a frame, and read again by the client.

=========  ===========================================================================================
kind       content
=========  ===========================================================================================
WELCOME    :class:`Welcome` as an array; the number is 0
ROWS       the answer to SEND and PREPARE: ``[[code, position, queue, offset, transaction], ...]``
CODES      the answer to END and SETTLE: a byte for each row, not packed
ANSWERED   the answer to RECEIVE and BATCH: one Arrow IPC message without its schema, not packed
WITHDRAWN  nothing: the receive was withdrawn, and nothing was leased for it
ERROR      ``[code, message, hint, retry_after]``: the request as a whole is refused, or with the number 0 the connection
PONG       what the PING had
GONE       nothing: the broker stops; requests that it has not read are not begun
=========  ===========================================================================================
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, cast

import msgspec
import pyarrow as pa

from escrowmq.errors import Code, EscrowError, Overloaded, Rejected, error
from escrowmq.wire.exchanges import ANSWER, Exchange
from escrowmq.wire.lean.arrow import read_record_batch
from escrowmq.wire.lean.frames import Frame, Kind, begun, finished, frame
from escrowmq.wire.lean.rows import PRODUCED, UNREADABLE, UInt8, UInt32, UInt63, decoder, encoder
from escrowmq.wire.packing import LONGEST_MESSAGE
from escrowmq.wire.parcels import Answer, Row

_HEADER_AT = len(begun())


class Welcome(NamedTuple):
    """Who the broker is, and what it takes over this connection. A client compares shard and epoch with what the action ``hello``
    told: another process may have the port by now."""

    format: UInt32
    protocol: UInt32
    shard: UInt32
    epoch: UInt63
    version: str
    max_request_bytes: UInt63
    """A whole frame of a request."""
    max_requests: UInt63
    """Requests without an answer; more are not read from the connection until some are."""
    max_answer_bytes: UInt63
    """A whole frame of an answer."""


_Refusal = tuple[UInt8, str, str, Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None]

_read_welcome = decoder(Welcome)
_read_rows = decoder(PRODUCED)
_read_refusal = decoder(_Refusal)

# Made by the broker


def welcome(said: Welcome) -> bytes:
    """The answer to the greeting of one who is let in."""
    return frame(Kind.WELCOME, 0, encoder.encode(said))


def rows_answered(number: int, rows: list[Row]) -> bytearray:
    """The answer to a parcel of SEND or PREPARE."""
    made = begun()
    encoder.encode_into(rows, made, _HEADER_AT)
    return finished(made, Kind.ROWS, number)


def codes_answered(number: int, codes: bytes) -> bytes:
    """The answer to a parcel of END or SETTLE."""
    return frame(Kind.CODES, number, codes)


def batch_answered(number: int, batch: pa.RecordBatch) -> bytearray:
    """The answer to a batch or a receive."""
    made = begun()
    made += memoryview(batch.serialize())
    return finished(made, Kind.ANSWERED, number)


def withdrawn(number: int) -> bytes:
    """The answer to a receive that was withdrawn before anything was leased for it."""
    return frame(Kind.WITHDRAWN, number)


def refused(number: int, problem: EscrowError) -> bytes:
    """Why a request, or with the number 0 the connection, is refused. What it quotes of a request may be long: it is cut."""
    retry_after = float(problem.retry_after) if isinstance(problem, Overloaded) else None
    content = (int(problem.code), _cut(problem.message), _cut(problem.hint), retry_after)
    return frame(Kind.ERROR, number, encoder.encode(content))


def pong(content: bytes) -> bytes:
    """The answer to a ping."""
    return frame(Kind.PONG, 0, content)


def goodbye_from_broker() -> bytes:
    """The broker stops: it begins no more requests of this connection."""
    return frame(Kind.GONE, 0)


def _cut(text: str) -> str:
    return text[:LONGEST_MESSAGE].encode(errors="replace").decode()


# Read by the client


def read_answer(
    came: Frame, kind: Exchange | None = None
) -> Answer | pa.RecordBatch | EscrowError | Welcome | bytes | None:
    """What a frame of the broker holds, by its kind:

    WELCOME a :class:`Welcome`; ROWS a list of tuples, CODES bytes (the two forms of :data:`~escrowmq.wire.parcels.Answer`);
    ANSWERED a batch of schema ``ANSWER[kind]``, ``kind`` being the request's; WITHDRAWN and GONE None; ERROR an EscrowError, not raised;
    PONG bytes. Raises Rejected(BAD_REQUEST) for what cannot be read or is of no known kind: the connection is of no use then.
    """
    try:
        return _read(came, kind)
    except UNREADABLE as problem:
        raise error(Code.BAD_REQUEST, f"an answer cannot be read: {problem}") from None


def _read(came: Frame, kind: Exchange | None) -> Answer | pa.RecordBatch | EscrowError | Welcome | bytes | None:
    match came.kind:
        case Kind.ROWS:
            return cast(Answer, _read_rows(came.content))
        case Kind.CODES | Kind.PONG:
            return bytes(came.content)
        case Kind.ANSWERED if kind is not None:
            return read_record_batch(bytes(came.content), ANSWER[kind])
        case Kind.WITHDRAWN | Kind.GONE:
            return None
        case Kind.ERROR:
            return _problem(*_read_refusal(came.content))
        case Kind.WELCOME:
            return cast(Welcome, _read_welcome(came.content))
        case _:
            raise error(Code.BAD_REQUEST, f"an answer of kind {came.kind:#04x}, which nobody asked for")


def _problem(number: int, message: str, hint: str, retry_after: float | None) -> EscrowError:
    """A code of a newer version becomes BAD_REQUEST with its text."""
    try:
        return error(Code(number), message, hint, 1.0 if retry_after is None else retry_after)
    except (KeyError, ValueError):
        return Rejected(Code.BAD_REQUEST, f"error {number}: {message}", hint)
