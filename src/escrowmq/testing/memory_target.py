"""A relay's target in memory: implements the contract of ``outbox/targets/seam.py``, with fault injection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code
from escrowmq.outbox.targets.seam import Codes, Promise


@dataclass(frozen=True, slots=True)
class Taken:
    """One message that the target accepted."""

    message_id: bytes
    topic: str
    key: str | None
    tag: str | None
    properties: dict[str, str] | None
    body: bytes
    delay_us: int


class MemoryTarget:
    """Accepts everything, unless a test sets ``answer``. Thread-safe, so several relays can share one.
    ``answer(taken)`` returns the code of a row (OK by default). ``before()`` and ``after()`` are called around each
    batch, on the sender's thread; their exceptions reach the sender. ``deduplicates`` as in :class:`Promise`."""

    def __init__(self, *, deduplicates: bool = False) -> None:
        self.answer: Callable[[Taken], Code] = lambda _: Code.OK
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self.taken: list[Taken] = []
        """Rows with the code OK, in order; including repeats, unless the target de-duplicates."""
        self.batches = 0
        self._known: dict[tuple[str, bytes], Taken] = {}
        self._lock = threading.RLock()
        self._deduplicates = deduplicates

    @property
    def promise(self) -> Promise:
        """See :class:`escrowmq.outbox.targets.seam.Promise`."""
        return Promise("memory", "as long as this process lives", self._deduplicates, delays=True)

    @property
    def ids(self) -> list[bytes]:
        """The ids of :attr:`taken`."""
        with self._lock:
            return [taken.message_id for taken in self.taken]

    def send(self, batch: pa.RecordBatch) -> Codes:
        """Implement :meth:`escrowmq.outbox.targets.seam.Target.send`."""
        self.before()
        with self._lock:
            self.batches += 1
            stuck: set[str] = set()
            rows = batch.select([field.name for field in fields(Taken)]).to_pylist(maps_as_pydicts="strict")
            codes = [self._accept(Taken(**row), stuck) for row in rows]
        self.after()
        return np.array(codes, np.uint8)

    def close(self) -> None:
        """Do nothing."""

    def _accept(self, taken: Taken, stuck: set[str]) -> Code:
        if taken.key in stuck:
            return Code.QUEUE_FULL
        code, first = self.answer(taken), taken
        if code is Code.OK and self._deduplicates:
            first = self._known.setdefault((taken.topic, taken.message_id), taken)
            code = Code.OK if first == taken else Code.MESSAGE_ID_TAKEN
        if code is Code.OK and first is taken:
            self.taken.append(taken)
        if code is not Code.OK and taken.key is not None:
            stuck.add(taken.key)
        return code
