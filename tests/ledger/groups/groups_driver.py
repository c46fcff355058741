"""A tiny directory of topics, and a driver that decides, checks that deciding changed nothing, and applies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.commands import (
    AlterGroup,
    DeleteGroup,
    Fence,
    Join,
    Leased,
    LimitGroup,
    PauseGroup,
    Receive,
    ResetGroup,
    Rules,
    Settle,
    SettleDead,
    Subscribe,
    Subscription,
)
from escrowmq.ledger.events import Decision, Event
from escrowmq.ledger.groups import operating
from escrowmq.ledger.groups.consuming import Consuming
from escrowmq.ledger.groups.groups import Groups
from escrowmq.ledger.groups.order import UNKNOWN
from escrowmq.ledger.queues.queues import Place, QueueIndex
from escrowmq.model import Act, Limits
from escrowmq.schemas import SETTLING, STORED


class FakeTopics:
    """Topics by name; queue ids count over all of them."""

    def __init__(self, **queues: int) -> None:
        self.queues: list[QueueIndex] = []
        self.ids: dict[str, list[int]] = {}
        self.tags: dict[str, int] = {}
        for name, count in queues.items():
            for _ in range(count):
                self.add_queue(name)

    def add_queue(self, name: str) -> int:
        ids = self.ids.setdefault(name, [])
        self.queues.append(QueueIndex(Place(name, len(ids))))
        ids.append(len(self.queues) - 1)
        return ids[-1]

    def has(self, name: str) -> bool:
        return name in self.ids

    def queue_ids(self, name: str) -> list[int]:
        return self.ids[name]

    def queue_id(self, name: str, queue: int) -> int:
        if not 0 <= queue < len(self.ids[name]):
            raise error(Code.BAD_QUEUE)
        return self.ids[name][queue]

    def tag_number(self, tag: str) -> int | None:
        return self.tags.get(tag)


class Driver:
    """One shard's groups with a log of the events, a clock and a position."""

    def __init__(self, topics: FakeTopics, **rules: Any) -> None:
        self.topics = topics
        self.rules = Rules(**rules)
        self.keys: dict[int, int] = {}  # by log position; what is not here is not known
        self.use(Groups())
        self.position = 1000
        self.now = 1_000_000
        self.log: list[tuple[Event, int, int]] = []

    def use(self, groups: Groups) -> None:
        self.groups, self.consuming = groups, Consuming(groups, self.topics, self.keys_of)

    def keys_of(self, positions: Any) -> Any:
        return np.array([self.keys.get(position, UNKNOWN) for position in positions.tolist()], np.int64)

    def put_keys(self, queue_id: int, keys: str) -> None:
        """Messages at the end of a queue, one a letter, which is its key; "?" for a key that nobody can read."""
        self.keys |= {self.position + n: ord(key) for n, key in enumerate(keys) if key != "?"}
        self.put(queue_id, *[None] * len(keys))

    def put(self, queue_id: int, *tags: str | None) -> None:
        """Messages at the end of a queue, one a tag."""
        numbers = [0 if tag is None else self.topics.tags.setdefault(tag, len(self.topics.tags) + 1) for tag in tags]
        positions = np.arange(self.position, self.position + len(tags))
        self.topics.queues[queue_id].append(positions, np.array(numbers, np.int32), self.now, 0)
        self.position += len(tags)

    def trim(self, queue_id: int, head: int) -> None:
        self.topics.queues[queue_id].trim(head)
        self.groups.apply_trim(self.topics, 0)

    def do(self, decide: Any) -> Any:
        """Decide (a snapshot before and after must agree), apply, answer."""
        before = self.groups.freeze()()
        decision = decide()
        assert self.groups.freeze()() == before, "decide changed the state"
        events = decision.events if isinstance(decision, Decision) else decision
        for event in events:
            assert event.batch.schema == STORED[event.kind]
            assert event.batch.num_rows
            event.batch.validate(full=True)
            self.log.append((event, self.position, self.now))
            self.groups.apply(event.kind, event.batch, self.now, self.topics, self.rules)
            self.position += event.batch.num_rows
        self.events = list(events)
        return decision.answer if isinstance(decision, Decision) else None

    def subscribe(self, group: str, *topics: str, **options: Any) -> Any:
        command = Subscribe(group, Subscription(topics=topics or ("t",), **options))
        return self.do(lambda: self.consuming.decide_subscribe(command, self.topics, self.rules))

    def alter(self, group: str = "g", **changes: Any) -> Any:
        command = AlterGroup(group=group, **changes)
        return self.do(lambda: self.consuming.decide_alter(command, self.topics))

    def reset(self, group: str = "g", **where: Any) -> Any:
        command = ResetGroup(group=group, **where)
        return self.do(lambda: operating.decide_reset(self.groups, command, self.topics))

    def pause(self, *topics: str, group: str = "g", paused: bool = True) -> Any:
        return self.do(lambda: operating.decide_pause(self.groups, PauseGroup(group, topics, paused)))

    def resume(self, *topics: str, group: str = "g") -> Any:
        return self.pause(*topics, group=group, paused=False)

    def limit(self, group: str = "g", **limits: Any) -> Any:
        return self.do(lambda: operating.decide_limit(self.groups, LimitGroup(group, Limits(**limits))))

    def delete(self, group: str = "g", *, force: bool = False) -> Any:
        return self.do(lambda: operating.decide_delete(self.groups, DeleteGroup(group, force=force), self.position))

    def join(self, name: str, process: int = 1, *, resume: bool = False, keep: Any = (), group: str = "g") -> Any:
        command = Join(group, name, process, resume, keep)
        return self.do(lambda: self.consuming.decide_join(command, self.rules, self.position))

    def fence(self, name: str, group: str = "g") -> Any:
        command = Fence(group, name)
        return self.do(lambda: self.consuming.decide_fence(command, self.rules, self.now, self.position))

    def receive(
        self,
        group: str = "g",
        most: int = 100,
        lease: int = 1_000,
        queues: list[int] | None = None,
        member: int = 7,
        epoch: int | None = None,
        one_by_one: bool = False,
    ) -> Leased:
        command = Receive(group, member, most, lease, queues, epoch, one_by_one)
        return self.do(lambda: self.consuming.decide_receive(command, self.rules, self.now, self.position))

    def settle(self, *rows: tuple[int, int, int, Act, int, str | None], group: str = "g") -> list[int]:
        columns = list(zip(*rows, strict=True))
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SETTLING, strict=True)]
        command = Settle(group, pa.RecordBatch.from_arrays(arrays, schema=SETTLING))
        answer = self.do(lambda: self.consuming.decide_settle(command, self.rules, self.now))
        return answer.column("code").to_pylist()

    def ack(self, lease: int, start: int, count: int = 1) -> int:
        return self.settle((lease, start, count, Act.ACK, -1, None))[0]

    def nack(self, lease: int, start: int, count: int = 1, delay: int = -1, cause: str | None = None) -> int:
        return self.settle((lease, start, count, Act.NACK, delay, cause))[0]

    def extend(self, lease: int, start: int, delay: int) -> int:
        return self.settle((lease, start, 1, Act.EXTEND, delay, None))[0]

    def settle_dead(
        self, *places: tuple[int, int], retry: bool, group: str = "g", dead_us: list[int] | None = None
    ) -> list[int]:
        ids, offsets = np.array([p[0] for p in places]), np.array([p[1] for p in places])
        command = SettleDead(group, ids, offsets, retry, None if dead_us is None else np.array(dead_us))
        return self.do(lambda: self.consuming.decide_settle_dead(command)).tolist()

    def tick(self, limit: int = 1000) -> None:
        self.do(lambda: self.consuming.decide_tick(self.rules, self.now, limit))

    def reopen(self) -> None:
        """Go on with groups restored from a snapshot, which must be equal."""
        tables = self.groups.freeze()()
        self.use(Groups())
        self.groups.restore(tables)
        assert self.groups.freeze()() == tables

    def account(self, queue_id: int = 0, group: str = "g") -> dict[str, list[int]]:
        """The states that have offsets."""
        found = self.groups.account(group, queue_id, self.topics)
        union = np.sort(np.concatenate(list(found.values())))
        assert union.tolist() == list(range(self.topics.queues[queue_id].end)), "I26: each offset in one state"
        return {state: offsets.tolist() for state, offsets in found.items() if len(offsets)}

    def line(self, queue_id: int = 0, group: str = "g") -> dict[str, Any]:
        """The described queue."""
        described = next(d for d in self.groups.describe(self.topics, self.rules) if d["name"] == group)
        return next(q for q in described["queues"] if q["queue_id"] == queue_id)


def pairs(leased: Leased) -> list[tuple[int, int, int]]:
    """Queue id, offset and attempt of what was leased."""
    return list(zip(leased.queue_ids.tolist(), leased.offsets.tolist(), leased.attempts.tolist(), strict=True))
