"""The simulation: seeds hold every promise, the same seed is the same run, and what fails becomes small.

Each run is in a process of its own: it takes the place of time and threads for the whole process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted import BUGS, KNOWN

pytestmark = pytest.mark.timeout(900)  # it is all work for the processors, whoever else has them

HERE = Path(__file__).parent
SEEDS = 36


def run(*arguments: str, hash_seed: str = "0", code: int = 0) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.invariant(
    "I1",
    "I2",
    "I3",
    "I4",
    "I5",
    "I7",
    "I8",
    "I9",
    "I10",
    "I11",
    "I12",
    "I14",
    "I16",
    "I17",
    "I19",
    "I20",
    "I21",
    "I22",
    "I23",
    "I25",
    "I26",
    "I28",
    "I34",
    "I36",
    "I37",
    "I38",
    "I39",
    "I40",
)
def test_seeds_hold_every_promise() -> None:
    """The short form of ``escrowmq-lab simulate --seeds 2000``."""
    found = json.loads(run("-m", "escrowmq_lab", "simulate", "--seeds", str(SEEDS), "--jobs", "2", "--json"))
    assert found["failed"] == 0, found["failures"]
    assert found["runs"] == SEEDS, "each batch of seeds, also those that are handed out later"
    assert found["broker_crashes"] > 10
    assert found["clients_killed"] > 5
    assert found["messages_committed"] > 500
    assert found["effects"] > 50
    assert found["operator_acts"] > 10
    assert min(found["transactions_committed"], found["transactions_rolled_back"], found["transactions_parked"]) > 5


def test_reads_parts_credit_and_tls_follow_the_protocol() -> None:
    """The same for runs about the carrier, whose frames are all checked."""
    found = json.loads(run("-m", "escrowmq_lab", "simulate", "--carrying", "--seeds", "16", "--jobs", "2", "--json"))
    assert (found["failed"], found["runs"]) == (0, 16), found["failures"]


@pytest.mark.parametrize("scale", ["Scale()", "CARRYING"])
def test_the_same_seed_is_the_same_run_in_another_process(scale: str) -> None:
    """Two brokers, an ordered group, kills, a full disk and TLS are among these; sets of text have another order in
    each process."""
    seeds = ("1", "5", "8", "12")
    code = (
        "import sys; from escrowmq_lab.simulation.swarm import simulate\n"
        "from escrowmq_lab.simulation.plan import CARRYING, Scale\n"
        f"print(*(simulate(int(seed), {scale}).digest for seed in sys.argv[1:]))"
    )
    first = run("-c", code, *seeds, hash_seed="1").split()
    again = run("-c", code, *reversed(seeds), hash_seed="2").split()
    assert first == again[::-1]
    assert len(set(first)) == len(seeds)


def test_a_failing_run_is_made_small_and_still_fails() -> None:
    """With a bug planted: what is left is less than a quarter, and it fails alone in the same way."""
    found = json.loads(run(str(HERE / "shrinking.py")))
    assert found["what"] in found["still"]
    assert 0 < found["needed"] < found["things"] / 4
    assert found["trace"], "the run is kept to be read"


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, object]]:
    """What the simulation found of the planted bugs, each at the seed where it is known to show."""
    lines = run(str(HERE / "planted.py"), "--seeds", "6").splitlines()
    return {found["bug"]: found for found in map(json.loads, lines)}


@pytest.mark.invariant("I1", "I3", "I4", "I5", "I8", "I9", "I10", "I11", "I15", "I23")
@pytest.mark.parametrize("name", KNOWN)
def test_a_planted_bug_is_found(name: str, table: dict[str, dict[str, object]]) -> None:
    assert table[name]["caught_by"], table[name]


def test_bugs_of_every_part_are_planted() -> None:
    assert {BUGS[name][0] for name in KNOWN} >= {"ledger", "writer", "log", "client", "wire", "carrier", "outbox"}
    assert len(KNOWN) >= 20
    assert sum(BUGS[name][0] == "wire" for name in KNOWN) >= 5


def test_the_table_in_the_docs_is_what_was_found(table: dict[str, dict[str, object]]) -> None:
    """docs/simulation.md names each bug and which checker notices it first at its known seed."""
    text = (HERE.parent.parent / "docs" / "simulation.md").read_text()
    for found in table.values():
        words = str(found["bug"]).replace("_", " ")
        assert f"| {words} | {found['room']} |" in text
