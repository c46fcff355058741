"""The barrier: check-back answered from a row that the local transaction wrote to its own database.

Theory of operation. ``trans_barrier`` holds at most one row per transaction id and branch: its primary key.

1. The local transaction inserts (id, branch, COMMITTED) among its own changes: :func:`bind_tx`. The row exists if and
   only if the local transaction committed.
2. The checker (:class:`Barrier`) inserts (id, branch, ROLLED_BACK) where there is no row, commits that, and only then
   reads, in a later snapshot, which row exists. COMMITTED is answered with COMMIT, ROLLED_BACK with ROLLBACK.
3. A local transaction in flight holds its row uncommitted: the checker's insert cannot pass it. It is left out, or
   given up, and answered with UNKNOWN; the broker repeats the check.
4. A local transaction that comes after the checker fails on the checker's row: it can never commit (LATE_COMMIT).

So no answer can be wrong at any moment, however slow a process is, and no answer is ever taken back. Correctness
depends on the primary key alone. The locks, dirty reads and short waits of ``marks.py`` only keep one transaction in
flight from delaying the checks of others.
"""

from escrowmq.outbox.barrier.binding import bind_batch_tx, bind_tx
from escrowmq.outbox.barrier.checking import AsyncBarrier, Barrier

__all__ = ["AsyncBarrier", "Barrier", "bind_batch_tx", "bind_tx"]
