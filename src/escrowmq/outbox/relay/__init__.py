"""The relay: sends committed rows of ``trans_message`` to a broker in batches, in order per key, without loss.

Theory of operation.

1. Rows are spread over 64 lanes by their key. A worker leases lanes; a lane has one worker at a time, which keeps the
   order of its keys. Each living worker gets a fair share; the lanes of a dead one are taken over when its leases end.
2. A worker reads the PENDING rows of its lanes, never "the rows after the last one": numbers are taken before the
   commit, and a lower one can appear later. An unmarked row simply stays.
3. A batch is one read, one send, and one write that only counts while the lanes are still this worker's. There is no
   write before the send: a worker that dies leaves nothing behind but leases that end.
4. A row is deleted or marked only after the target's durable OK. A crash between the OK and the mark repeats the batch,
   under the same message ids, in the same order.
5. A refused row is put aside (RETRYING, later WAITING); later rows of its key are HELD, those of other keys are not.
   Both states leave the index that reads use, so a thousand of them do not slow the rest down.
6. The backlog and its age are read from the table, because other workers, living or dead, have lanes too.
7. A target that is away is no row's fault: nothing is counted, and the relay retries with growing pauses and jitter.
"""

from __future__ import annotations

from escrowmq.outbox.relay.metrics import Backlog, Statistics
from escrowmq.outbox.relay.options import RelayOptions
from escrowmq.outbox.relay.relay import Relay

__all__ = ["Backlog", "Relay", "RelayOptions", "Statistics"]
