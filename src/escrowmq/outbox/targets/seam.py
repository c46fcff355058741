"""The interface of a relay target: one result code per row, order per key, a declared durability.

A target takes a record batch of schema :data:`escrowmq.schemas.OUTGOING` and answers every row with one
:class:`escrowmq.errors.Code`:

- ``OK``: durable, as the target's :class:`Promise` defines it. Only such rows may be marked, purged or forgotten.
- a code that means *refused* (``BODY_TOO_LARGE``, ``UNKNOWN_TOPIC``, ...): this message is refused and would be again.
  It counts as an attempt; when attempts run out the row waits for a person.
- a code that means *not now* or *unknown* (``QUEUE_FULL``, ``DENIED``, ``TIMED_OUT``, ...): the target is full or away,
  or has no rights for us, or the result is unknown. Nothing is counted, the row is sent again later, under the same
  message id.

The meanings are those of :class:`escrowmq.errors.Meaning`.

Within one call rows of one key keep their order, and a row that was not OK is never followed by an OK row of the same
key: the rest of that key is answered ``QUEUE_FULL`` ("not tried"), so that a retry cannot overtake. ``send`` itself
raises only Misuse (the caller is wrong); a target that is away answers with codes.

Every message carries its id, so that consumers can claim it: EscrowMQ has a column for it, the others get the header
:data:`MESSAGE_ID_HEADER` (32 hexadecimal digits), the key as :data:`KEY_HEADER` and the tag as :data:`TAG_HEADER` where
they have no place of their own for them; properties travel as headers of their own names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq import errors
from escrowmq.errors import flags

MESSAGE_ID_HEADER = "escrowmq-message-id"
KEY_HEADER = "escrowmq-key"
TAG_HEADER = "escrowmq-tag"

Codes = npt.NDArray[np.uint8]

REFUSED = np.frombuffer(flags(errors.REFUSED), np.bool_)
"""By code: surely not applied, and would be refused again."""
NOT_APPLIED = np.frombuffer(flags(errors.NOT_APPLIED), np.bool_)
"""By code: surely not applied."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The promise of a target, which the conformance suite checks."""

    name: str
    durable: str
    """When an OK is durable: one sentence for users."""
    deduplicates: bool = False
    """The same message id sent again makes no second copy (within a window that ``durable`` names)."""
    orders_keys: bool = True
    """Messages of one key come out in the order in which they were sent."""
    delays: bool = False
    """``delay_us`` is honoured; else rows with a delay are answered ``BAD_DELAY``."""
    max_body_bytes: int | None = None
    """The largest body; None: the server's own limit, found out by being refused."""


class Target(Protocol):
    """One connection to a broker. Used by one thread at a time."""

    @property
    def promise(self) -> Promise: ...

    def send(self, batch: pa.RecordBatch) -> Codes:
        """Send every row; one code per row, when the whole batch is answered or given up after the target's timeout."""
        ...

    def close(self) -> None:
        """Let the connection go. Idempotent."""
        ...
