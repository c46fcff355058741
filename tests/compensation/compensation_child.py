"""Real processes that die at each failpoint of a compensation: a process for ``test_compensation_deaths``.

Called with a folder. For every place it forks; the fork first brings the story of the fork before it to its end and
judges it, then begins a story of its own, in which it is killed. Prints one JSON line a fork: the place, whether it was
killed there, and the faults of the story before.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from compensation_world import World, business

import escrowmq as mq
from escrowmq.compensation import Journal, SqlSets, open_sets
from escrowmq.platform import failpoints

PLACES = (
    "compensation.halves-added",
    "compensation.effect-committed",
    "compensation.suspended",
    "compensation.marks-read",
    "compensation.keys-read",
    "compensation.recovering",
    "compensation.taken",
    "compensation.handled",
    "compensation.case-written",
    "sets.settled",
    "compensation.settled",
    "compensation.settled-known",
)
QUICK = {"lease": 0.3, "retry_after": 0.02, "limit": 2}


def ids_of(place: str) -> list[bytes]:
    return [hashlib.md5(f"{place} {number}".encode()).digest() for number in range(4)]


def world_of(folder: Path, bus: mq.Bus, place: str) -> World:
    """The compensation of a place; its sets are in a file of their own, which may have been taken away."""

    def sets(name: str) -> Any:
        return open_sets(f"sqlite:///{folder / name}.sets", name)

    made = World(bus, business(folder), sets, name=f"c-{PLACES.index(place)}", **QUICK)
    for identity in ids_of(place):
        found = bus.admin.lookup(message_id=identity, topic=made.topic)
        if found:
            made.sent[identity] = found[0]["transaction"]
    return made


def story(w: World, place: str) -> None:
    """Three confirms are lost and one arrives; all are announced; the messages are handled; the store is emptied; the
    scheduler comes."""
    ids = ids_of(place)
    for number, identity in enumerate(ids):
        w.prepare(identity)
        w.announce(identity)
        if number == 3:
            w.confirm(identity)
    w.schedule(grace=2e9)  # it begins, and takes nothing
    failpoints.arm(failpoints.parse(place))
    w.consume_keys()
    w.consume_messages()
    empty(w)
    w.schedule()


def empty(w: World) -> None:
    """Another file under the same name: all is gone."""
    assert isinstance(w.sets, SqlSets)
    path = Path(str(w.sets.engine.url.database))
    w.sets.close()
    path.unlink()
    w.sets = open_sets(f"sqlite:///{path}", w.name)


def end(w: World, place: str) -> list[str]:
    """Bring a story to its end, and what is wrong then."""
    w.drain()
    standing = Journal(w.database, w.name).read()
    wrong = w.faults(ids_of(place)) + w.open() + [state.name for state in w.cases().values()]
    return wrong + (["suspended"] if standing is None or standing.suspended else [])


def child(folder: Path, before: str | None, place: str | None, answer: int) -> None:
    with mq.connect(f"file:{folder / 'broker'}", retry_backoff=0.02, lease_seconds=0.5) as bus:
        faults = [] if before is None else end(world_of(folder, bus, before), before)
        os.write(answer, json.dumps(faults).encode())
        os.close(answer)
        if place is not None:
            story(world_of(folder, bus, place), place)


def main(folder: Path) -> None:
    before: str | None = None
    for place in (*PLACES, None):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.close(reading)
                child(folder, before, place, writing)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading, "rb") as told:
            faults = told.read()
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        line = {"place": place, "killed": code == -signal.SIGKILL, "code": code, "before": before}
        print(json.dumps({**line, "faults": json.loads(faults or b"null")}), flush=True)
        before = place


if __name__ == "__main__":
    begun = time.process_time()
    main(Path(sys.argv[1]))
