"""After a recovery: is everything there that the world was told, and nothing that it was not?"""

from __future__ import annotations

from typing import Any

import numpy as np
from shard_world import SETTINGS, Memory, Violation, World

from escrowmq.errors import Code
from escrowmq.ledger import listings
from escrowmq.ledger.commands import Prepare, Send
from escrowmq.model import TransactionId, TransactionState
from escrowmq.schemas import PRODUCED

_FINAL = {Code.COMMITTED: "committed", Code.ROLLED_BACK: "rolled_back", Code.EXPIRED: "expired"}


def demand(holds: bool, promise: str) -> None:
    """Raise Violation unless ``holds``."""
    if not holds:
        raise Violation(promise)


def judge(world: World) -> None:
    """Hold a freshly recovered shard against the world's memory; Violation names the broken invariant."""
    _Judge(world).run()


class _Judge:
    def __init__(self, world: World) -> None:
        self.world, self.memory, self.ledger = world, world.memory, world.ledger
        self.floor = max(self.ledger.trimmed_position, world.log.first_position)
        self.sent = _sent(self.memory)
        self.told = _told(self.memory)
        self.transactions = {t["position"]: t for t in listings.transactions(self.ledger, limit=10_000)}
        self.places = self._places()
        self.visible = self._contents(self.places)

    def run(self) -> None:
        self._acknowledged_messages()
        self._decisions()
        self._visibility()
        self._check_counts()
        self._progress()

    def _places(self) -> dict[int, tuple[int, int]]:
        """Visible positions -> (queue id, offset)."""
        places: dict[int, tuple[int, int]] = {}
        for queue_id, queue in enumerate(self.ledger.topics.queues):
            positions = queue.positions(queue.head, queue.end).tolist()
            demand(len(positions) == queue.end - queue.head, f"I16: queue {queue_id} has gaps")
            for offset, position in enumerate(positions, queue.head):
                demand(position not in places, f"I8: position {position} stands twice")
                places[position] = (queue_id, offset)
                if self.memory.offsets.get((queue_id, offset), position) != position:
                    was = self.memory.offsets[queue_id, offset]
                    raise Violation(f"I17: offset {offset} of queue {queue_id} was {was} and is {position}")
        return places

    def _contents(self, positions: Any) -> dict[bytes, int]:
        """Message ids of stored rows -> position; each must be what was sent, byte for byte (I2)."""
        at = np.array(sorted(positions), np.int64)
        found: dict[bytes, int] = {}
        if not len(at):
            return found
        for position, row in zip(at.tolist(), self.world.log.read(at).to_pylist(), strict=True):
            identity = row["message_id"]
            demand(identity in self.sent, f"I2: nobody sent the message at {position}")
            demand(identity not in found, f"I9: message {identity.hex()} stands twice")
            for name in ("topic", "key", "tag", "properties", "body"):
                demand(row[name] == self.sent[identity][name], f"I2: {name} of the message at {position} is another")
            found[identity] = position
        return found

    def _acknowledged_messages(self) -> None:
        for row in self.told.values():
            demand(row["position"] < self.ledger.next_position, f"I1: there is no position {row['position']} any more")
        half = {identity: row for identity, row in self.told.items() if identity in self.memory.owners}
        stored = self._contents([row["position"] for row in half.values() if row["position"] >= self.floor])
        for identity, row in self.told.items():
            if row["position"] < self.floor:
                continue
            if identity in half:
                demand(identity in stored, f"I1: the half message told to be at {row['position']} is not")
                position = TransactionId.from_bytes(row["transaction"]).position
                demand(
                    position in self.transactions or position < self.floor, f"I1: the transaction at {position} is lost"
                )
            elif row["offset"] >= self._head(identity, row):
                demand(self.visible.get(identity) == row["position"], f"I1: the message at {row['position']} is lost")
                demand(self.places[row["position"]][1] == row["offset"], "I17: a message's offset changed")

    def _head(self, identity: bytes, row: dict[str, Any]) -> int:
        """The first offset that retention has left of a message's queue."""
        queue_id = self.ledger.queue_id(self.sent[identity]["topic"], row["queue"])
        head = self.ledger.queue(queue_id).head
        demand(
            head == 0 or self.ledger.trimmed_position > 0, f"I1: queue {queue_id} begins at {head} without retention"
        )
        return max(head, 0)

    def _state_of(self, name: str) -> str | None:
        """The state of a named transaction as it is stored now; None if it is not there."""
        for identity, owner in self.memory.owners.items():
            if owner == name and identity in self.told:
                position = TransactionId.from_bytes(self.told[identity]["transaction"]).position
                return self.transactions[position]["state"] if position in self.transactions else None
        return None

    def _decisions(self) -> None:
        for name, code in self.memory.decided.items():
            state = self._state_of(name)
            demand(state in (None, _FINAL[code]), f"I5: {name} was {code.name} and is {state}")
            if state is None:
                demand(self.ledger.trimmed_position > 0, f"I1: the decision of {name} is lost")

    def _visibility(self) -> None:
        """I3 and I4, by what is visible of each transaction."""
        tried = {c for name in self.memory.tried for c in name.split(" ")[0].split(",") if "commit" in name}
        by_owner: dict[str, set[bytes]] = {}
        for identity, owner in self.memory.owners.items():
            by_owner.setdefault(owner, set()).add(identity)
        for owner, identities in by_owner.items():
            shown = {i for i in identities if i in self.visible}
            if not shown:
                late = any(self.sent[i]["delay_us"] for i in identities)
                gone = all(i in self.told and self.told[i]["position"] < self.floor for i in identities)
                if self.memory.decided.get(owner) == Code.COMMITTED and not (late or gone):
                    raise Violation(f"I1: {owner} was committed and nothing of it is visible")
                continue
            demand(owner in tried, f"I3: {owner} is visible and nobody committed it")
            demand(self.memory.decided.get(owner, Code.COMMITTED) == Code.COMMITTED, f"I3: {owner} is visible")
            now = {i for i in identities if i in self.told and not self.sent[i]["delay_us"]}
            wanted = {i for i in now if self.told[i]["position"] >= self.floor}
            demand(wanted <= shown, f"I4: {owner} is visible in part: {len(shown)} of {len(wanted)}")

    def _check_counts(self) -> None:
        attempts: dict[tuple[int, int], int] = {}
        for position, era, attempt in self.memory.asked:
            attempts[position, era] = max(attempt, attempts.get((position, era), 0))
        for position, found in self.transactions.items():
            demand(found["checks"] <= SETTINGS.check_max, f"I11: {found['checks']} checks of {position}")
            era = self.memory.eras.get(position, 0)
            counted = attempts.get((position, era), 0)
            demand(
                found["checks"] >= counted, f"I11: {position} was asked {counted} times, {found['checks']} are stored"
            )
            if position in self.memory.parked and not era:
                demand(found["state"] != TransactionState.OPEN.name.lower(), f"I12: {position} is no longer parked")

    def _progress(self) -> None:
        for group in self.ledger.groups.groups.values():
            for name, queue_id, offset in self.memory.acked:
                if name == group.name:
                    cursor = group.cursors[queue_id]
                    demand(
                        cursor.next > offset, f"I22: {name} acknowledged {offset} of {queue_id}, next is {cursor.next}"
                    )


def _sent(memory: Memory) -> dict[bytes, dict[str, Any]]:
    """Every message that anybody tried to send, by id."""
    batches = [c.batch for c in memory.tried.values() if isinstance(c, Send | Prepare)]
    return {row["message_id"]: row for batch in batches for row in batch.to_pylist()}


def _told(memory: Memory) -> dict[bytes, dict[str, Any]]:
    """Every message that was taken, by id: the row of its answer."""
    told: dict[bytes, dict[str, Any]] = {}
    for name, command in memory.tried.items():
        answer = memory.answers.get(name)
        if isinstance(command, Send | Prepare) and answer is not None:
            assert answer.schema.equals(PRODUCED)
            ids = command.batch.column("message_id").to_pylist()
            told |= {i: row for i, row in zip(ids, answer.to_pylist(), strict=True) if row["code"] == Code.OK}
    return told
