"""A consumer that records every delivery and acknowledgement in a history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from escrowmq.client.consuming.received import ReceivedBatch
from escrowmq.errors import EscrowError, Unknown
from escrowmq_lab.history import Act, Kind, unpack
from escrowmq_lab.workloads.seam import Site

Effect = Callable[[dict[str, Any], dict[str, Any]], None]
"""Effect of a message: called with its content, and its columns."""


class Reader:
    """One consumer of ``group``. It acknowledges most messages, and while the site has not ended returns some
    (``careless``), ignores some, and keeps some until their lease has expired. ``options`` are those of the
    consumer."""

    def __init__(
        self,
        site: Site,
        group: str,
        topics: list[str],
        *,
        ordered: bool = False,
        careless: float = 0.1,
        one_by_one: bool = False,
        lease: float | None = None,
        effect: Effect = lambda content, row: None,
        **options: Any,
    ) -> None:
        self.site, self.history, self.group = site, site.history, group
        self._careless, self._one_by_one, self._effect, self._ordered = careless, one_by_one, effect, ordered
        self._lease = lease or 3.0
        self.consumer = site.connect().consumer(
            group,
            topics,
            ordered=ordered,
            lease=lease,
            retry_backoff=0.1,
            retry_backoff_max=1.0,
            timeout=120.0,
            **options,
        )
        site.kept["receives"] = True  # from now on the group exists

    def work(self) -> None:
        """Receive until the process is ended."""
        if self._one_by_one:
            for message in self.consumer.messages():
                self._handle_one(message)
            return
        for batch in self.consumer.batches(max_messages=50):
            self._handle_batch(batch)

    def _record_delivery(self, row: dict[str, Any]) -> tuple[str, int, int | None]:
        content, intact = unpack(row["body"])
        if "labels" in content:
            intact = intact and content["labels"] == [row["key"], row["tag"]]
        value = str(content.get("value"))
        place = {name: row[name] for name in ("topic", "queue", "offset", "attempt", "key")}
        self.history.add(
            self.site.name, Act.RECEIVE, Kind.OK, value=value, group=self.group, intact=intact,
            message_id=row["message_id"].hex(), lease=row.get("lease"), **place,
        )  # fmt: skip
        self._effect(content, row)
        return value, row["attempt"], row.get("lease")

    def _choose_fate(self) -> str:
        chance = self.site.chance.random()
        if self.site.ended or chance >= self._careless:
            return "ack"
        return self.site.chance.choice(("nack", "forget", "late"))

    def _handle_batch(self, batch: ReceivedBatch) -> None:
        noted = [self._record_delivery(row) for row in batch.arrow.to_pylist()]
        fate = self._choose_fate()
        if fate == "forget":
            return
        if fate == "late":
            self.site.pause(1.3 * self._lease)
        result = Kind.OK
        if fate != "nack":
            self._record_acks(noted, Kind.INVOKE)
        try:
            (batch.nack if fate == "nack" else batch.ack)()
        except EscrowError as problem:
            result = Kind.UNKNOWN if isinstance(problem, Unknown) else Kind.FAIL
        if fate != "nack":
            self._record_acks(noted, result)

    def _record_acks(self, noted: list[tuple[str, int, int | None]], kind: Kind) -> None:
        for value, attempt, lease in noted:
            self.history.add(self.site.name, Act.ACK, kind, value=value, group=self.group, attempt=attempt, lease=lease)

    def _handle_one(self, message: Any) -> None:
        if message.withdrawn:
            return
        self._record_delivery({name: getattr(message, name) for name in _COLUMNS})
        fate = self._choose_fate()
        if fate == "late":
            self.site.pause(1.3 * self._lease)
        if fate == "nack":
            message.nack(0.1, "because")
        elif fate != "forget":
            message.ack()


_COLUMNS = ("body", "topic", "queue", "offset", "attempt", "key", "tag", "message_id")
