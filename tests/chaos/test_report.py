"""The page of a chaos run: whole, sound, and true to its numbers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest

from escrowmq_lab.chaos.check import Flow
from escrowmq_lab.chaos.findings import KEPT, Findings, Tally
from escrowmq_lab.chaos.modes import MODES
from escrowmq_lab.chaos.options import Options
from escrowmq_lab.chaos.plan import Blow, Happening, draw
from escrowmq_lab.chaos.report import JSON, PAGE, Record, write_report
from escrowmq_lab.chaos.report.page import page, verdict

BEGIN = 1_700_000_000_000_000
VOID = {"meta", "br", "rect", "line", "path", "img"}


def synthetic(rounds: int = 12, seed: int = 0, period: float = 3.0) -> Record:
    """A run as it could have been: its plan is a real one."""
    options = Options(rounds=rounds, period=period, seed=seed)
    chance = Random(seed)
    happenings = [
        Happening(
            one.number,
            strike.node,
            strike.blow,
            at := BEGIN + int(((one.number - 1) * period + strike.after) * 1e6),
            at + int((strike.down + 0.4 * chance.random()) * 1e6),
        )
        for one in draw(options)
        for strike in one.strikes
    ]
    until = max(one.until_us for one in happenings)
    ended = until + 9_000_000
    flow, findings = Flow(), Findings()
    for n, mode in enumerate(options.modes):
        told: dict[int, int] = {}
        done: dict[int, int] = {}
        for second in range(BEGIN // 1_000_000, until // 1_000_000 + 1):
            told[second] = max(0, int(chance.gauss(50, 12) + 14 * math.sin(second / (7 + n))))
            later = second + chance.randrange(3)
            done[later] = done.get(later, 0) + told[second]
        done[until // 1_000_000 + 3] = 90
        flow.confirmed[mode], flow.effects[mode], flow.business[mode] = told, done, dict(told)
        confirmed, effects = sum(told.values()), sum(done.values())
        findings.tallies[mode] = Tally(
            intended=effects + 400,
            doomed=210,
            business=effects,
            confirmed=confirmed,
            effects=effects,
            recovered=effects - confirmed,
            repeats=37 if MODES[mode].repeats else 0,
            waited_us=(48_000 + n * 1000, 4_100_000, 9_700_000),
        )
    return Record(
        options=options,
        begun_us=BEGIN,
        faults_until_us=until,
        ended_us=ended,
        happenings=happenings,
        findings=findings,
        flow=flow,
        promises={name: mode.promise for name, mode in MODES.items()},
        repeats=frozenset(name for name, mode in MODES.items() if mode.repeats),
    )


class Sound(HTMLParser):
    """Every element is closed where it was opened; nothing is fetched, and nothing runs."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "iframe", "object"}
        for name, value in attrs:
            assert name not in {"src", "href"}
            assert not name.startswith("on")
            assert name == "xmlns" or "//" not in (value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)


def read(text: str) -> str:
    """The words of a page, which is sound."""
    parser = Sound()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert not re.search(r"url\(|@import", text)
    return " ".join(" ".join(parser.words).split())


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_a_run_where_all_held(tmp_path: Path) -> None:
    record = synthetic()
    path = write_report(tmp_path / "made", record)
    assert path == tmp_path / "made" / PAGE
    words = read(path.read_text())
    assert f"Each of {record.total('business'):,} messages" in words
    assert "groups: at least once" in words
    assert "What was broken" not in words
    for name in MODES:
        assert name in words
        assert MODES[name].promise in words
    assert record.command in words
    numbers = json.loads((tmp_path / "made" / JSON).read_text())
    assert numbers["ok"]
    assert numbers["kills"] + numbers["other_blows"] == len(record.happenings) == len(numbers["happenings"])
    assert sum(numbers["rounds_by_nodes_struck"].values()) == record.options.rounds
    assert set(numbers["rounds_by_nodes_struck"]) == {str(n) for n in range(1, 11)}


def test_the_picture_has_every_blow_in_the_lane_of_its_node() -> None:
    record = synthetic(rounds=30)
    drawn = svgs(page(record))[0]
    shapes = [group for group in drawn.findall(".//{*}g") if group.find("{*}title") is not None]
    told = [group.find("{*}title").text or "" for group in shapes]  # type: ignore[union-attr]
    assert len(told) == len(record.happenings)
    lanes: dict[str, set[float]] = {}
    for group, words in zip(shapes, told, strict=True):
        box = group.find("{*}rect")
        assert box is not None
        middle = float(box.attrib["y"]) + float(box.attrib["height"]) / 2
        lanes.setdefault(words.split(":")[1].split()[0], set()).add(middle)
        assert 92 <= float(box.attrib["x"]) <= 944
    assert set(lanes) == set(record.options.nodes)
    assert all(max(of) - min(of) < 10 for of in lanes.values())


def test_what_was_broken_is_told_with_ids_and_counted_in_full() -> None:
    record = synthetic()
    for n in range(KEPT + 7):
        record.findings.add("lost", "barrier", f"barrier.producer-1.x.{n}", "producer-1: business <b>&</b>")
    record.findings.add("failed", "", "broker-2", "it ended by itself")
    text = page(record)
    words = read(text)
    assert "<b>&</b>" not in text
    assert "producer-1: business <b>&</b>" in words
    assert verdict(record).startswith(f"Promises were broken: 1 failed, {KEPT + 7} lost; ")
    assert "7 more are counted" in words
    assert f"{KEPT + 7} lost" in words
    assert "barrier.producer-1.x.0" in words
    assert not json.loads(json.dumps(record.to_json()))["ok"]


def test_a_run_in_which_nothing_was_placed_shows_nothing_and_says_so() -> None:
    empty = replace(synthetic(), findings=Findings(), flow=Flow(), happenings=[])
    assert "nothing shown" in verdict(empty)
    read(page(empty))


def test_a_password_is_shown_nowhere() -> None:
    record = synthetic()
    options = replace(record.options, database_url="postgresql+psycopg://me:secret@127.0.0.1/books")
    record = replace(record, options=options)
    assert "secret" not in page(record) + json.dumps(record.to_json())
    assert "postgresql" in page(record)


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (Options(seed=7), "escrowmq-lab chaos --rounds 100 --period 3 --seed 7"),
        (
            Options(rounds=10, period=1.5, down=0.25, modes=("barrier",), consumers=2),
            "escrowmq-lab chaos --rounds 10 --period 1.5 --down 0.25 --seed 0 --consumers 2 --modes barrier",
        ),
    ],
)
def test_the_command_that_runs_it_again(options: Options, command: str) -> None:
    assert replace(synthetic(), options=options).command == command


def test_nodes_that_were_down_at_the_same_moment() -> None:
    blows = [("broker-1", 0, 10), ("broker-2", 5, 15), ("producer-1", 10, 20), ("consumer-1", 30, 30)]
    happenings = [Happening(1, node, Blow.KILL, BEGIN + at, BEGIN + until) for node, at, until in blows]
    record = replace(synthetic(), happenings=happenings)
    assert record.most_at_once == 2
    assert record.struck == {4: 1}
    assert record.kills == 4


def test_rates_are_of_the_time_of_faults() -> None:
    record = replace(synthetic(), begun_us=BEGIN, faults_until_us=BEGIN + 10_000_000, ended_us=BEGIN + 60_000_000)
    second = BEGIN // 1_000_000
    record.flow.confirmed = {"barrier": {second: 300, second + 9: 100, second + 30: 10_000}}
    assert record.rate("confirmed") == 40.0
