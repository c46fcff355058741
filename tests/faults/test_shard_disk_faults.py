"""A disk that fails or fills up under a whole shard: what it refuses, what goes on, and what is there afterwards."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest
import shard_script
from shard_images import Script
from shard_judge import judge
from shard_world import SETTINGS, Memory, World

from escrowmq.errors import Code, EscrowError, Overloaded
from escrowmq.ledger.commands import OpenSession, Send
from escrowmq.model import COMMIT, ROLLBACK, Act, DecidedBy
from escrowmq.testing.disks import FaultDisk, Mode


def is_stop(problem: EscrowError) -> bool:
    """Whether the shard, or the log while it was opened, stopped for good."""
    return problem.code in (Code.SHARD_STOPPED, Code.LOG_FAILED)


def can_do_without(operation: str, name: str) -> bool:
    """Whether a log goes on when this failed: a snapshot or an index that is not there can be made again, a removal
    too; and their names in the folder."""
    return name.endswith((".index", ".index.tmp", ".snapshot", ".snapshot.tmp")) or operation.startswith(
        ("remove", "sync_folder")
    )


def fill(world: World, plain: int) -> int:
    """Send until the disk is full; how many messages went in."""
    for sent in range(200):
        try:
            world.send(f"filler {sent}", {"topic": "orders", "body": bytes(1500)}, session=plain)
        except Overloaded as refusal:
            assert refusal.code is Code.DISK_FULL  # noqa: PT017
            assert refusal.retry_after > 0  # noqa: PT017
            return sent
    raise AssertionError("the disk never got full")


def journal(script: Script) -> list[str]:
    """The operations of an undisturbed run."""
    disk = FaultDisk(1)
    script(World(disk))
    return disk.journal


WHOLE = journal(shard_script.whole)
SHORTEST = journal(shard_script.shortest)
EFFECTS = {script: script(World(FaultDisk(1))) for script in (shard_script.shortest, shard_script.whole)}
AT = {
    "shortest": (shard_script.shortest, range(1, len(SHORTEST) + 1)),
    "whole": (shard_script.whole, range(1, len(WHOLE) + 1, 18)),
}


@pytest.mark.parametrize("mode", ["kept", "dropped"])
@pytest.mark.parametrize(
    ("script", "operations"),
    [*AT.values(), pytest.param(shard_script.whole, range(1, len(WHOLE) + 1), marks=pytest.mark.long)],
    ids=[*AT, "whole, everywhere"],
)
def test_after_a_failed_operation_nothing_is_answered_until_a_restart(
    script: Script, operations: range, mode: Mode
) -> None:
    everything = journal(script)
    stopped = 0
    for operation in operations:
        memory, disk = Memory(), FaultDisk(1, failures={operation: errno.EIO})
        faulty = disk
        try:
            found = script(World(disk, memory))
            (name,) = faulty.failed
            assert can_do_without(everything[operation - 1], name), f"operation {operation} failed, and nothing stopped"
        except EscrowError as problem:
            assert is_stop(problem), (operation, problem)  # noqa: PT017
            stopped += 1
            known = len(memory.answers)
            disk = disk.survivors(mode, operation)
            world = World(disk, memory)
            judge(world)
            assert len(memory.answers) == known
            found = script(world)
            judge(world)
        assert found == EFFECTS[script], f"operation {operation} failed"
    assert stopped > len(operations) * 0.5


@pytest.mark.parametrize("operation", [n for n, what in enumerate(SHORTEST, 1) if what == "sync" and n > 20][:3])
def test_a_failed_sync_fails_all_that_waited_for_it_and_all_that_comes(operation: int) -> None:
    memory = Memory()
    world = World(FaultDisk(1), memory)
    shop, plain = shard_script.opening(world)
    t1 = world.prepare("t1", shop, {"topic": "orders"})
    world.disk.fail_next_sync = True
    commands = {
        f"send {n}": Send(world._batch(f"send {n}", ({"topic": "orders"},)), np.array([plain])) for n in range(3)
    }
    assert world.refused(lambda: world.call_all(commands)) is Code.SHARD_STOPPED
    assert not [name for name in memory.answers if name in commands]
    for act in (
        lambda: world.end("t1 commit", shop, COMMIT, t1),
        lambda: world.send("more", {"topic": "orders"}, session=plain),
        lambda: world.receive("late receive", "cart"),
        lambda: world.state(t1),
    ):
        assert world.refused(act) is Code.SHARD_STOPPED
    assert world.engine.status == "stopped"
    again = World(world.disk.survivors("dropped", operation), memory)
    judge(again)
    assert again.call_all(commands)
    again.end("t1 commit", shop, COMMIT, t1)
    judge(again)


@pytest.mark.invariant("I33")
def test_a_full_disk_refuses_messages_and_nothing_else_and_is_over_when_there_is_space() -> None:
    memory, disk = Memory(), FaultDisk(1)
    world = World(disk, memory)
    shop, plain = shard_script.opening(world)
    t1, t2, t3 = world.prepare_all(shop, {f"t{n}": [{"topic": "orders"}] for n in (1, 2, 3)})
    world.send("before", *({"topic": "orders"} for _ in range(4)), session=plain)
    disk.budget = sum(map(len, disk.files().values())) + 40_000
    assert fill(world, plain) > 3
    with pytest.raises(Overloaded):
        world.prepare("t9", shop, {"topic": "orders", "body": bytes(1500)})
    # what makes things better goes on
    leased = world.receive("receive", "cart", 3)
    assert len(leased.leases) == 3
    assert world.settle("ack", "cart", leased, Act.ACK) == [Code.OK] * 3
    assert world.end("t1 commit", shop, COMMIT, t1) == [Code.COMMITTED]
    world.until("t2 asked", lambda: world.times_asked(t2) > 0)
    assert world.end("t2 rollback", shop, ROLLBACK, t2, by=DecidedBy.CHECK) == [Code.ROLLED_BACK]
    judge(world)
    # and when there is space again, everything does, without a restart
    disk.budget = None
    world.send("after", {"topic": "orders", "body": bytes(1500)}, session=plain)
    world.prepare("t9", shop, {"topic": "orders", "body": bytes(1500)})
    assert world.engine.status == "ok"
    world.end("t3 commit", shop, COMMIT, t3)
    judge(world)
    judge(World(disk.survivors("dropped", 1), memory))


def patient(script: Script, disk: FaultDisk, memory: Memory, space: int) -> tuple[Any, int]:
    """Run a script as a client that tries again while the disk is full; it gets more space each time."""
    refusals = 0
    world = None
    while True:
        try:
            world = world or World(disk, memory)
            return script(world), refusals
        except Overloaded:
            refusals += 1
            assert disk.budget is not None
            disk.budget += space
            if world is not None:
                assert world.engine.status in ("ok", "full")


@pytest.mark.invariant("I33")
@pytest.mark.parametrize("start", [0, 3000, 9000, 14_000])
@pytest.mark.parametrize("space", [1500, 4000])
def test_a_disk_that_is_always_almost_full_loses_nothing(start: int, space: int) -> None:
    memory, disk = Memory(), FaultDisk(1, budget=start)
    found, refusals = patient(shard_script.shortest, disk, memory, space)
    assert refusals > 1
    assert found == EFFECTS[shard_script.shortest]
    judge(World(disk.survivors("dropped", 1), memory))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_for_whatever_reserves_it_is_no_fault(number: int) -> None:
    for operation in [n for n, what in enumerate(WHOLE, 1) if what in ("resize", "create")][::3]:
        memory, disk = Memory(), FaultDisk(1, failures={operation: number}, budget=1 << 30)
        try:
            found, _ = patient(shard_script.whole, disk, memory, 1)
        except EscrowError as problem:
            # A segment that is sealed cannot be left half sealed: only that may stop the shard.
            assert is_stop(problem), (operation, problem)  # noqa: PT017
            found = shard_script.whole(World(disk.survivors("kept", operation), memory))
        assert found == EFFECTS[shard_script.whole], operation


def test_a_session_can_be_opened_on_a_full_disk_by_who_must_decide() -> None:
    """A producer that was restarted needs a session before it can end anything."""
    world = World(FaultDisk(1))
    shop, plain = shard_script.opening(world)
    t1 = world.prepare("t1", shop, {"topic": "orders"})
    world.disk.budget = sum(map(len, world.disk.files().values())) + 20_000
    fill(world, plain)
    again = world.call("session again", OpenSession("shop", "b", True))
    assert world.end("t1 commit", again, COMMIT, t1) == [Code.COMMITTED]
    assert SETTINGS.segment_bytes < 20_000  # it rolled on the way
