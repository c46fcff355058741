"""The whole shard on a disk that forgets, tears and reorders: crashed at every operation, in recovery too, again and
again.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import shard_script
from shard_images import Image, Script, recover, recovery_images, resume, run, same_state
from shard_judge import judge
from shard_world import Memory, Violation, World

from escrowmq.errors import Corrupt
from escrowmq.testing.disks import MODES, FaultDisk, SimulatedCrash

SCRIPTS = {
    "shortest": shard_script.shortest,
    "forgetting": shard_script.forgetting,
    "whole": shard_script.whole,
}


@cache
def recorded(name: str) -> tuple[list[Image], Any, int]:
    """The images, effects and number of operations of a script."""
    return run(SCRIPTS[name])


def test_a_run_is_the_same_every_time() -> None:
    images, effects, operations = recorded("whole")
    again, same_effects, same_operations = run(shard_script.whole)
    assert (same_effects, same_operations) == (effects, operations)
    assert [i.files for i in again] == [i.files for i in images]
    assert operations > 200
    assert {i.next.split(" ")[0] for i in images} >= {
        "write",
        "sync",
        "resize",
        "create",
        "rename",
        "remove",
        "sync_folder",
    }


@pytest.mark.invariant("I1")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_whatever_a_crash_at_any_operation_leaves_recovers_to_what_was_answered(name: str, mode: str) -> None:
    images = [image for image in recorded(name)[0] if image.mode == mode]
    assert images
    for image in images:
        recover(image)


@pytest.mark.parametrize(
    ("name", "step"),
    [("shortest", 1), ("forgetting", 7), ("whole", 12), pytest.param("whole", 1, marks=pytest.mark.long)],
)
def test_after_any_crash_the_world_goes_on_to_the_same_end(name: str, step: int) -> None:
    images, effects, _ = recorded(name)
    for image in images[::step]:
        resume(image, SCRIPTS[name], effects)


@pytest.mark.invariant("I28")
@pytest.mark.parametrize(
    ("name", "step"),
    [("shortest", 1), ("forgetting", 25), ("whole", 48), pytest.param("whole", 3, marks=pytest.mark.long)],
)
def test_a_crash_at_any_operation_of_a_recovery_changes_nothing(name: str, step: int) -> None:
    for image in recorded(name)[0][::step]:
        once = recover(image)
        for second in recovery_images(image):
            assert same_state(once, recover(second)), f"{image}, then in recovery {second}"


@pytest.mark.invariant("I28", "I29")
def test_recovery_is_deterministic_and_needs_no_derived_file() -> None:
    without_snapshots = 0
    for image in recorded("whole")[0][::20]:
        once = recover(image)
        assert same_state(once, recover(image)), image
        names = [n for n in image.files if not n.endswith(".index")]
        if not any(n.startswith("base") for n in names):
            without_snapshots += any(n.startswith("snapshot") for n in names)
            names = [n for n in names if not n.startswith("snapshot")]
        bare = Image(image.operation, image.mode, image.next, {n: image.files[n] for n in names}, image.memory)
        assert same_state(once, recover(bare)), f"{image}, without derived files"
    assert without_snapshots > 1


@pytest.mark.invariant("I28")
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(s, marks=pytest.mark.long) for s in range(6, 200))])
def test_a_storm_of_restarts(seed: int) -> None:
    chance = random.Random(seed)
    effects, crashes = storm(shard_script.whole, chance)
    expected = recorded("whole")[1]
    assert crashes > 2
    for when in ("before retention", "after"):
        assert effects[when]["decided"] == expected[when]["decided"], f"seed {seed}"
    # Deliveries that nobody got to hear of count as attempts too, so a message may be a dead letter instead.
    for group, got in expected["before retention"]["got"].items():
        found = effects["before retention"]
        assert set(found["got"][group]) | set(found["dead"][group]) == set(got), f"seed {seed}"


def storm(script: Script, chance: random.Random) -> tuple[Any, int]:
    """Run a script on a disk that stops every few operations; its effects, and how often it stopped."""
    memory, disk, crashes = Memory(), FaultDisk(1, crash_at=chance.randrange(1, 60)), 0
    while True:
        try:
            world = World(disk, memory)
            judge(world)
            effects = script(world)
            judge(world)
            return effects, crashes
        except SimulatedCrash:
            crashes += 1
            faults = {"crash_at": chance.randrange(1, 60)} if crashes < 12 else {}
            disk = disk.survivors(chance.choice(MODES), crashes, **faults)


@pytest.mark.invariant("I30")
def test_a_flipped_bit_after_a_clean_stop_is_reported_and_nothing_is_cut() -> None:
    flips = reported = 0
    for image in rotten():
        flips += 1
        disk, name = image.disk(), image.next.split(" ")[-1]
        try:
            world = World(disk, image.memory.copy())
            judge(world)
            list(world.log.frames_at(world.log.first_position))
        except Corrupt as problem:
            reported += name in str(problem)
        assert name != max(n for n in disk.files() if n.endswith(".segment")) or disk.files()[name] == image.files[name]
    assert flips > 100
    assert reported == flips


def rotten() -> list[Image]:
    """The folder of a script after a clean stop, with one bit flipped, here and there in every segment."""
    memory, disk = Memory(), FaultDisk(1)
    world = World(disk, memory)
    shard_script.whole(world)
    world.engine.stop()
    chance, images = random.Random(5), []
    for name, content in disk.files().items():
        if name.endswith(".segment"):
            for start in range(0, len(content), 200):
                damaged = bytearray(content)
                damaged[min(start + chance.randrange(200), len(content) - 1)] ^= 1 << chance.randrange(8)
                files = {**disk.files(), name: bytes(damaged)}
                images.append(Image(disk.operations, "kept", f"bit rot in {name}", files, memory))
    return images


def test_the_judge_notices_what_is_missing() -> None:
    image = recorded("whole")[0][-1]
    memory = image.memory.copy()
    memory.decided["t2"], memory.decided["t8"] = memory.decided["t8"], memory.decided["t2"]
    with pytest.raises(Violation, match="I5"):
        recover(Image(image.operation, image.mode, image.next, image.files, memory))
    memory = image.memory.copy()
    memory.offsets[0, 10_000] = 0
    memory.acked.add(("cart", 0, 10_000))
    with pytest.raises(Violation, match="I22"):
        recover(Image(image.operation, image.mode, image.next, image.files, memory))
