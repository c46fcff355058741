"""Acts on outbox rows, several processes at once, or killed in the middle: a process for ``test_outbox_acts``.

``URL killed ID...``: for each step of an act it forks; the fork discards the next id and dies at that step by SIGKILL.
Prints one JSON line a fork. ``URL beside ID...``: forks twice; each fork acts on every id, one at a time. ``URL each``:
for each kind of act two forks, one of which dies just before the commit, the other just after it; each prints what the
tables held before it and after it.
"""

import json
import os
import signal
import sys
from typing import Any

import sqlalchemy as sa

from escrowmq import compensation
from escrowmq.outbox import attention, handled, metadata, modes
from escrowmq.outbox.modes import Slot
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


SLOT = Slot(42, 0)
ONE = bytes.fromhex("01" * 16)
EACH = {
    "outbox.retry": attention.retry,
    "outbox.discard": attention.discard,
    "outbox.settle": attention.settle,
    "inbox.forget": lambda engine, ids: handled.forget_marks(engine, "cart", ids),
    "inbox.settle": lambda engine, ids: handled.settle_marks(engine, "points", ids),
    "prepared.discard": lambda engine, ids: modes.discard_prepares(engine, "cart", ids),
    "stuck.retry": modes.retry_stuck,
    "stuck.commit": modes.commit_stuck,
    "stuck.rollback": modes.rollback_stuck,
    "stuck.resend": modes.resend_stuck,
    "stuck.settle": modes.settle_stuck,
    "offsets.move": lambda engine, _: modes.move(engine, "cart", "orders", {SLOT: 3}),
    "offsets.fence": lambda engine, _: modes.fence(engine, "cart", "orders", [SLOT]),
    "offsets.divide": lambda engine, _: modes.divide(engine, "cart", "orders", 42, 0, 2),
    "compensation.retry": lambda engine, ids: compensation.retry_cases(engine, "cart", ids),
    "compensation.settle": lambda engine, ids: compensation.settle_cases(engine, "cart", ids),
}
"""Every act on a database, on the rows that the test has put there."""


def each(url: str, _: list[str]) -> None:
    for act, do in EACH.items():
        for place in ("outbox.act-recorded", "outbox.act-committed"):
            engine = sa.create_engine(url)
            before = held(engine)
            child = os.fork()
            if not child:
                failpoints.arm(failpoints.parse(place))
                do(sa.create_engine(url), [ONE])
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), f"{act} did not come to {place}"
            changed = [name for name, rows in held(engine).items() if rows != before[name]]
            print(json.dumps({"act": act, "place": place, "changed": changed}), flush=True)
            with engine.begin() as connection:
                for name, rows in before.items():  # as it was, but for the record
                    if not name.startswith("trans_act"):
                        connection.execute(sa.delete(metadata.tables[name]))
                        if rows:
                            connection.execute(sa.insert(metadata.tables[name]), rows)
            engine.dispose()


def held(engine: sa.Engine) -> dict[str, list[dict[str, Any]]]:
    """All rows of all tables."""
    with engine.connect() as connection:
        return {
            name: [dict(row) for row in connection.execute(sa.select(table)).mappings()]
            for name, table in metadata.tables.items()
        }


if __name__ == "__main__":
    {"killed": killed, "beside": beside, "each": each}[sys.argv[2]](sys.argv[1], sys.argv[3:])
