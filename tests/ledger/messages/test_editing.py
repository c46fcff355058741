"""Another message for one group in place of a dead letter: which groups get it, when, and what a restart makes of
it."""

import numpy as np
import pyarrow as pa
import pytest

from escrowmq.errors import Code, EscrowError
from escrowmq.ledger.commands import (
    AlterGroup,
    EditDead,
    Join,
    Receive,
    Retain,
    Rules,
    Settle,
    SettleDead,
    Subscribe,
    Subscription,
)
from escrowmq.ledger.groups.order import numbers
from escrowmq.ledger.ledger import Ledger
from escrowmq.message.columns import outgoing_batch
from escrowmq.message.hashes import hash_keys
from escrowmq.model import Act
from escrowmq.schemas import SETTLING
from escrowmq.testing.ledgers import LedgerDriver, tables_equal

LEASE_US = 60_000_000


def one_queue(**subscription) -> LedgerDriver:
    """Six messages in one queue, keys in turns, and a group ``g``."""
    driver = LedgerDriver(Rules(default_queues=1, max_attempts=1, max_body_bytes=100))
    driver.send(*({"key": f"k{n % 2}", "message_id": f"m{n}"} for n in range(6)))
    driver.do(Subscribe("g", Subscription(topics=("orders",), **subscription)))
    return driver


def receive(driver: LedgerDriver, group: str = "g", most: int = 100):
    return driver.do(Receive(group, 1, most, LEASE_US))


def settle(driver: LedgerDriver, act: Act, *rows: tuple[int, int], group: str = "g") -> None:
    rows = [{"lease": a, "start": b, "count": 1, "act": act, "delay_us": 0, "cause": "no"} for a, b in rows]
    driver.do(Settle(group, pa.RecordBatch.from_pylist(rows, schema=SETTLING)))


def killed(driver: LedgerDriver, *offsets: int) -> None:
    """These die, the others are acknowledged."""
    leased = receive(driver)
    pairs = list(zip(leased.leases.tolist(), leased.offsets.tolist(), strict=True))
    settle(driver, Act.NACK, *(pair for pair in pairs if pair[1] in offsets))
    settle(driver, Act.ACK, *(pair for pair in pairs if pair[1] not in offsets))


def edit(driver: LedgerDriver, offset: int, identity: bytes = b"e" * 16, dead_us: int | None = None, **more):
    row = {"key": "k0", "body": b"new", **more}
    batch = outgoing_batch([("orders", row["body"], row["key"], None, None, identity, 0, 7, 0, 0, None)], identity)
    return driver.do(EditDead("g", 0, offset, dead_us, batch))


def refused(act) -> Code:
    with pytest.raises(EscrowError) as caught:
        act()
    return caught.value.code


def positions(driver: LedgerDriver, offsets: list[int]) -> list[int]:
    """Where the topic has these offsets."""
    return driver.ledger.queue(0).positions_at(np.array(offsets)).tolist()


def same_after_a_restart(driver: LedgerDriver) -> None:
    """Live, replayed and restored are equal; the driver goes on with the restored one."""
    tables = driver.ledger.snapshot()
    assert tables_equal(driver.replay().snapshot(), tables)
    driver.ledger = Ledger.restore(driver.ledger.shard, tables)
    assert tables_equal(driver.ledger.snapshot(), tables)


def test_the_group_gets_the_edit_and_every_other_the_message_of_the_topic():
    driver = one_queue()
    killed(driver, 1, 2)
    assert edit(driver, 2) == Code.OK
    place = driver.ledger.next_position - 1
    same_after_a_restart(driver)
    assert driver.ledger.groups.account("g", 0, driver.ledger.topics)["retrying"].tolist() == [2]
    leased = receive(driver)
    assert (leased.offsets.tolist(), leased.positions.tolist(), leased.attempts.tolist()) == ([2], [place], [1])
    driver.do(Subscribe("h", Subscription(topics=("orders",))))
    assert receive(driver, "h").positions.tolist() == positions(driver, list(range(6)))
    settle(driver, Act.NACK, (int(leased.leases[0]), 2))
    (_, again) = driver.ledger.groups.dead_letters("g", driver.ledger.topics)
    assert (again["offset"], again["position"]) == (2, place)
    driver.do(SettleDead("g", np.array([0, 0]), np.array([1, 2]), retry=True))
    same_after_a_restart(driver)
    leased = receive(driver)
    assert (leased.offsets.tolist(), leased.positions.tolist()) == ([1, 2], [positions(driver, [1])[0], place])


def test_an_edit_is_done_once_and_of_the_death_that_was_seen():
    driver = one_queue()
    killed(driver, 0)
    died_us = driver.now_us
    assert refused(lambda: edit(driver, 0, dead_us=died_us - 1)) == Code.CONFLICT
    assert refused(lambda: edit(driver, 1)) == Code.NOT_FOUND
    assert refused(lambda: edit(driver, 0, body=bytes(101))) == Code.BODY_TOO_LARGE
    assert refused(lambda: edit(driver, 0, driver.read(np.array(positions(driver, [3])))["message_id"][0].as_py())) == (
        Code.MESSAGE_ID_TAKEN
    )
    assert edit(driver, 0, dead_us=died_us) == Code.OK
    before = driver.ledger.snapshot()
    assert edit(driver, 0, dead_us=died_us) == Code.ALREADY_EXISTS
    assert tables_equal(before, driver.ledger.snapshot())
    assert refused(lambda: edit(driver, 0, b"f" * 16, dead_us=died_us)) == Code.NOT_FOUND
    settle(driver, Act.ACK, (int(receive(driver).leases[0]), 0))
    assert edit(driver, 0, dead_us=died_us) == Code.ALREADY_EXISTS
    assert refused(lambda: driver.do(EditDead("nobody", 0, 0, None, outgoing_batch([("t", b"", None, None, None,
    b"e" * 16, 0, 0, 0, 0, None)], b"e" * 16)))) == Code.UNKNOWN_GROUP  # fmt: skip


def test_in_order_an_edit_stands_in_the_order_of_its_new_key():
    driver = one_queue(ordered=True)
    driver.ledger.ask_keys_of(lambda at: numbers(hash_keys(driver.read(at).column("key"))))
    killed(driver, 0)
    assert edit(driver, 0, key="k1") == Code.OK
    of_key = dict(zip(("k0", "k1"), numbers(hash_keys(pa.array(["k0", "k1"]))).tolist(), strict=True))
    retries = driver.ledger.groups.group("g").cursors[0].retries
    assert retries["key"].tolist() == [of_key["k1"], of_key["k0"], of_key["k0"]]
    tables = driver.ledger.snapshot()
    assert tables_equal(driver.replay().snapshot(), tables)
    leased = receive(driver)
    settle(driver, Act.ACK, *zip(leased.leases.tolist(), leased.offsets.tolist(), strict=True))
    more = receive(driver)
    assert sorted(leased.offsets.tolist() + more.offsets.tolist()) == [0, 2, 4]


def test_a_named_member_that_comes_back_is_handed_the_edit():
    driver = one_queue(in_doubt="hold")

    def next_one(joined):
        return driver.do(Receive("g", joined["member"], 1, LEASE_US, epoch=joined["epoch"]))

    first = driver.do(Join("g", "one", 1))
    settle(driver, Act.NACK, (int(next_one(first).leases[0]), 0))
    driver.do(AlterGroup(group="g", max_attempts=3))
    assert edit(driver, 0) == Code.OK
    place = driver.ledger.next_position - 1
    assert next_one(first).positions.tolist() == [place]
    same_after_a_restart(driver)
    handed = next_one(driver.do(Join("g", "one", 2)))
    assert (handed.offsets.tolist(), handed.positions.tolist(), handed.attempts.tolist()) == ([0], [place], [2])


@pytest.mark.invariant("I25")
def test_an_edit_leaves_with_the_offset_that_it_stands_for():
    driver = one_queue()
    killed(driver, 0)
    edit(driver, 0)
    assert len(driver.ledger.groups.group("g").cursors[0].edited) == 1
    driver.advance(1000)
    driver.do(Retain(driver.now_us, driver.ledger.next_position))
    assert len(driver.ledger.groups.group("g").cursors[0].edited) == 0
    same_after_a_restart(driver)
    assert receive(driver).offsets.tolist() == []
