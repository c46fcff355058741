"""Acts on outbox rows, several processes at once, or killed in the middle: a process for ``test_outbox_acts``.

``URL killed ID...``: for each step of an act it forks; the fork discards the next id and dies at that step by SIGKILL. Prints one JSON line a
fork. ``URL beside ID...``: forks twice; each fork acts on every id, one at a time.
"""

import json
import os
import signal
import sys

import sqlalchemy as sa

from escrowmq.outbox import attention
from escrowmq.platform import failpoints

PLACES = {
    "outbox.act-locked": False,
    "outbox.act-done": False,
    "outbox.act-recorded": False,
    "outbox.act-committed": True,
}
"""Where to die, and whether the act is done and recorded then."""


def killed(url: str, ids: list[str]) -> None:
    for (place, done), identity in zip(PLACES.items(), ids, strict=True):
        child = os.fork()
        if not child:
            failpoints.arm(failpoints.parse(place))
            attention.discard(sa.create_engine(url), [identity], why="killed")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print(json.dumps({"id": identity, "killed": died, "done": done}), flush=True)


def beside(url: str, ids: list[str]) -> None:
    children = []
    for number in range(2):
        child = os.fork()
        if not child:
            engine = sa.create_engine(url, **({"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}))
            for identity in ids:
                attention.discard(engine, [identity], by=f"operator {number}")
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    print(json.dumps(statuses))


if __name__ == "__main__":
    {"killed": killed, "beside": beside}[sys.argv[2]](sys.argv[1], sys.argv[3:])
