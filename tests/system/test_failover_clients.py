"""``escrow://a|b``: a broker is killed and its shard goes on at another address, over and over, under load. By id nothing is lost and
nothing doubled, and no application sees more of it than of a restart."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from load import QUICK, Broker, Reader, Writer, audit
from test_kill_loop import SEGMENTS, demand, disturb, finish

import escrowmq as mq
from escrowmq.testing.checker import check
from escrowmq.testing.history import History
from escrowmq.testing.servers.process import free_port
from not_leading import Standby


class Moving(Broker):
    """A broker that is started again at the other of two ports, while a standby listens at the one that it has left.

    ``tells``: what the standby names as the leader, of the new and the old address.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.ports = [free_port(), free_port()]
        self.addresses = [f"127.0.0.1:{port}" for port in self.ports]
        self.list = "escrow://" + "|".join(self.addresses)
        self._at = 0
        self._listen = self.addresses[0]
        self.standby: Standby | None = None
        self.shard = 0
        self._chance = random.Random(1)

    def launch(self) -> None:
        super().launch()
        if self.shard and self._chance.random() < 0.7:  # else nobody listens there
            here, there = f"escrow://{self._listen}", f"escrow://{self.addresses[1 - self._at]}"
            dead = f"escrow://127.0.0.1:{free_port()}"
            named = self._chance.choice([here, here, there, dead, None])
            self.standby = Standby(self.shard, named, (here, there), port=self.ports[1 - self._at])

    def start(self) -> Moving:
        super().start()
        if not self.shard:
            with mq.connect(self.url) as bus:
                self.shard = bus.admin.hello()[0]["shard"]
        return self

    def kill(self) -> None:
        super().kill()
        if self.standby is not None:
            self.standby.shutdown()
            self.standby = None
        self._at = 1 - self._at
        self._listen = self.addresses[self._at]

    def stop(self) -> int:
        if self.standby is not None:
            self.standby.shutdown()
            self.standby = None
        return super().stop()


@pytest.mark.parametrize(
    "kills",
    [pytest.param(3, id="short"), pytest.param(60, marks=[pytest.mark.long, pytest.mark.timeout(0)], id="long")],
)
def test_transactions_sends_and_consumers_follow_a_shard_from_address_to_address(tmp_path: Path, kills: int) -> None:
    chance = random.Random(kills)
    history = History(tmp_path / "history.jsonl")
    with Moving(tmp_path / "data", **QUICK, **SEGMENTS) as broker, mq.connect(broker.list) as bus:
        readers = [Reader(bus, f"cart-{n}", "cart", "orders", history) for n in range(2)]
        readers += [Reader(bus, "points-1", "points", "points", history)]
        writers = [Writer(bus, f"w{n}", history) for n in range(4)]
        for thread in (*readers, *writers):
            thread.start()
        for number in range(kills):
            disturb(broker, history, chance, number)
        finish(bus, writers, readers)
        audit(broker.list, history)
        assert broker.stop() == 0
    history.close()
    demand(check(history.events, check_max=QUICK["check_max"]), kills)
