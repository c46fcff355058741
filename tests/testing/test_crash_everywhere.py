"""What ``crash_everywhere`` reports, and refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

import escrowmq as mq
from escrowmq.testing import World, crash_everywhere


def lines(world: World, name: str) -> list[str]:
    """The ids in a file: the database of these programs, which a write changes at once."""
    file = world.folder / name
    return file.read_text().split() if file.exists() else []


def note(world: World, name: str, identity: str) -> None:
    world.step(f"write {identity} to {name}")
    with (world.folder / name).open("a") as file:
        file.write(f"{identity}\n")


def committed(world: World) -> list[str]:
    return lines(world, "orders")


def shop(world: World) -> None:
    """Correct: the same message id each time."""
    producer = world.bus().producer("shop", qos=2)
    for order in ("o-1", "o-2"):
        if order not in committed(world):
            producer.send("orders", b"", key=order, message_id=order)
            note(world, "orders", order)


def careless_shop(world: World) -> None:
    producer = world.bus().producer("shop")
    for order in ("o-1", "o-2"):
        if order not in committed(world):
            note(world, "orders", order)
            producer.send("orders", b"", key=order)


def test_a_correct_program_survives_and_its_steps_are_returned() -> None:
    survived = crash_everywhere(shop, committed=committed, sent="orders")
    assert [str(step) for step in survived.steps] == [
        "shop: send to orders (o-1)",
        "shop: write o-1 to orders",
        "shop: send to orders (o-2)",
        "shop: write o-2 to orders",
        "shop: its end",
    ]
    assert survived.crashes == 5


def test_a_report_names_the_steps_around_the_crash_and_the_ids() -> None:
    with pytest.raises(AssertionError) as failed:
        crash_everywhere(careless_shop, committed=committed, sent="orders")
    assert (
        str(failed.value)
        == """\
2 of 5 crashes did harm. careless_shop was killed after write o-1 to orders and before send to orders (o-1):
  o-1: committed once, sent never
the steps of that run:
   1 careless_shop: write o-1 to orders
   X careless_shop: send to orders (o-1), not reached
   2 careless_shop: write o-2 to orders
   3 careless_shop: send to orders (o-2)
   4 careless_shop: its end
   5 careless_shop: its end
and also:
  careless_shop was killed after write o-2 to orders and before send to orders (o-2): o-2: committed once, sent never"""
    )


def test_two_crashes_interrupt_the_restart_and_the_checker() -> None:
    """The checker makes its mark and answers in two steps, of which the second relies on memory."""

    def shop(world: World) -> None:
        memory: list[str] = []

        def check(check: mq.Check) -> mq.Outcome:
            identity = check.messages[0].key or ""
            if identity in committed(world):
                return mq.COMMIT
            if identity in lines(world, "given-up"):  # it should be ROLLBACK here, too
                return mq.ROLLBACK if memory else mq.UNKNOWN
            memory.append(identity)
            note(world, "given-up", identity)
            return mq.ROLLBACK

        producer = world.bus().producer("shop", checker=check)
        if not world.restarted:
            with producer.transaction() as txn:
                txn.send("orders", b"", key="o-1")
                note(world, "orders", "o-1")
        else:
            world.step("look at what is left")

    def decided(world: World) -> list[str]:
        kept = [one["messages"][0]["key"] for one in map(details(world), undecided(world))]
        return committed(world) + kept

    def undecided(world: World) -> list[str]:
        return [one["id"] for state in ("open", "parked") for one in world.bus().admin.transactions(state=state)]

    def details(world: World):
        return lambda identity: world.bus().admin.transaction(identity)

    once = crash_everywhere(shop, committed=decided, sent="orders")
    with pytest.raises(AssertionError, match="then shop was killed after write o-1 to given-up and before the checker"):
        crash_everywhere(shop, committed=decided, sent="orders", crashes=2)
    assert once.crashes == 4


def test_a_program_that_cannot_be_started_again_is_found() -> None:
    def shop(world: World) -> None:
        note(world, "orders", "o-1")
        if committed(world) != ["o-1"]:
            raise RuntimeError("o-1 is there already")
        world.bus().producer("shop", qos=2).send("orders", b"", key="o-1", message_id="o-1")

    with pytest.raises(AssertionError, match=r"started again, shop raised RuntimeError\('o-1 is there already'\)"):
        crash_everywhere(shop, committed=committed, sent="orders")


def test_its_own_exceptions_come_out_unchanged() -> None:
    def shop(world: World) -> None:
        raise LookupError("a bug")

    with pytest.raises(LookupError, match="a bug"):
        crash_everywhere(shop, committed=committed, sent="orders")


def test_sides_that_never_agree_are_said_to_be() -> None:
    with pytest.raises(AssertionError, match=r"even without a crash:\n  o-1: committed never, sent once"):
        crash_everywhere(shop, committed=lambda world: [], sent="orders")


def test_a_comparison_of_nothing_is_refused() -> None:
    with pytest.raises(mq.Misuse, match="left no ids"):
        crash_everywhere(lambda world: None, committed=committed, sent="orders")
    with pytest.raises(mq.Misuse, match="nothing to compare"):
        crash_everywhere(shop, sent="orders")
    with pytest.raises(mq.Misuse, match="nothing to compare"):
        crash_everywhere(committed=committed, sent="orders")


def test_a_dead_process_has_no_further_effect() -> None:
    """Whatever its handlers and finally clauses try."""
    seen: list[Path] = []

    def stubborn(world: World) -> None:
        producer = world.bus().producer("shop", qos=2)
        try:
            shop(world)
        except BaseException:
            seen.append(world.folder)
            for _ in range(2):
                try:
                    producer.send("orders", b"", key="stolen")
                except BaseException:
                    continue
            raise
        finally:
            world.bus().producer("shop", qos=2).send("orders", b"", key="last", message_id="last")

    def marks(world: World) -> list[str]:
        return [*committed(world), "last"]

    crash_everywhere(stubborn, committed=marks, sent="orders")
    assert len(set(seen)) == len(seen) >= 4  # each run has a folder of its own
    assert not any(folder.exists() for folder in seen)


def test_it_needs_no_extra(tmp_path: Path) -> None:
    """Only a program that uses SQLAlchemy needs it."""
    program = """
import sys

for name in ("sqlalchemy", "typer", "rich", "pytest", "hypothesis", "prometheus_client"):
    sys.modules[name] = None

import escrowmq as mq
from escrowmq.testing import crash_everywhere


def shop(world):
    for _ in range(1 - len(world.bus().sent("orders"))):
        world.bus().producer("shop").send("orders", b"", key="o-1")


print(crash_everywhere(shop, committed=lambda world: ["o-1"], sent="orders").crashes)
try:
    crash_everywhere(shop, committed="SELECT id FROM orders", sent="orders")
except mq.Misuse as problem:
    print(problem.code.name, "escrowmq[outbox]" in str(problem))
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "2\nMISSING_PACKAGE True\n", "")
