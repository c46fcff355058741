"""The frames between clients and brokers: the whole protocol, byte by byte.

A client uses one connection to a broker, a TCP socket with TLS or without, or a Unix socket. It carries everything:
small requests as rows, Arrow batches of any size, actions, reads as streams, and the check-backs that the broker
initiates. The port is 7700 unless another is given; with TLS (1.2 or newer) the handshake comes first.

**Frames.** Both sides send frames. All numbers of the header are little-endian:

| at byte | type | content |
| --- | --- | --- |
| 0 | u32 | bytes that follow this number: 12, the padded head and the body |
| 4 | u8 | the kind |
| 5 | u8 | flags: `0x01` MORE: further parts of this answer follow |
| 6 | u16 | bytes of the head, without its padding |
| 8 | u64 | number of the request, chosen by the client from 1; 0 in frames that belong to no request |
| 16 | bytes | the head, one value in [msgpack](https://msgpack.org), padded with zeros to a multiple of 8 |
| ... | bytes | the body |

**What a client sends**

| kind | name | head | body |
| --- | --- | --- | --- |
| `0x01` | HELLO | `["EscrowMQ" as bin, 2, 1, null]`: version of the format, version of the protocol, token or \
null | |
| `0x02` | SEND | | msgpack `[options, rows, [instance, sequence]]` |
| `0x03` | PREPARE | | the same |
| `0x04` | END | | msgpack `[options, rows]` |
| `0x05` | SETTLE | | the same |
| `0x06` | RECEIVE | options | |
| `0x07` | COLUMNS | `[kind, options]`: a kind from `0x02` to `0x05` | a batch of the exchange's request schema |
| `0x08` | CANCEL | | ; the number is that of a receive, a read or a watch |
| `0x09` | PING | | at most 64 bytes |
| `0x0a` | GOODBYE | | ; the client sends no further frames |
| `0x0b` | ACTION | the action's name | its request in JSON |
| `0x0c` | READ | credit in bytes | the read request in JSON |
| `0x0d` | CREDIT | bytes in addition | ; the number is that of the read |
| `0x0e` | WATCH | the session | |

**What a broker sends**

| kind | name | head | body |
| --- | --- | --- | --- |
| `0x81` | WELCOME | `[format, protocol, version, max_request_bytes, max_requests, max_answer_bytes]` | the answer to \
the action `hello` in JSON |
| `0x82` | ROWS | | the answer to SEND and PREPARE: msgpack `[row, ...]` |
| `0x83` | CODES | | the answer to END and SETTLE: one byte a row |
| `0x84` | BATCH | of the first of several parts: bytes of the whole message (u64) | the answer to RECEIVE and \
COLUMNS: a batch, or a part of it |
| `0x85` | WITHDRAWN | | ; the receive was withdrawn, and nothing was leased for it |
| `0x86` | ERROR | | msgpack `[code, message, hint, retry_after]`; `retry_after` is seconds or null |
| `0x87` | RESULT | | the answer to ACTION in JSON |
| `0x88` | SCHEMA | | the first answer to READ: an Arrow IPC schema message |
| `0x89` | PONG | | the bytes of the PING |
| `0x8a` | GONE | | ; the broker stops |
| `0x8b` | PART | as of BATCH | a batch of a read, or a part of it |
| `0x8c` | DONE | | ; the read or the watch is over |
| `0x8d` | CHECKS | as of BATCH | a batch of checks, or a part of it; the number is that of the watch |

`options` are a msgpack map of at most 32 names and 4096 bytes, of texts, whole numbers, true, false and null; inside a
body they are a `bin` that holds the map. Texts are `str` in UTF-8; bodies of messages and ids (16 bytes) are `bin`.
JSON is one object in UTF-8; an empty body stands for `{}`. A *batch* is one encapsulated Arrow IPC message of a record
batch; its schema is known and not sent, and it must not be compressed.

**Rows** are arrays with a fixed number of values; a request has 1 to 256 of them. Units are those of the Arrow schemas
below.

| rows of | values |
| --- | --- |
| SEND, PREPARE | topic, body, key or null, tag or null, properties (`[[name, value], ...]`) or null, message id or \
null, queue (-1: the broker chooses), born_us, delay_us, immunity_us, transaction to join or null |
| END | transaction, outcome (0 unknown, 1 commit, 2 rollback) |
| SETTLE | lease, start, count, act (0 ack, 1 nack, 2 extend, 3 release, 4 reject), delay_us, cause or null |
| ROWS | code, position, queue, offset, transaction or null |

Rows without a message id get the ids *instance, sequence*, *instance, sequence + 1* and so on, each 8 bytes,
big-endian.

**Rules**

1. The client's first frame is HELLO, of at most 2048 bytes. The broker answers WELCOME, or ERROR with the number 0 and
   closes. The client sends nothing before that answer. WELCOME shows whether this broker leads (`role`), and the URL of
   the leader (`leader`). A client that does not send HELLO within 5 s is disconnected, and so is one that does not
   complete a frame within 60 s after its first byte.
2. A number must be unique among the client's requests without a final answer. Requests of one connection *take effect*
   in the order in which they were sent; answers come in any order. Final answers are ROWS, CODES, the last part of
   BATCH, WITHDRAWN, RESULT, DONE and ERROR; each request gets one.
3. Unreadable content, or an unknown kind with a number, is answered with ERROR (`BAD_BATCH`, `BAD_REQUEST`) to its
   number, nothing of it takes effect, and the connection stays open. An impossible header (a length that is too short
   or over the limit), and any other violation of these rules, is answered with ERROR with the number 0, and the
   connection is closed.
4. A frame of a request has at most `max_request_bytes` bytes, a whole message of an answer at most `max_answer_bytes`.
5. Answers of more than 1 MiB are sent in parts. Small answers of the same connection are sent between two parts.
6. A read sends SCHEMA, batches, then DONE. It begins no further batch while its credit is used up; the client returns
   credit with CREDIT for the bytes of bodies that it has consumed. Our client begins with 8 MiB and renews at half.
7. A watch registers the connection for check-backs of the session's transactions: CHECKS arrive under the watch's
   number until CANCEL, which is answered with DONE. The first is an empty batch: the connection is registered. ERROR
   ends it (the session is fenced, the broker stops). Answers to checks are END or COLUMNS requests with the options
   `{"session": S, "by": 1}`.
8. CANCEL of a receive: if something was leased for it before, BATCH is its answer; else WITHDRAWN. CANCEL of a number
   without an open request does nothing.
9. Waiting receives are withdrawn when the connection ends for any reason, and by GOODBYE; the other requests still
   take effect. Reads and watches end with ERROR (`SHARD_STOPPED`), never with DONE: a read that ended with DONE is
   complete. After GOODBYE the broker answers the requests that it has begun, then closes.
10. GONE: the broker stops, or stops leading. Requests that it has begun are still answered; later ones are answered
    with `SHARD_STOPPED` or `NOT_LEADER`, or not at all.
11. Nothing is sent to keep a connection alive; the system probes the other side after a minute of silence. A client
    that waits for an answer uses PING to check whether the broker still works.

``tests/wire/frames.txt`` has one frame of each kind in bytes. ``examples/protocol/main.go`` is a client in Go: a
transaction with check-back, a receive, an acknowledgement.
"""

from escrowmq.wire.frames.answers import (
    Welcome,
    batch_answer,
    checks,
    codes_answer,
    done,
    gone,
    part_answer,
    pong,
    read_refusal,
    read_result,
    read_rows,
    read_schema,
    read_welcome,
    refused,
    result,
    rows_answer,
    schema_answer,
    welcome,
    withdrawn,
)
from escrowmq.wire.frames.columns import SCATTER_BYTES, decode_batch
from escrowmq.wire.frames.frame import (
    CONTINUED,
    FORMAT_VERSION,
    HEADER_BYTES,
    IN_PARTS,
    MORE,
    PART_BYTES,
    SCRATCH_BYTES,
    Assembler,
    Frame,
    Gatherer,
    Kind,
    Piece,
    Pieces,
    drop_bytes,
    finish_frame,
    is_large,
    size_of,
)
from escrowmq.wire.frames.requests import (
    FRAME_ROOM,
    MAX_HELLO_BYTES,
    MAX_PING_BYTES,
    READ_CREDIT,
    action_name,
    action_request,
    cancel,
    columns_request,
    credit,
    goodbye,
    hello,
    parcel_request,
    ping,
    read_action,
    read_columns,
    read_credit,
    read_hello,
    read_parcel,
    read_read,
    read_receive,
    read_request,
    read_watch,
    receive_request,
    watch,
)
from escrowmq.wire.frames.rows import EXCHANGE_OF, NUMBER_OF

__all__ = [
    "CONTINUED",
    "EXCHANGE_OF",
    "FORMAT_VERSION",
    "FRAME_ROOM",
    "HEADER_BYTES",
    "IN_PARTS",
    "MAX_HELLO_BYTES",
    "MAX_PING_BYTES",
    "MORE",
    "NUMBER_OF",
    "PART_BYTES",
    "READ_CREDIT",
    "SCATTER_BYTES",
    "SCRATCH_BYTES",
    "Assembler",
    "Frame",
    "Gatherer",
    "Kind",
    "Piece",
    "Pieces",
    "Welcome",
    "action_name",
    "action_request",
    "batch_answer",
    "cancel",
    "checks",
    "codes_answer",
    "columns_request",
    "credit",
    "decode_batch",
    "done",
    "drop_bytes",
    "finish_frame",
    "gone",
    "goodbye",
    "hello",
    "is_large",
    "parcel_request",
    "part_answer",
    "ping",
    "pong",
    "read_action",
    "read_columns",
    "read_credit",
    "read_hello",
    "read_parcel",
    "read_read",
    "read_receive",
    "read_refusal",
    "read_request",
    "read_result",
    "read_rows",
    "read_schema",
    "read_watch",
    "read_welcome",
    "receive_request",
    "refused",
    "result",
    "rows_answer",
    "schema_answer",
    "size_of",
    "watch",
    "welcome",
    "withdrawn",
]
