"""Runs that are killed at any step, answers that are lost, people who settle rows meanwhile: each row is done once, and
its result is true.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import escrowmq as mq
from escrowmq.errors import Code, error
from escrowmq.plans import Outcome, Plans, Ramp, folder, frozen
from escrowmq.plans.ramp import Pace, StopAfter
from escrowmq.platform.failpoints import Failpoint, arm, reach

PLACES = (3, 5)


class Killed(BaseException):
    """What a kill is here."""


def kill() -> None:
    raise Killed


@dataclass
class World:
    """Rows of two brokers, with their record of acts."""

    sizes: tuple[int, int]
    done: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """Who settled a row: the token of a plan's act, or "somebody"."""
    record: list[dict[str, Any]] = field(default_factory=list)
    lose: int = 0
    """Answers that get lost from now on, after the act."""
    refuse: int = 0

    act = "dead_letters.retry"
    schema = pa.schema([("place", pa.int64()), ("number", pa.int64()), ("text", pa.string())])
    identity: Sequence[str] = ("place", "number")
    counted: Sequence[str] = ("text",)
    most = 1000
    settings: Mapping[str, Any] = field(default_factory=lambda: {"group": "cart"})
    source = "the world"

    def missing(self) -> list[Any]:
        return []

    def pages(self) -> Iterator[pa.RecordBatch]:
        for place, size in zip(PLACES, self.sizes, strict=True):
            for first in range(0, size, 3):
                numbers = range(first, min(first + 3, size))
                rows = [{"place": place, "number": number, "text": f"n{number % 4}"} for number in numbers]
                yield pa.RecordBatch.from_pylist(rows, self.schema)

    def not_found(self) -> list[str]:
        return []

    def preview(self, rows: pa.RecordBatch) -> Any:
        settled = [row in self.done for row in keys(rows)]
        return np.where(settled, Outcome.ALREADY, Outcome.DONE).astype(np.uint8)

    def mark(self) -> dict[str, int]:
        return {"3": len(self.record)}

    def do(self, rows: pa.RecordBatch, why: str) -> Any:
        if self.refuse:
            self.refuse -= 1
            raise error(Code.BAD_REQUEST)
        act: dict[str, Any] = {"why": why, "rows": keys(rows), "ended": None}
        self.record.append(act)
        reach("world.recorded")
        outcomes = self.preview(rows)
        for row, outcome in zip(act["rows"], outcomes, strict=True):
            if outcome == Outcome.DONE:
                self.done.setdefault(row, []).append(why)
        reach("world.applied")
        act["ended"] = outcomes
        if self.lose:
            self.lose -= 1
            raise error(Code.DISCONNECTED)
        return outcomes

    def restart(self) -> None:
        """What a broker finds at its start of acts that its end interrupted."""
        for act in self.record:
            if act["ended"] is None:
                ours = [act["why"] in self.done.get(row, []) for row in act["rows"]]
                act["ended"] = np.where(ours, Outcome.DONE, Outcome.NONE).astype(np.uint8)

    def find_outcomes(self, rows: pa.RecordBatch, token: str, marks: Mapping[str, int]) -> Any:
        found = np.zeros(rows.num_rows, np.uint8)
        at = {row: number for number, row in enumerate(keys(rows))}
        for act in self.record[marks["3"] :]:
            if act["why"].startswith(token):
                for row, outcome in zip(act["rows"], act["ended"], strict=True):
                    if row in at and found[at[row]] != Outcome.DONE:
                        found[at[row]] = outcome
        return found

    def count_failed_again(self, rows: pa.RecordBatch) -> int:
        return 0


def keys(rows: pa.RecordBatch) -> list[tuple[int, int]]:
    return list(zip(rows.column("place").to_pylist(), rows.column("number").to_pylist(), strict=True))


POINTS = ("plans.begun", "world.recorded", "world.applied", "plans.answered", "plans.results-written", "plans.done")
FATES = st.tuples(
    st.sampled_from(POINTS),
    st.integers(1, 5),
    st.integers(0, 2),  # answers lost
    st.integers(0, 1),  # refusals
    st.binary(max_size=20),  # what a write under way left in the journal
    st.lists(st.integers(0, 60), max_size=3),  # rows that somebody settles then
)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(frozen, "BATCH_ROWS", 7)
    yield
    arm()


@pytest.mark.invariant("I44")
@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 25), st.integers(0, 10)),
    fates=st.lists(FATES, max_size=6),
    batch=st.integers(1, 7),
    shares=st.lists(st.sampled_from([1.0, 2.0, 10.0, 50.0]), unique=True).map(lambda found: (*sorted(found), 100.0)),
)
@example(sizes=(20, 5), fates=[("world.applied", 1, 0, 0, b"", [3])], batch=7, shares=(100.0,))
@example(sizes=(20, 5), fates=[("plans.answered", 2, 1, 0, b"0", [0])], batch=3, shares=(10.0, 100.0))
@example(sizes=(1, 0), fates=[("plans.done", 1, 0, 0, b"", [])], batch=1, shares=(100.0,))
@example(sizes=(5, 0), fates=[("plans.begun", 1, 0, 0, b"00000000 {}", [])], batch=7, shares=(100.0,))
def test_killed_anywhere_each_row_is_done_once_and_its_result_is_true(
    sizes: tuple[int, int], fates: list[Any], batch: int, shares: tuple[float, ...]
) -> None:
    world, opened = World(sizes), folder.open_subject
    folder.open_subject = lambda where, act, selection, patient=True: world  # type: ignore[assignment, return-value]
    try:
        with tempfile.TemporaryDirectory() as name:
            plans = Plans(name)
            plan = plans.make(None, world.act, {})  # type: ignore[arg-type]
            assert sum(sizes) == plan.rows
            for point, count, world.lose, world.refuse, torn, settled in fates:
                arm(Failpoint(point, count, kill))
                with suppress(Killed):
                    plans.run(plan.id, None, ramp=Ramp(shares, 0.0), batch=batch, patience=0.0)  # type: ignore[arg-type]
                arm()
                world.restart()
                with (Path(name) / plan.id / "progress.journal").open("ab") as journal:
                    journal.write(torn.replace(b"\n", b""))
                rows = plans.rows(plan.id, 0, 1000)
                for number in settled:
                    if number < len(rows):
                        world.done.setdefault((rows[number]["place"], rows[number]["number"]), ["somebody"])
            world.lose = world.refuse = 0
            report = plans.run(plan.id, None, ramp=Ramp(shares, 0.0), batch=batch)  # type: ignore[arg-type]
            assert (report.state, report.next) == ("finished", sum(sizes))
            rows = plans.rows(plan.id, 0, 1000)
            assert [row["row"] for row in rows] == list(range(sum(sizes)))
            truth = {}
            for row in rows:
                (by,) = world.done[row["place"], row["number"]]
                truth[row["row"]] = "already" if by == "somebody" else "done"
            assert {row["row"]: row["outcome"] for row in rows} == truth
            found = plans.get(plan.id)
            assert (found.state, found.in_doubt) == ("finished", 0)
            assert found.outcomes == {one: n for one in ("done", "already") if (n := list(truth.values()).count(one))}
    finally:
        folder.open_subject = opened


@given(
    rows=st.integers(1, 10_000_000),
    shares=st.lists(st.floats(0.0001, 99.9), unique=True, max_size=8).map(lambda found: (*sorted(found), 100.0)),
)
def test_the_steps_of_a_ramp_rise_to_the_whole_set(rows: int, shares: tuple[float, ...]) -> None:
    ends = Ramp(shares).ends(rows)
    assert ends == sorted(set(ends))
    assert (ends[-1], ends[0] >= 1) == (rows, True)
    for end in ends[:-1]:
        assert any(end - 1 < rows * share / 100 <= end for share in shares)


@pytest.mark.parametrize("text", ["", "5,1,100", "0,100", "1,10", "1,x,100", "50,50,100", "nan,100", "101"])
def test_what_is_no_ramp(text: str) -> None:
    with pytest.raises(mq.Misuse):
        Ramp.parse(text)


@pytest.mark.parametrize("text", ["0", "-1", "101%", "x", "%", "nan%"])
def test_what_is_no_number_of_failures(text: str) -> None:
    with pytest.raises(mq.Misuse):
        StopAfter.parse(text)


@given(rate=st.floats(0.5, 5000.0), took=st.lists(st.floats(0.0, 0.5), min_size=5, max_size=30))
def test_a_rate_is_kept_over_any_batches(rate: float, took: list[float]) -> None:
    clock = [0.0]

    def wait(seconds: float) -> bool:
        clock[0] += seconds
        return False

    pace, rows = Pace(rate, wait, lambda: clock[0]), 0
    for seconds in took:
        most = pace.most(1000)
        assert 1 <= most <= max(rate, 1)
        clock[0] += seconds
        rows += most
        assert not pace.wait_for(most)
        assert rows <= rate * (clock[0] + 1.0) + 1e-6
