"""The short forms of failover.py, and its account of ids: over real Kafkas, served brokers, and a program that only
knows ``escrow://a|b``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from failover import FAULTS, Outcome, strikes
from failover_program import TOPIC, Account, Place, Program, Watch, account, stored
from failover_shard import Kafka, one_node, three_nodes

import escrowmq as mq
from escrowmq_lab.servers import kafka as kafka_servers
from escrowmq_lab.servers.seam import Absent

SHORT = ["kill", "cut", "stop", "clean", "step-down"]
SHORT_OF_KAFKA = ["kafka-leader", "kafka-two"]
LONG_RUNS = 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    try:
        with one_node(tmp_path_factory.mktemp("failover")) as made:
            yield made
    except Absent as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    try:
        kafka_servers.libraries()
    except Absent as problem:
        pytest.skip(str(problem))
    with three_nodes(tmp_path_factory.mktemp("three"), {}) as made:  # patient: much else may run beside it
        yield made


def is_well(outcome: Outcome) -> None:
    assert (outcome.account, outcome.answered_away, outcome.problems) == (Account(0, 0, 0), 0, [])
    assert outcome.committed > 20


@pytest.mark.invariant("I1")
def test_a_leader_that_is_struck_under_load_loses_repeats_and_leaks_nothing(place: Kafka, tmp_path: Path) -> None:
    outcome = strikes(SHORT, tmp_path, place)
    is_well(outcome)
    assert outcome.changes >= len(SHORT)


@pytest.mark.invariant("I1")
@pytest.mark.long  # a minute, most of it the starts of Kafka's nodes
def test_a_shard_goes_on_by_itself_after_nodes_of_kafka_were_killed(three: Kafka, tmp_path: Path) -> None:
    is_well(strikes(SHORT_OF_KAFKA, tmp_path, three))


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("fault", FAULTS)
def test_twenty_strikes(request: pytest.FixtureRequest, tmp_path: Path, fault: str) -> None:
    nodes = request.getfixturevalue("place" if FAULTS[fault].kafka_nodes == 1 else "three")
    is_well(strikes([fault] * LONG_RUNS, tmp_path, nodes))


AT: Place = (0, 0)


@pytest.mark.parametrize(
    ("committed", "rolled_back", "consumed", "found", "said"),
    [
        ({"a"}, {"b"}, {"a": {AT}}, {"a": {AT}}, Account(0, 0, 0)),
        ({"a"}, set(), {}, {"a": {AT}}, Account(1, 0, 0)),
        ({"a"}, set(), {"a": {AT}}, {}, Account(1, 0, 0)),
        ({"a"}, set(), {"a": {AT}}, {"a": {AT, (0, 1)}}, Account(0, 1, 0)),
        ({"a"}, set(), {"a": {AT}}, {"a": {(0, 1)}}, Account(0, 1, 0)),
        ({"a"}, {"b"}, {"a": {AT}}, {"a": {AT}, "b": {(0, 1)}}, Account(0, 0, 1)),
        ({"a"}, {"b"}, {"a": {AT}, "b": {(0, 1)}}, {"a": {AT}}, Account(0, 0, 1)),
    ],
    ids=["well", "not-consumed", "not-stored", "stored-twice", "moved", "leaked", "leaked-and-gone"],
)
def test_every_id_is_accounted_for(
    committed: set[str],
    rolled_back: set[str],
    consumed: dict[str, set[Place]],
    found: dict[str, set[Place]],
    said: Account,
) -> None:
    assert account(committed, rolled_back, consumed, found) == said


def test_where_parts_leave_the_log_what_was_consumed_was_not_lost() -> None:
    assert account({"a"}, set(), {"a": {AT}}, {}, kept=False) == Account(0, 0, 0)
    assert account({"a"}, set(), {}, {"a": {AT}}, kept=False) == Account(1, 0, 0)


def test_a_lost_a_repeated_and_a_leaked_message_are_seen_in_a_log(tmp_path: Path) -> None:
    """What the account says of messages that a program believes to be otherwise than they are."""
    url = f"file:{tmp_path / 'data'}"
    with mq.connect(url) as bus:
        producer = bus.producer("shop", unasked=True)
        for key in ("well", "repeated", "repeated", "leaked"):
            with producer.transaction() as txn:
                txn.send(TOPIC, b"", key=key)
    consumed: dict[str, set[Place]] = {"lost": {AT}, "well": set(), "repeated": set()}
    assert account({"well", "lost", "repeated"}, {"leaked"}, consumed, stored(url)) == Account(1, 1, 1)


def test_the_time_of_a_strike_ends_with_a_transaction_begun_after_it() -> None:
    watch = Watch()
    watch.see(watch.since - 1.0, watch.since + 1.0)
    watch.see(watch.since + 1.0, watch.since + 3.0)
    watch.see(watch.since + 2.0, watch.since + 4.0)
    assert watch.seconds(lambda: "") == pytest.approx(3.0)


def test_the_time_of_a_hand_over_is_its_longest_pause() -> None:
    program = Program("escrow://nowhere:1")
    program.answered = [(0.0, 0.5), (1.0, 1.25), (1.25, 1.5), (1.5, 2.5), (2.5, 2.75)]
    assert program.pause(1.0) == pytest.approx(1.0)
    assert program.pause(2.0) == pytest.approx(0.5)
    assert program.between(1.0, 2.5) == 3
