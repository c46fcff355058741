"""The interface of a relay target: one result code per row, order per key, a declared durability.

A target receives a record batch of schema :data:`escrowmq.schemas.OUTGOING` and returns for every row one
:class:`escrowmq.errors.Code`, of one of these meanings (:class:`escrowmq.errors.Meaning`):

- ``OK``: durable, as the target's :class:`Promise` defines it. Only such rows may be marked, purged or forgotten.
- *refused* (``BODY_TOO_LARGE``, ``UNKNOWN_TOPIC``, ...): this message is refused and would be again. It counts as an
  attempt; after the last one the row needs an operator.
- *not now* or *unknown* (``QUEUE_FULL``, ``DENIED``, ``TIMED_OUT``, ...): the target is full or away, or grants no
  rights, or the result is unknown. Nothing is counted; the row is sent again later, under the same message id.

Within one call rows of one key keep their order, and no OK follows a failed row of the same key: the rest of that key
gets ``QUEUE_FULL`` ("not tried"), so that a retry cannot overtake. ``send`` raises only Misuse (an error of the
caller); a target that is away returns codes.

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
    """The guarantees of a target, which the conformance suite checks."""

    name: str
    durable: str
    """When an OK is durable: one sentence for users."""
    deduplicates: bool = False
    """The same message id sent again makes no second copy (within a window that ``durable`` names)."""
    delays: bool = False
    """``delay_us`` is supported; else rows with a delay get ``BAD_DELAY``."""
    max_body_bytes: int | None = None
    """The largest body; None: the server's own limit, which it enforces."""


class Target(Protocol):
    """One connection to a broker. Used by one thread at a time."""

    @property
    def promise(self) -> Promise: ...

    def send(self, batch: pa.RecordBatch) -> Codes:
        """Send every row; return one code per row, at the latest after the target's timeout."""

    def close(self) -> None:
        """Close the connection. Idempotent."""
