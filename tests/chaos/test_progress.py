"""What is shown while a chaos run goes."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sqlalchemy as sa
from rich.console import Console

from escrowmq_lab.chaos.books import Books, body_of
from escrowmq_lab.chaos.options import Options
from escrowmq_lab.chaos.plan import Blow, Happening
from escrowmq_lab.chaos.progress import LINE_SECONDS, Progress
from escrowmq_lab.databases import open_engine


@dataclass
class Monkey:
    phase: str = "striking"
    round: int = 3
    struck: dict[str, Blow] = field(default_factory=dict)
    happenings: list[Happening] = field(default_factory=list)
    engines: dict[str, sa.Engine] = field(default_factory=dict)


@pytest.fixture
def monkey(tmp_path: Path) -> Monkey:
    engines = {name: open_engine(f"sqlite:///{tmp_path / name}.db") for name in ("producer-1", "consumer-1")}
    for engine in engines.values():
        Books(engine).make()
    return Monkey(engines=engines)


def write(monkey: Monkey, ids: list[str]) -> None:
    books = Books(monkey.engines["producer-1"])
    with monkey.engines["producer-1"].begin() as connection:
        books.enter(connection, "barrier", ids)
    books.confirm("barrier", ids[1:])
    with monkey.engines["consumer-1"].begin() as connection:
        Books(monkey.engines["consumer-1"]).effect(connection, "barrier", [body_of(one) for one in ids[2:]])


def test_a_look_counts_what_stands_in_the_databases_and_how_fast_it_grows(monkey: Monkey) -> None:
    progress = Progress(Options(rounds=7))
    assert progress.look(1000.0) is None
    progress.update(monkey)
    assert "round 3 of 7: 0 placed (0/s)" in progress.look(1000.0).line()  # type: ignore[union-attr]
    write(monkey, [f"a-{n}" for n in range(10)])
    monkey.happenings.append(Happening(2, "broker-1", Blow.KILL, 1, 2))
    monkey.struck = {"producer-1": Blow.KILL, "consumer-1": Blow.FILL}
    look = progress.look(1004.0)
    assert look is not None
    assert look.counts == {"placed": 10, "confirmed": 9, "effects": 8}
    assert look.rates == {"placed": 2.5, "confirmed": 2.25, "effects": 2.0}
    assert look.line().endswith("2 kills, 1 other blows; consumer-1 disk full, producer-1 killed")
    later = progress.look(1011.0)  # of the last seconds only
    assert later is not None
    assert set(later.rates.values()) == {0.0}


def test_a_database_that_cannot_answer_leaves_the_numbers_as_they_were(monkey: Monkey) -> None:
    progress = Progress(Options(rounds=7))
    progress.update(monkey)
    write(monkey, ["a", "b", "c"])
    assert progress.look(1.0).counts["effects"] == 1  # type: ignore[union-attr]
    with monkey.engines["consumer-1"].begin() as connection:
        connection.exec_driver_sql("DROP TABLE chaos_effects")
    look = progress.look(2.0)
    assert look is not None
    assert look.counts == {"placed": 3, "confirmed": 2, "effects": 1}


def test_without_a_terminal_it_is_a_line_now_and_then(monkey: Monkey) -> None:
    out = io.StringIO()
    progress = Progress(Options(rounds=7), Console(file=out, width=40))
    progress.update(monkey)
    for at in range(0, 40):
        look = progress.look(progress._started_at + at / 4)
        assert look is not None
        progress.show(look)
    assert out.getvalue().count("\n") == 9.75 // LINE_SECONDS
    assert out.getvalue().startswith("round 3 of 7: 0 placed")


def test_on_a_terminal_it_is_live_and_leaves_nothing(monkey: Monkey) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    monkey.struck["broker-2"] = Blow.SILENCE
    with Progress(Options(rounds=7), console) as progress:
        progress.update(monkey)
        look = progress.look()
        assert look is not None
        progress.show(look)
        assert "broker-2 in silence" in out.getvalue()
    assert not progress._thread.is_alive()


def test_what_ends_in_an_error_is_no_longer_shown(monkey: Monkey) -> None:
    with pytest.raises(ZeroDivisionError), Progress(Options(rounds=7), Console(file=io.StringIO())) as progress:
        raise ZeroDivisionError
    assert not progress._thread.is_alive()
