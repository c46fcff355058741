"""The barrier: check-back answered from a row that the local transaction wrote to its own database.

Theory of operation. ``trans_barrier`` holds at most one row for a transaction id and branch, because of its primary
key.

1. The local transaction inserts (id, branch, COMMITTED) among its own changes: :func:`bind_tx`. The row stands if and
   only if the local transaction committed.
2. The checker (:class:`Barrier`) inserts (id, branch, ROLLED_BACK) where there is no row, commits that, and only then
   reads, in a snapshot taken after it, which row stands. COMMITTED is answered with COMMIT, ROLLED_BACK with ROLLBACK.
3. A local transaction that is still in flight holds its row uncommitted: the checker's insert cannot go past it. It is
   left out, or given up, and answered with UNKNOWN; the broker asks again.
4. A local transaction that comes after the checker fails on the checker's row: it can never commit (LATE_COMMIT).

So there is no moment at which an answer could be wrong, however slow a process is, and no answer can be taken back.
Correctness rests on the primary key alone. All that ``marks.py`` does (locks that are tried, dirty reads, short waits)
only keeps one transaction in flight from holding up the questions about others.
"""

from escrowmq.outbox.barrier.binding import bind_batch_tx, bind_tx
from escrowmq.outbox.barrier.checking import AsyncBarrier, Barrier

__all__ = ["AsyncBarrier", "Barrier", "bind_batch_tx", "bind_tx"]
