"""The short life of a shard: every kind of event, several segments, snapshots, retention. See ``World`` for how it
resumes.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from shard_world import Violation, World

from escrowmq.errors import Code
from escrowmq.ledger.commands import CommitBatch, CreateTopic, End, OpenSession, Recheck, Subscribe, Subscription
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN, Act, DecidedBy, TransactionId, message_id
from escrowmq.schemas import ENDING, ID

Effects = dict[str, object]


def opening(w: World) -> tuple[int, int]:
    """Topics, sessions, groups."""
    w.call("topic orders", CreateTopic("orders", 2, may_exist=True))
    shop = w.call("session shop", OpenSession("shop", "a", True))
    plain = w.call("session plain", OpenSession("plain", "p", False))
    w.listen("shop", shop)
    w.call("subscribe cart", Subscribe("cart", Subscription(topics=("orders",))))
    w.call("subscribe points", Subscribe("points", Subscription(topics=("points",), max_attempts=2)))
    return shop, plain


def shortest(w: World) -> Effects:
    """Two transactions, one plain message, one acknowledgement."""
    shop, plain = opening(w)
    t1 = w.prepare("t1", shop, {"topic": "orders"})
    w.send("plain", {"topic": "orders"}, session=plain)
    w.end("t1 commit", shop, COMMIT, t1)
    t2 = w.prepare("t2", shop, {"topic": "orders"}, {"topic": "orders"})
    w.settle("ack", "cart", w.receive("receive", "cart"), Act.ACK)
    w.until("t2 asked", lambda: w.times_asked(t2) > 0 or w.state(t2) == "parked")
    w.end("t2 rollback", shop, ROLLBACK, t2, by=DecidedBy.CHECK)
    return drain(w)


def forgetting(w: World) -> Effects:
    """A writer that falls silent and is forgotten with its group, while others go on; then it comes back."""
    shop, plain = opening(w)
    query = w.call("session query", OpenSession("spark.q", "driver", True))
    t1 = w.prepare("t1", query, {"topic": "orders"}, {"topic": "points"})
    w.call("t1 commit batch", CommitBatch(message_id("q"), 3, pa.array([t1], ID), query))
    again = w.call("t1 commit again", CommitBatch(message_id("q"), 3, pa.array([t1], ID), query))
    if again["status"] != Code.ALREADY_COMMITTED.name:
        raise Violation("I42: a batch counted twice")
    before = w.recall("effects", lambda: drain(w))
    w.pass_time("half of it", 80)
    w.send("plain", {"topic": "orders"}, session=plain)
    w.pass_time("the rest", 75)
    gone = lambda: w.ledger.writers.last(message_id("q")) is w.ledger.sessions.ordinal("spark.q") is None  # noqa: E731
    w.until("forgotten", gone, 200)
    late = End(
        pa.RecordBatch.from_pydict({"transaction": [t1], "outcome": [ROLLBACK]}, schema=ENDING), np.array([shop])
    )
    answer = w.call("t1 late", late).column("code")[0].as_py()
    if answer not in (Code.CONFLICT, Code.UNKNOWN_TRANSACTION):  # it may have left with retention
        raise Violation(f"I5: a forgotten writer's commit was met by a rollback, and the answer is {answer}")
    back = w.call("session back", OpenSession("spark.q", "driver", True, resume=query))
    t2 = w.prepare("t2", back, {"topic": "orders"})
    w.call("t2 commit batch", CommitBatch(message_id("q"), 0, pa.array([t2], ID), back))
    t3 = w.prepare("t3", shop, {"topic": "points"})
    w.end("t3 commit", shop, COMMIT, t3)
    return {"before retention": before, "after": drain(w)}


def whole(w: World) -> Effects:
    """Everything once."""
    shop, plain = opening(w)
    named = {f"t{n}": [{"topic": "orders", "key": f"order-{n}"}] for n in range(1, 7)}
    t1, t2, t3, t4, t5, t6 = w.prepare_all(shop, named)
    w.prepare("t1 points", shop, {"topic": "points"}, {"topic": "points", "tag": "double"}, join=t1)
    t7 = w.prepare(
        "t7", shop, {"topic": "orders", "delay_us": 30_000_000}, {"topic": "points", "immunity_us": 9_000_000}
    )
    w.send("hello", {"topic": "orders", "tag": "a"}, {"topic": "orders", "key": None}, session=plain)
    w.end("t1,t7 commit", shop, COMMIT, t1, t7)
    w.end("t2 rollback", shop, ROLLBACK, t2)
    first = w.receive("receive 1", "cart")
    w.settle("ack 1", "cart", first, Act.ACK, slice(0, 2))
    w.settle("nack 1", "cart", first, Act.NACK, slice(2, None))
    w.snapshot("snapshot 1")
    w.send("later", {"topic": "points", "delay_us": 2_000_000}, session=plain)
    w.until("asked", lambda: all(w.times_asked(t) or w.state(t) == "parked" for t in (t3, t4, t5)))
    w.end("t3 commit", shop, COMMIT, t3, by=DecidedBy.CHECK)
    w.end("t4 unknown", shop, UNKNOWN, t4, by=DecidedBy.CHECK)
    if w.end("t2 again commit", shop, COMMIT, t2) != [Code.CONFLICT]:
        raise Violation("I5: the opposite decision was taken")
    bury(w, "points", message_id("t1 points/1"))
    w.send("bulk", *({"topic": "orders", "body": bytes(500)} for _ in range(8)), session=plain)
    w.until("parked", lambda: w.state(t4) == "parked" and w.state(t5) == "parked")
    w.snapshot("snapshot 2")
    w.end("t5 rollback", 0, ROLLBACK, t5, by=DecidedBy.OPERATOR)
    w.memory.eras[TransactionId.from_bytes(t4).position] = 1
    w.call("recheck t4", Recheck(pa.array([t4], ID)))
    w.until("t4 asked", lambda: w.times_asked(t4) > 0 or w.state(t4) == "parked")
    w.end("t4 commit", shop, COMMIT, t4, by=DecidedBy.CHECK)
    before = w.recall("effects", lambda: drain(w))
    w.pass_time("a minute", 61)
    w.send("roll", *({"topic": "orders", "body": bytes(700)} for _ in range(10)), session=plain)
    w.pass_time("retention", 70)
    w.until("dropped", lambda: w.ledger.trimmed_position > 0 and w.log.first_position > 0, 200)
    w.end("t6 late", shop, UNKNOWN, t6)
    t8 = w.prepare("t8", shop, {"topic": "orders"}, {"topic": "points"})
    w.end("t8 commit", shop, COMMIT, t8)
    return {"before retention": before, "after": drain(w)}


def bury(w: World, group: str, poison: bytes) -> None:
    """Refuse one message until it is a dead letter; acknowledge what comes meanwhile."""

    def is_dead() -> bool:
        leased = w.receive(None, group, 1)
        for row, position in enumerate(leased.positions.tolist()):
            act = Act.NACK if w.memory.ids[position] == poison else Act.ACK
            w.settle(None, group, leased, act, slice(row, row + 1))
        dead = w.ledger.groups.dead_letters(group, w.ledger.topics, 100)
        return poison in {w.memory.ids[letter["position"]] for letter in dead}

    w.until("buried", is_dead)


def drain(w: World) -> Effects:
    """Consume until nothing comes any more; what everybody has by then, by message id."""
    quiet = 0
    while quiet < 3:
        quiet += 1
        w.tick(6)
        for group in ("cart", "points"):
            leased = w.receive(None, group)
            if len(leased.leases):
                w.settle(None, group, leased, Act.ACK)
                quiet = 0
    return effects(w)


def effects(w: World) -> Effects:
    """What each group got, how much of it is dead, decisions."""
    got = {
        group: sorted({w.memory.ids[position].hex() for g, _, _, position in w.memory.delivered if g == group})
        for group in ("cart", "points")
    }
    dead = {group: _dead(w, group) for group in ("cart", "points")}
    return {"got": got, "dead": dead, "decided": {n: c.name for n, c in sorted(w.memory.decided.items())}}


def _dead(w: World, group: str) -> list[str]:
    letters = w.ledger.groups.dead_letters(group, w.ledger.topics, 100)
    at = np.array([letter["position"] for letter in letters], np.int64)
    return sorted(i.hex() for i in w.log.read(at).column("message_id").to_pylist()) if letters else []
