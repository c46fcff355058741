"""How the callers of a client wait: as threads, or as tasks of an event loop.

All producers, consumers, readers and buses are written once, as coroutines over these two, which have the same methods. On
threads every awaitable blocks and is then done, so a coroutine ends in its first step (:mod:`escrowmq.client.lanes.blocking`);
on an event loop it suspends.

- ``lane`` makes a coalescing lane whose ``waiter`` a caller awaits;
- ``away`` runs a function that blocks, ``spawn`` one that may block on a full connection and has no result;
- ``gather`` and ``result`` wait for what is under way already;
- ``returned`` is what a user's function returned: on an event loop it may be a coroutine function;
- ``signal`` makes what wakes those who wait for a condition, ``lock`` a lock that is given in the order of the callers.
"""

from __future__ import annotations

from escrowmq.client.lanes.loop import Loop
from escrowmq.client.lanes.threads import Threads

Waiting = Threads | Loop
