"""Reads: what can be browsed, and how it is asked for."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

import pyarrow as pa

from escrowmq import schemas
from escrowmq.wire.values import QueueNumber, TimeUs

HALF_VIEW_NAME = "%half"
OP_VIEW_NAME = "%op"
ACK_VIEW_NAME = "%acks"
VIEWS: dict[str, pa.Schema] = {
    HALF_VIEW_NAME: schemas.HALF_VIEW,
    OP_VIEW_NAME: schemas.OP_VIEW,
    ACK_VIEW_NAME: schemas.ACK_VIEW,
}
"""The system views that are read by log position."""
DEAD_LETTER_PREFIX = "%dead-letters."  # + consumer group: its dead-letter queue, readable like a topic


class ReadRequest(TypedDict):
    """What to read: one queue of a topic, a system view, or the dead letters of a group; then, which rows and columns.

    The filters, from ``tags`` on, are applied before rows are counted. What is not asked for is neither read nor sent.
    """

    source: Annotated[str, "a topic, a system view (`%half`, `%op`, `%acks`), or `%dead-letters.GROUP`"]
    queue: NotRequired[Annotated[QueueNumber, "0 unless given"]]
    start: NotRequired[Annotated[int | None, "offset (of a view: log position); none, or 0 without `end`: the first"]]
    end: NotRequired[Annotated[int | None, "offset or position to stop before; none: what is durable now"]]
    max_rows: NotRequired[Annotated[int | None, "rows, at most"]]
    columns: NotRequired[Annotated[list[str] | None, "columns to send, in this order; none: all"]]
    tags: NotRequired[Annotated[list[str], "messages with one of these tags; not for `%op` and `%acks`"]]
    key: NotRequired[Annotated[str, "messages with this key; not for `%op` and `%acks`"]]
    stored_from_us: NotRequired[Annotated[TimeUs, "stored then or later (`%op`: decided, `%acks`: acknowledged)"]]
    stored_until_us: NotRequired[Annotated[TimeUs, "stored (decided, acknowledged) before then"]]
    group: NotRequired[Annotated[str, "of this consumer group; for `%acks` only"]]
