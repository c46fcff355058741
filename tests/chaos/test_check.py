"""The check of a chaos run notices every kind of finding, each planted in real databases, and nothing where nothing is
wrong.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq_lab.chaos.books import Books, body_of, business, confirmed, effects, hash_of, id_of, intended, metadata
from escrowmq_lab.chaos.check import Flow, Waiting, check, read_flow
from escrowmq_lab.chaos.findings import KEPT, Findings
from escrowmq_lab.chaos.modes import Mode, Site
from escrowmq_lab.databases import open_engine


class Once(Mode):
    name = "once"
    promise = "each effect exactly once"

    def place(self, site: Site) -> None: ...

    def take(self, site: Site) -> None: ...


class Other(Once):
    name = "other"


class Often(Once):
    name = "often"
    repeats = True
    shares = True


MODES = (Once, Other, Often)
KINDS = ("lost", "leaked", "unexpected", "repeated", "altered", "misplaced", "contradiction")


@dataclass
class Nodes:
    """Two producers and two consumers."""

    producers: dict[str, sa.Engine]
    consumers: dict[str, sa.Engine]

    def empty(self) -> None:
        for engine in (*self.producers.values(), *self.consumers.values()):
            with engine.begin() as connection:
                for table in metadata.sorted_tables:
                    connection.execute(table.delete())

    def books(self, node: str) -> Books:
        return Books({**self.producers, **self.consumers}[node])

    def check(self) -> Findings:
        return check(self.producers, self.consumers, MODES)

    def intend(self, *ids: str, mode: str = "once", node: str = "producer-1", dooms: bool = False) -> None:
        self.books(node).intend(mode, ids, dooms=dooms)

    def enter(self, *ids: str, mode: str = "once", node: str = "producer-1") -> None:
        with self.producers[node].begin() as connection:
            self.books(node).enter(connection, mode, ids)

    def confirm(self, *ids: str, mode: str = "once", node: str = "producer-1") -> None:
        self.books(node).confirm(mode, ids)

    def effect(self, *bodies: bytes, mode: str = "once", node: str = "consumer-1") -> None:
        with self.consumers[node].begin() as connection:
            self.books(node).effect(connection, mode, bodies)

    def whole(self, *ids: str, mode: str = "once", producer: str = "producer-1", consumer: str = "consumer-1") -> None:
        """All as it should be."""
        self.intend(*ids, mode=mode, node=producer)
        self.enter(*ids, mode=mode, node=producer)
        self.confirm(*ids, mode=mode, node=producer)
        self.effect(*map(body_of, ids), mode=mode, node=consumer)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("books")
    with _opened(lambda name: open_engine(f"sqlite:///{folder / name}.db")) as nodes:
        yield nodes


@pytest.fixture
def nodes(files: Nodes) -> Nodes:
    files.empty()
    return files


@contextlib.contextmanager
def _opened(open_one: Callable[[str], sa.Engine]) -> Iterator[Nodes]:
    made = {name: open_one(name) for name in ("producer-1", "producer-2", "consumer-1", "consumer-2")}
    for engine in made.values():
        Books(engine).make()
    yield Nodes(
        {name: engine for name, engine in made.items() if name.startswith("producer")},
        {name: engine for name, engine in made.items() if name.startswith("consumer")},
    )
    for engine in made.values():
        engine.dispose()


def only(findings: Findings, what: str, *ids: str, mode: str = "once") -> str:
    """Nothing but these findings of one kind and mode; the detail of the first."""
    assert findings.numbers == {(what, mode): len(ids)}
    assert findings.subjects(what, mode) == set(ids)
    assert not findings.ok
    return findings.broken[0].detail


def test_where_nothing_is_wrong_nothing_is_found(nodes: Nodes) -> None:
    nodes.whole("a", "b", producer="producer-1", consumer="consumer-2")
    nodes.whole("c", producer="producer-2")
    nodes.intend("rolled-back", dooms=True)
    nodes.intend("never came to it")
    nodes.intend("recovered")
    nodes.enter("recovered")
    nodes.effect(body_of("recovered"))
    findings = nodes.check()
    assert findings.ok, findings.broken
    tally = findings.tallies["once"]
    numbers = (tally.intended, tally.doomed, tally.business, tally.confirmed, tally.effects, tally.recovered)
    assert numbers == (6, 1, 4, 3, 4, 1)
    assert tally.repeats == 0
    assert tally.waited_us is not None
    assert findings.tallies["other"].intended == 0
    assert findings.to_json()["ok"]


def test_nothing_at_all(nodes: Nodes) -> None:
    findings = nodes.check()
    assert findings.ok
    assert set(findings.tallies) == {"once", "other", "often"}


def test_lost(nodes: Nodes) -> None:
    nodes.whole("fine")
    nodes.intend("gone")
    nodes.enter("gone")
    detail = only(nodes.check(), "lost", "gone")
    assert "producer-1: intended" in detail
    assert "business" in detail
    assert "consumer" not in detail


def test_lost_although_another_was_repeated_so_that_counts_agree(nodes: Nodes) -> None:
    nodes.whole("a", mode="often")
    nodes.effect(body_of("a"), mode="often", node="consumer-2")
    nodes.intend("b", mode="often")
    nodes.enter("b", mode="often")
    only(nodes.check(), "lost", "b", mode="often")


def test_leaked_without_a_business_row(nodes: Nodes) -> None:
    nodes.intend("a")
    nodes.effect(body_of("a"))
    only(nodes.check(), "leaked", "a")


def test_leaked_though_it_was_to_be_rolled_back(nodes: Nodes) -> None:
    nodes.intend("a", dooms=True)
    nodes.effect(body_of("a"), node="consumer-2")
    assert "to be rolled back" in only(nodes.check(), "leaked", "a")


def test_unexpected(nodes: Nodes) -> None:
    nodes.effect(body_of("from-nowhere"))
    only(nodes.check(), "unexpected", "from-nowhere")


def test_garbage_is_unexpected_and_altered(nodes: Nodes) -> None:
    garbage = bytes(range(256))
    nodes.effect(garbage)
    assert nodes.check().numbers == {("unexpected", "once"): 1, ("altered", "once"): 1}
    assert nodes.check().subjects("altered") == {id_of(garbage)}


def test_repeated_in_one_database(nodes: Nodes) -> None:
    nodes.whole("a", "b")
    nodes.effect(body_of("a"))
    only(nodes.check(), "repeated", "a")


def test_repeated_in_two_databases(nodes: Nodes) -> None:
    nodes.whole("a", "b")
    nodes.effect(body_of("b"), node="consumer-2")
    detail = only(nodes.check(), "repeated", "b")
    assert "consumer-1: effect" in detail
    assert "consumer-2: effect" in detail


def test_a_mode_that_repeats_may_repeat_and_is_counted(nodes: Nodes) -> None:
    nodes.whole("a", "b", mode="often")
    nodes.effect(body_of("b"), mode="often", node="consumer-2")
    nodes.effect(body_of("b"), mode="often")
    findings = nodes.check()
    assert findings.ok
    assert findings.tallies["often"].repeats == 2
    assert findings.tallies["often"].effects == 2


def test_altered(nodes: Nodes) -> None:
    nodes.intend("a")
    nodes.enter("a")
    nodes.effect(body_of("a") + b"!")
    assert "of another content" in only(nodes.check(), "altered", "a")


def test_altered_to_the_body_of_another_is_repeated_and_lost(nodes: Nodes) -> None:
    nodes.whole("a")
    nodes.intend("b")
    nodes.enter("b")
    nodes.effect(body_of("a"))
    assert nodes.check().numbers == {("repeated", "once"): 1, ("lost", "once"): 1}


def test_an_effect_under_another_mode_is_altered_there_and_lost_here(nodes: Nodes) -> None:
    nodes.intend("a")
    nodes.enter("a")
    nodes.effect(body_of("a"), mode="other")
    findings = nodes.check()
    assert findings.numbers == {("altered", "other"): 1, ("lost", "once"): 1}


def test_an_effect_at_another_consumer_than_the_one_that_its_id_names(nodes: Nodes) -> None:
    nodes.whole("fine.1", consumer="consumer-1")
    nodes.whole("fine.2", consumer="consumer-2")
    nodes.whole("stray.1", consumer="consumer-2")
    nodes.whole("anywhere.1", mode="often", consumer="consumer-2")
    assert "consumer-2: effect" in only(nodes.check(), "misplaced", "stray.1")


def test_confirmed_without_a_business_row(nodes: Nodes) -> None:
    nodes.intend("a")
    nodes.confirm("a")
    only(nodes.check(), "contradiction", "a")


def test_business_that_was_never_intended(nodes: Nodes) -> None:
    nodes.enter("a")
    assert nodes.check().numbers == {("contradiction", "once"): 1, ("lost", "once"): 1}


def test_business_that_was_to_be_rolled_back(nodes: Nodes) -> None:
    nodes.intend("a", dooms=True)
    nodes.enter("a")
    nodes.effect(body_of("a"))
    assert nodes.check().numbers == {("contradiction", "once"): 1, ("leaked", "once"): 1}


def test_one_id_of_two_producers(nodes: Nodes) -> None:
    nodes.whole("a")
    nodes.intend("a", node="producer-2")
    assert "producer-2: intended" in only(nodes.check(), "contradiction", "a")


def test_a_mode_that_nobody_told_is_checked_too(nodes: Nodes) -> None:
    nodes.effect(body_of("a"), mode="foreign")
    only(nodes.check(), "unexpected", "a", mode="foreign")


def test_all_are_counted_and_the_first_are_named(nodes: Nodes) -> None:
    ids = [f"gone-{n}" for n in range(3 * KEPT)]
    nodes.intend(*ids)
    nodes.enter(*ids)
    findings = nodes.check()
    assert findings.of("lost") == findings.of("lost", "once") == 3 * KEPT
    assert len(findings.broken) == KEPT
    assert findings.of("lost", "other") == 0


def test_what_still_waits_is_told_by_id(nodes: Nodes) -> None:
    waiting = Waiting(nodes.producers, nodes.consumers, MODES)
    assert waiting.look() == {"once": 0, "other": 0, "often": 0}
    nodes.intend("a", "b", "c")
    nodes.enter("a", "b", "c")
    nodes.effect(body_of("a"), mode="other")  # not under its own mode
    nodes.effect(body_of("from-nowhere"))  # no other's
    assert waiting.look()["once"] == 3
    nodes.effect(body_of("b"), node="consumer-2")
    assert waiting.look()["once"] == 2
    assert sorted(waiting.named("once")) == ["a", "c"]
    nodes.enter("d", node="producer-2")
    assert waiting.look()["once"] == 3
    nodes.effect(*map(body_of, "acd"))
    assert waiting.look() == {"once": 0, "other": 0, "often": 0}


def test_what_waits_is_told_alike_when_it_is_much(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("escrowmq_lab.chaos.check.waiting.FEW", 2)
    test_what_still_waits_is_told_by_id(nodes)


def test_the_flow_is_counted_by_mode_and_second(nodes: Nodes) -> None:
    assert read_flow(nodes.producers, nodes.consumers) == Flow()
    for node, second in (("producer-1", 7), ("producer-2", 7), ("producer-2", 9)):
        with nodes.producers[node].begin() as connection:
            row = {"id": f"{node}.{second}", "mode": "once", "at_us": second * 1_000_000 + 999_999}
            connection.execute(business.insert(), row)
    flow = read_flow(nodes.producers, nodes.consumers)
    assert flow == Flow(business={"once": {7: 2, 9: 1}})


# Against a plain program: the same words, one id after the other

NAMED = ("a.1", "b.2", "c", "d")
IDS = st.sampled_from(NAMED)
NAMES = st.sampled_from(["once", "other", "often"])
ENTRY = st.tuples(NAMES, IDS)


@dataclass
class Written:
    """What stands in the databases: a mode by id, for each of two producers; and effects."""

    intended: Sequence[dict[str, tuple[str, bool]]]
    business: Sequence[dict[str, str]]
    confirmed: Sequence[dict[str, str]]
    effects: Sequence[Sequence[tuple[str, str, bool]]] = field(default_factory=list)


WRITTEN = st.builds(
    Written,
    intended=st.lists(st.dictionaries(IDS, st.tuples(NAMES, st.booleans())), min_size=2, max_size=2),
    business=st.lists(st.dictionaries(IDS, NAMES), min_size=2, max_size=2),
    confirmed=st.lists(st.dictionaries(IDS, NAMES), min_size=2, max_size=2),
    effects=st.lists(
        st.lists(st.tuples(NAMES, IDS, st.sampled_from([True, True, False])), max_size=4), min_size=2, max_size=2
    ),
)


def plainly(written: Written) -> Counter[tuple[str, str, str]]:
    """Findings as (what, mode, id)."""
    found: Counter[tuple[str, str, str]] = Counter()
    done = [row for rows in written.effects for row in rows]
    places = [(mode, identity, str(node)) for node, rows in enumerate(written.effects, 1) for mode, identity, _ in rows]
    for mode in ("once", "other", "often"):
        for identity in NAMED:
            wants = [row[identity][1] for row in written.intended if identity in row and row[identity][0] == mode]
            elsewhere = [row for row in written.intended if identity in row and row[identity][0] != mode]
            rows = [row for row in written.business if row.get(identity) == mode]
            told = [row for row in written.confirmed if row.get(identity) == mode]
            had = [good for of, one, good in done if (of, one) == (mode, identity)]
            doomed = any(wants)
            broken = {
                "lost": rows and not had,
                "leaked": had and wants and (not rows or doomed),
                "unexpected": had and not wants and not elsewhere,
                "altered": not all(had) or (had and not wants and elsewhere),
                "misplaced": mode != "often"
                and "." in identity
                and any((mode, identity) == (of, one) and at != identity[-1] for of, one, at in places),
                "repeated": mode != "often" and len(had) > 1,
                "contradiction": (told and not rows)
                or ((told or rows) and not wants)
                or max(len(wants), len(rows), len(told)) > 1
                or (rows and doomed),
            }
            for what, is_so in broken.items():
                found[what, mode, identity] += bool(is_so)
    return +found


@pytest.fixture(scope="module")
def light() -> Iterator[Nodes]:
    """Databases in memory."""
    with _opened(lambda name: sa.create_engine("sqlite://", poolclass=sa.StaticPool)) as nodes:
        yield nodes


@settings(max_examples=80, deadline=None)
@given(WRITTEN)
def test_the_check_says_what_a_plain_program_says(light: Nodes, written: Written) -> None:
    light.empty()
    for node, engine in enumerate(light.producers.values()):
        with engine.begin() as connection:
            for identity, (mode, dooms) in written.intended[node].items():
                connection.execute(intended.insert(), {"id": identity, "mode": mode, "dooms": dooms, "at_us": 1})
            for table, rows in ((business, written.business[node]), (confirmed, written.confirmed[node])):
                for identity, mode in rows.items():
                    connection.execute(table.insert(), {"id": identity, "mode": mode, "at_us": 1})
    for node, engine in enumerate(light.consumers.values()):
        with engine.begin() as connection:
            for mode, identity, good in written.effects[node]:
                right = hash_of(body_of(identity) if good else b"other")
                connection.execute(effects.insert(), {"id": identity, "mode": mode, "hash": right, "at_us": 1})
    findings = light.check()
    expected = plainly(written)
    found = Counter(
        (what, mode, one) for what in KINDS for mode in findings.tallies for one in findings.subjects(what, mode)
    )
    assert found == expected
    numbers = Counter((what, mode) for what, mode, _ in expected)
    assert findings.numbers == numbers
    assert findings.ok == (not expected)
