"""One frame of each kind, by the name that it has in docs/lean.md. Their bytes must never change."""

import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.model import Act, Outcome
from escrowmq.schemas import ENDED, ENDING
from escrowmq.wire import Exchange, Parcel, lean

TRANSACTION = bytes.fromhex("00000001000000020000000000000007")
ENDINGS = [(TRANSACTION, Outcome.COMMIT)]
FULL = ("orders", b"\x00\xff", "k", "t", [("name", "value")], bytes(range(16)), 3, 1_000_000, 2, 3, TRANSACTION)
PLAIN = ("orders", b"paid", None, None, None, None, -1, 1_700_000_000_000_000, 0, 0, None)


def ending_batch():
    ids, outcomes = zip(*ENDINGS, strict=True)
    arrays = [pa.array(column, kind) for column, kind in zip((ids, outcomes), ENDING.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ENDING)


def ended_batch():
    return pa.RecordBatch.from_arrays([pa.array([1], pa.uint8())], schema=ENDED)


WELCOME = lean.Welcome(1, 1, 1, 2, "0.1.0", 4 << 20, 4096, 65 << 20)
REFUSAL = error(Code.QUEUE_FULL, "full", "later", 0.5)
RECEIVE = {"group": "mail", "member": 7, "wait_ms": 1000}

EXAMPLES = {
    "HELLO": lean.hello(),
    "SEND": lean.parcel_request(1, Parcel(Exchange.SEND, [FULL], {"flush": "async"}, (0, 0))),
    "PREPARE": lean.parcel_request(2, Parcel(Exchange.PREPARE, [PLAIN], {"session": 5}, (1 << 63, 9))),
    "END": lean.parcel_request(3, Parcel(Exchange.END, ENDINGS, {"session": 5})),
    "SETTLE": lean.parcel_request(4, Parcel(Exchange.SETTLE, [(9, 10, 2, Act.NACK, -1, "why")], {"group": "mail"})),
    "RECEIVE": lean.receive_request(5, RECEIVE),
    "CANCEL": lean.cancel(5),
    "PING": lean.ping(b"now"),
    "GOODBYE": lean.goodbye(),
    "WELCOME": lean.welcome(WELCOME),
    "ROWS": lean.rows_answered(2, [(0, 7, 1, -1, TRANSACTION), (37, -1, -1, -1, None)]),
    "CODES": lean.codes_answered(3, bytes([1, 18])),
    "WITHDRAWN": lean.withdrawn(5),
    "ERROR": lean.refused(2, REFUSAL),
    "PONG": lean.pong(b"now"),
    "GONE": lean.goodbye_from_broker(),
}
"""BATCH and ANSWERED hold what Arrow makes of a batch, which may change from one version of it to another."""
