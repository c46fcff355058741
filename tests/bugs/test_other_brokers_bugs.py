"""Bugs of other brokers and protocols (NATS, Kafka, brokers side by side), each as a test that they would fail here."""

from __future__ import annotations

import pytest
from bug_shard import SEED, BugShard

from escrowmq.errors import Code, Corrupt, EscrowError
from escrowmq.log.commit_log import open_log
from escrowmq.model import COMMIT, ROLLBACK, DecidedBy
from escrowmq.testing.disks import MODES, FaultDisk, SimulatedCrash
from escrowmq.testing.ledgers import LedgerDriver


def test_prepare_on_a_retry_on_b_commit_both_delivered_twice():
    """An id names its broker: a commit reaches one of the two, the other half is asked about and goes."""
    a, b = LedgerDriver(shard=0xA), LedgerDriver(shard=0xB)
    session_a, session_b = a.session(), b.session()
    [on_a] = a.prepare(session_a, {"message_id": "order-17"})
    [on_b] = b.prepare(session_b, {"message_id": "order-17"})
    assert on_a["transaction"] != on_b["transaction"]
    assert a.end(session_a, (on_b["transaction"], COMMIT)) == [Code.WRONG_SHARD]
    assert b.end(session_b, (on_a["transaction"], COMMIT)) == [Code.WRONG_SHARD]
    assert a.end(session_a, (on_a["transaction"], COMMIT)) == [Code.COMMITTED]
    b.advance(6)
    assert b.ask().transactions.tolist() == [on_b["position"]]
    assert b.end(session_b, (on_b["transaction"], ROLLBACK), by=DecidedBy.CHECK) == [Code.ROLLED_BACK]
    assert (len(a.visible()), len(b.visible())) == (1, 0)


def test_acknowledged_before_the_sync():
    """A sync that fails: nothing of its round was answered with a success, and what was before is there."""
    shard = BugShard()
    [kept] = shard.send({"body": b"kept"})
    shard.disk.fail_next_sync = True
    with pytest.raises(EscrowError) as refused:
        shard.send({"body": b"unsure"})
    assert refused.value.code in (Code.SHARD_STOPPED, Code.LOG_FAILED)
    with pytest.raises(EscrowError):
        shard.send({"body": b"after"})
    again = shard.after_a_crash()
    again.subscribe()
    bodies = again.consume()
    assert bodies[0] == b"kept"
    assert b"after" not in bodies
    assert kept["offset"] == 0


@pytest.mark.invariant("I1")
@pytest.mark.parametrize("mode", MODES)
def test_acknowledged_before_the_sync_and_then_the_power_failed(mode):
    """The power fails at each operation in turn: whatever had its answer is there afterwards."""
    for operation in range(1, 60):
        shard = BugShard(FaultDisk(operation))
        answered: list[bytes] = []
        shard.disk.crash_at = shard.disk.operations + operation
        try:
            for number in range(8):
                body = b"%d" % number
                assert shard.send({"body": body, "queue": 0})[0]["code"] == Code.OK
                answered.append(body)
        except (SimulatedCrash, EscrowError):
            pass
        again = shard.after_a_crash(shard.disk.survivors(mode, operation))
        if answered:
            again.subscribe()
            assert again.consume()[: len(answered)] == answered
        if len(answered) == 8:
            return
    raise AssertionError("the run never came to its end")


SEGMENT = 1 << 14
MESSAGES = 40


def written() -> FaultDisk:
    """The folder of a shard that was closed after some segments."""
    shard = BugShard(segment_bytes=SEGMENT)
    for number in range(MESSAGES):
        shard.send({"body": b"%d" % number * 40, "queue": 0})
    shard.engine.stop()
    return shard.disk


def opened(disk: FaultDisk) -> list[bytes]:
    """All bodies, by a broker on ``disk``."""
    shard = BugShard(disk, segment_bytes=SEGMENT)
    shard.subscribe()
    return shard.consume()


@pytest.mark.invariant("I30")
def test_a_flipped_bit_in_the_middle_of_a_log_lost_everything_after_it():
    """The damage is named with its place; it is never taken for the end."""
    disk = written()
    assert len(opened(FaultDisk(files=disk.files()))) == MESSAGES
    segments = [name for name in disk.list() if name.endswith(".segment")]
    assert len(segments) == 4
    for bit in range(0, 8 * 12_000, 1973):
        hurt = FaultDisk(files=disk.files())
        hurt.flip(segments[1], 8 * 64 + bit)
        with pytest.raises(Corrupt, match=segments[1]) as damage:
            opened(hurt)
        assert damage.value.code == Code.DAMAGED


@pytest.mark.invariant("I31")
def test_damaged_metadata_led_to_deletion():
    """Any file but the messages' damaged or gone: either rebuilt, or refused; no segment is ever removed or cut."""
    disk = written()
    segments = {name: data for name, data in disk.files().items() if name.endswith(".segment")}
    others = [name for name in disk.list() if name not in segments]
    for name in [*others, *segments]:
        for damage in ("cut", "flip", "garbage"):
            files = disk.files()
            data = files[name]
            files[name] = {
                "cut": data[: len(data) // 2] if name in others else data[:10],
                "flip": bytes([data[0] ^ 1]) + data[1:] if data else b"x",
                "garbage": b"\xff" * 64 + data[64:],
            }[damage]
            hurt = FaultDisk(files=files)
            try:
                found = opened(hurt)
            except Corrupt:
                pass
            else:
                assert len(found) == MESSAGES, (name, damage)
            after = hurt.files()
            for segment, content in segments.items():
                if segment != name:
                    assert after[segment][: len(content)] == content, (name, damage)
            assert name not in segments or name in after


def test_a_folder_of_somebody_else_is_refused_and_left_alone():
    files = {"notes.txt": b"not a log"}
    disk = FaultDisk(files=files)
    with pytest.raises(EscrowError) as refused:
        open_log(disk, segment_bytes=1 << 12, seed=SEED)
    assert refused.value.code == Code.NOT_A_DATA_FOLDER
    assert disk.files()["notes.txt"] == b"not a log"


@pytest.mark.invariant("I6")
def test_a_late_commit_hit_the_next_transaction_of_the_same_producer():
    """Kafka's protocol named the producer, not the transaction."""
    driver = LedgerDriver()
    session = driver.session()
    [first] = driver.prepare(session, {})
    driver.end(session, (first["transaction"], ROLLBACK))
    [following] = driver.prepare(session, {})
    assert driver.end(session, (first["transaction"], COMMIT)) == [Code.CONFLICT]
    assert driver.visible() == []
    newer = driver.session()
    [third] = driver.prepare(newer, {})
    assert driver.end(session, (third["transaction"], COMMIT)) == [Code.FENCED]
    assert driver.end(newer, (first["transaction"], COMMIT)) == [Code.CONFLICT]
    assert driver.visible() == []
    assert driver.end(newer, (following["transaction"], COMMIT), (third["transaction"], ROLLBACK)) == [
        Code.COMMITTED,
        Code.ROLLED_BACK,
    ]
