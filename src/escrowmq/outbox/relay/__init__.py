"""The relay: sends committed rows of ``trans_message`` to a broker in batches, in order per key, without loss.

Theory of operation.

1. Rows are spread over 64 lanes by their key. A worker leases lanes; a lane has one worker at a time, so the order of a
   key is one worker's affair. Each living worker gets a fair share; the lanes of a dead one are taken over when its
   leases end.
2. A worker reads the PENDING rows of its lanes. Never "the rows after the last one that I saw": numbers are taken
   before the commit, and a lower one can appear later. What was not marked is simply still there.
3. A batch is one read, one send, and one write that only counts while the lanes are still this worker's. There is no
   write before the send: a worker that dies leaves nothing behind but leases that end.
4. A row is deleted or marked only after the target's durable OK. A death between the OK and the mark repeats the batch,
   under the same message ids, in the same order.
5. A row that was refused is put aside (RETRYING, later WAITING); later rows of its key are HELD, those of other keys
   are not. Both states leave the index that reads use, so a thousand of them do not slow the rest down.
6. What is left, and how old it is, is asked of the table: a worker's lanes say nothing about those of another, living
   or dead.
7. A target that is away is no row's fault: nothing is counted, the relay comes back later and later, with jitter.
"""

from __future__ import annotations

from escrowmq.outbox.relay.backlog import Backlog
from escrowmq.outbox.relay.options import RelayOptions
from escrowmq.outbox.relay.relay import Relay
from escrowmq.outbox.relay.statistics import Statistics

__all__ = ["Backlog", "Relay", "RelayOptions", "Statistics"]
