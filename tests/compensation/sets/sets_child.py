"""A process that is killed at a place inside a set store's calls: for each place of the command line one fork, in which
it happens.

``python sets_child.py URL NAME PLACE...``: for each place, which is ``WORK:FAILPOINT``, a child does the work and dies
there. Prints how each ended.
"""

from __future__ import annotations

import os
import signal
import sys

from escrowmq.compensation import open_sets
from escrowmq.platform.failpoints import arm, parse

FAR_US, LEASE = 1 << 52, 600.0


def work(kind: str, url: str, name: str) -> None:
    """Each on a store of its own name, which the test has filled with 10 ids, the first 3 of them done."""
    store = open_sets(url, name)
    if kind == "take":
        store.take(FAR_US, 4, LEASE)
    elif kind == "take-all":
        for _ in range(3):
            store.take(FAR_US, 3, LEASE)
    elif kind == "settle":
        run = store.take(FAR_US, 100, LEASE)
        assert run is not None
        store.settle(run.name, run.ids[:5])
    elif kind == "settle-all":
        run = store.take(FAR_US, 100, LEASE)
        assert run is not None
        store.settle(run.name, run.ids)
    elif kind == "announce":
        store.add_halves([bytes([200 + n]) * 16 for n in range(5)], [50] * 5)
    elif kind == "enter":
        store.add_commits([bytes([n]) * 16 for n in range(3, 6)], 1)
    store.close()


if __name__ == "__main__":
    url, name, *places = sys.argv[1:]
    warm = open_sets(url, f"{name}-warm")  # what is imported now is not imported once for each child
    warm.epoch()
    warm.close()
    for number, place in enumerate(places):
        kind, _, failpoint = place.partition(":")
        pid = os.fork()
        if not pid:
            try:
                if failpoint:
                    arm(parse(failpoint))
                work(kind, url, f"{name}-{number}")
                os._exit(0)
            except BaseException as failure:
                print(repr(failure), file=sys.stderr)
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print(place, "killed" if killed else f"ended {status}")
