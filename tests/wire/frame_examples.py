"""One frame of each kind, by the name that it has in frames.txt. Their bytes must never change."""

import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.model import Act, Outcome
from escrowmq.schemas import ENDED, ENDING
from escrowmq.wire import Exchange, Parcel, frames

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


WELCOME = frames.Welcome(2, 1, "0.2.0", 33 << 20, 4096, 65 << 20)
HELLO = {"protocol": 1, "shard": 1, "epoch": 2, "role": "leader"}
REFUSAL = error(Code.QUEUE_FULL, "full", "later", 0.5)
RECEIVE = {"group": "mail", "member": 7, "wait_ms": 1000}

EXAMPLES = {
    "HELLO": frames.hello(),
    "SEND": frames.parcel_request(1, Parcel(Exchange.SEND, [FULL], {"flush": "async"}, (0, 0))),
    "PREPARE": frames.parcel_request(2, Parcel(Exchange.PREPARE, [PLAIN], {"session": 5}, (1 << 63, 9))),
    "END": frames.parcel_request(3, Parcel(Exchange.END, ENDINGS, {"session": 5})),
    "SETTLE": frames.parcel_request(4, Parcel(Exchange.SETTLE, [(9, 10, 2, Act.NACK, -1, "why")], {"group": "mail"})),
    "RECEIVE": frames.receive_request(5, RECEIVE),
    "CANCEL": frames.cancel(5),
    "PING": frames.ping(b"now"),
    "GOODBYE": frames.goodbye(),
    "ACTION": frames.action_request(6, "topics.create", {"name": "orders"}),
    "READ": frames.read_request(7, {"source": "orders", "queue": 1}, 8 << 20),
    "CREDIT": frames.credit(7, 4 << 20),
    "WATCH": frames.watch(8, 5),
    "WELCOME": frames.welcome(WELCOME, HELLO),
    "ROWS": frames.rows_answer(2, [(0, 7, 1, -1, TRANSACTION), (37, -1, -1, -1, None)]),
    "CODES": frames.codes_answer(3, bytes([1, 18])),
    "WITHDRAWN": frames.withdrawn(5),
    "ERROR": frames.refused(2, REFUSAL),
    "PONG": frames.pong(b"now"),
    "GONE": frames.gone(),
    "RESULT": frames.result(6, {"name": "orders", "queues": 4}),
    "DONE": frames.done(7),
}
"""COLUMNS, BATCH, SCHEMA, PART and CHECKS hold what Arrow makes of a batch, which may change from one version of it to
another.
"""
