"""Compensation mode: store, send, delete, and send again what is left; needs an idempotent consumer.

| step | action |
| --- | --- |
| P1 | store the message together with the business change, and the broker that it belongs to |
| P2, P3 | send it there once, and receive the acknowledgement |
| P4 | delete the row |
| later | send what is left to the same broker again, after an interval or at the next start |

Messages of a broker that is away stay in the table: another broker may never get them, or two consumers could. A
repeated message has the same message id.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from escrowmq.errors import Code
from escrowmq.outbox.modes.journal import Int64s, Journal, Stage, ids_of, pick, to_batch
from escrowmq.outbox.modes.senders import Way, sender_of
from escrowmq.outbox.session import AnySession, transaction_of
from escrowmq.outbox.tables import trans_driven
from escrowmq.outbox.targets.seam import REFUSED, Codes
from escrowmq.platform.failpoints import reach

_log = logging.getLogger(__name__)


class Compensating:
    """``Compensating(producer, engine, "shop").send(message, business)``.

    ``way``: a producer (plain messages) or any target of the relay, which the caller closes. One thread at a time
    for a target.
    """

    def __init__(
        self, way: Way, engine: sa.Engine, group: str, *, sessions: Callable[[], Session] | None = None
    ) -> None:
        self._sender = sender_of(way)
        self._sessions = sessions or sessionmaker(engine)
        self._journal = Journal(engine, group)

    def send(self, messages: Any, business: Callable[[Session], object]) -> Codes:
        """Run the local transaction ``business(session)`` with one Message, or many in any form; then try once to send.

        When this returns the business change is committed, and the messages are stored. Returns one code per message.
        OK: sent and deleted here; otherwise :meth:`resend` sends it.
        """
        batch, shards = self._place(messages)
        with self._sessions() as session, session.begin():
            self._store(session, batch, shards)
            business(session)
        reach("compensating.stored")
        return self._send(batch, shards)

    def store_tx(self, session: AnySession, messages: Any) -> list[bytes]:
        """Store messages inside your transaction; return their ids. :meth:`resend` sends them after your commit."""
        batch, shards = self._place(messages)
        self._store(session, batch, shards)
        return ids_of(batch)

    def resend(self, *, older_than: float = 0.0) -> int:
        """Send the stored messages that are left, each to its own broker, and delete those with an OK. Returns how many
        are left.

        Call it at the start and regularly (:meth:`keep_resending`). ``older_than`` (seconds) skips messages that are
        just being sent; without it a message may be sent twice, which an idempotent consumer tolerates.
        """
        pages = self._journal.pages(Stage.TO_SEND, older_than)
        return sum(int(np.count_nonzero(self._send(batch, shards))) for batch, shards in pages)

    def keep_resending(self, interval: float, stop: threading.Event) -> None:
        """Call :meth:`resend` now and every ``interval`` seconds, until ``stop`` is set; for a thread of yours."""
        while True:
            try:
                self.resend(older_than=interval)
            except SQLAlchemyError as problem:
                _log.warning("the table cannot be read, trying again: %s", problem)
            if stop.wait(interval):
                return

    def _place(self, messages: Any) -> tuple[pa.RecordBatch, Int64s]:
        batch = to_batch(messages)
        return batch, self._sender.place(batch.column("key"))

    def _store(self, session: AnySession, batch: pa.RecordBatch, shards: Int64s) -> None:
        with transaction_of(session, trans_driven) as connection:
            self._journal.insert(connection, batch, shards, Stage.TO_SEND)

    def _send(self, batch: pa.RecordBatch, shards: Int64s) -> Codes:
        codes = self._sender.send(batch, shards)
        reach("compensating.sent")
        ids = ids_of(batch)
        for row in np.flatnonzero(REFUSED[codes]).tolist():
            _log.error("%s was refused with %s and stays here", ids[row].hex(), Code(int(codes[row])).name)
        self._journal.settle([Stage.TO_SEND], pick(ids, codes == 0), left=pick(ids, codes != 0))
        reach("compensating.deleted")
        return codes
