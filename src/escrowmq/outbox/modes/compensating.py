"""Compensation mode: store, send, delete, send again what is left; needs an idempotent consumer.

| step | what |
| --- | --- |
| P1 | the message is stored together with the business change, with the broker that it belongs to |
| P2, P3 | it is sent there once, and acknowledged |
| P4 | the row is deleted |
| later | what is left is sent again to the same broker, after an interval or at the next start |

A broker that is away keeps its messages waiting here: another one may never get them, or two consumers could. What
comes twice comes under the same message id.
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

from escrowmq.client.producing.producer import Producer
from escrowmq.errors import Code
from escrowmq.outbox.modes.journal import Int64s, Intake, Journal, Stage, ids_of, some
from escrowmq.outbox.modes.senders import Sender, sender_of
from escrowmq.outbox.session import AnySession, transaction_of
from escrowmq.outbox.tables import trans_driven
from escrowmq.outbox.targets.seam import REFUSED, Codes, Target
from escrowmq.platform.failpoints import reach

_log = logging.getLogger(__name__)


class Compensating:
    """``Compensating(producer, engine, "shop").send(message, business)``.

    ``way``: a producer (plain messages) or any target of the relay; it belongs to its maker. One thread at a time
    for a target.
    """

    def __init__(
        self,
        way: Producer | Target | Sender,
        engine: sa.Engine,
        group: str,
        *,
        sessions: Callable[[], Session] | None = None,
    ) -> None:
        self._sender = sender_of(way)
        self._sessions = sessions or sessionmaker(engine)
        self._journal = Journal(engine, group)
        self._intake = Intake()

    def send(self, messages: Any, business: Callable[[Session], object]) -> Codes:
        """One Message, or many in any form, and one local transaction ``business(session)``; then one try to send.

        When this returns the business change is committed, and the messages are stored. One code per message: OK: sent
        and deleted here; else it waits for :meth:`resend`.
        """
        batch = self._intake(messages)
        shards = self._sender.place(batch.column("key"))
        with self._sessions() as session, session.begin():
            self._store(session, batch, shards)
            business(session)
        reach("compensating.stored")
        return self._send(batch, shards)

    def store_tx(self, session: AnySession, messages: Any) -> list[bytes]:
        """Store messages inside your transaction; their ids. :meth:`resend` sends them once you have committed."""
        batch = self._intake(messages)
        self._store(session, batch, self._sender.place(batch.column("key")))
        return ids_of(batch)

    def resend(self, *, older_than: float = 0.0) -> int:
        """Send what is left, each message to its own broker; how many are left after that.

        Call it at the start and every now and then (:meth:`keep_resending`). ``older_than`` (seconds) passes over what
        is just being sent; without it a message may be sent twice, which an idempotent consumer does not mind.
        """
        pages = self._journal.pages(Stage.TO_SEND, older_than)
        return sum(int(np.count_nonzero(self._send(batch, shards))) for batch, shards in pages)

    def keep_resending(self, interval: float, stop: threading.Event) -> None:
        """:meth:`resend` now and every ``interval`` seconds, until ``stop`` is set; for a thread of yours."""
        while True:
            try:
                self.resend(older_than=interval)
            except SQLAlchemyError as problem:
                _log.warning("the table cannot be read, trying again: %s", problem)
            if stop.wait(interval):
                return

    def _store(self, session: AnySession, batch: pa.RecordBatch, shards: Int64s) -> None:
        with transaction_of(session, trans_driven) as connection:
            self._journal.insert(connection, batch, shards, Stage.TO_SEND)

    def _send(self, batch: pa.RecordBatch, shards: Int64s) -> Codes:
        codes = self._sender.send(batch, shards)
        reach("compensating.sent")
        ids = ids_of(batch)
        for row in np.flatnonzero(REFUSED[codes]).tolist():
            _log.error("%s was refused with %s and stays here", ids[row].hex(), Code(int(codes[row])).name)
        self._journal.settle([Stage.TO_SEND], some(ids, codes == 0), left=some(ids, codes != 0))
        reach("compensating.deleted")
        return codes
