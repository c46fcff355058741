"""The report page and its charts."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.pipeline.audit.events import Events
from escrowmq.pipeline.audit.page import BUCKETS, Pictures, page, write_page
from escrowmq.pipeline.audit.verdict import Differing, Finding, Pair, Side, Verdict
from escrowmq.pipeline.pages import svg

CLEAN = Verdict(
    ids=2000,
    transactions=2048,
    committed=1690,
    rolled_back=358,
    consumed=1690,
    lost=0,
    repeated=0,
    altered=0,
    leaked=0,
    orphaned=0,
    kills=3,
    checks=57,
    consumers={"cart": 1690, "points": 1690},
    comparisons=(Side("orders.db orders", "topic orders", 1690, 1690, 1690, 0),),
    findings=(),
    findings_in_all=0,
)
START = 1_700_000_000_000_000
EVENTS = Events(
    (
        {"at_us": START + 4_000_000, "event": "killed", "who": "shop", "where": "between <this> & that"},
        {"at_us": START + 9_000_000, "event": "killed", "who": "broker", "where": "in the midst"},
        {"at_us": START + 6_000_000, "event": "asked", "who": "shop", "answer": "commit"},
        {"at_us": START + 6_100_000, "event": "asked", "who": "shop", "answer": "rollback"},
        {"at_us": START + 5_000_000, "event": "progress", "who": "cart", "number": 300},
        {"at_us": START + 15_000_000, "event": "progress", "who": "cart", "number": 1690},
    )
)
PICTURES = Pictures(
    START,
    100_000,
    {
        "prepared": [13] * BUCKETS,
        "committed": [0, 0] + [11] * (BUCKETS - 2),
        "rolled_back": [0, 0] + [2] * (BUCKETS - 2),
    },
    {
        "producer": {n: int(900 * math.exp(-((n - 28) ** 2) / 9)) for n in range(24, 36)},
        "check": {50: 12, 51: 30, 53: 3},
    },
)


def charts(text: str) -> list[ElementTree.Element]:
    """Every chart of a page, parsed: it must be well-formed XML."""
    return [ElementTree.fromstring(part.split("</svg>")[0].join(["<svg", "</svg>"])) for part in text.split("<svg")[1:]]


def test_a_clean_run_says_so_and_shows_five_pictures() -> None:
    text = page(CLEAN, PICTURES, EVENTS)
    assert "All sides agree" in text
    assert [c.get("aria-label") for c in charts(text)] == [
        "Flow per minute",
        "Transactions over time",
        "In escrow",
        "Check-backs",
        "Latency of decisions",
    ]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page(CLEAN, PICTURES, EVENTS)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in text
    assert "<link" not in text


def test_kills_are_marked_and_what_was_written_is_escaped() -> None:
    text = page(CLEAN, PICTURES, EVENTS)
    assert "broker killed at 9.0 s" in text
    assert "between &lt;this&gt; &amp; that" in text


def test_who_led_is_told_of_brokers_that_share_a_log() -> None:
    assert "Changes of leader" not in page(CLEAN, PICTURES, EVENTS)
    more = (
        {"at_us": START - 1_000_000, "event": "leads", "who": "broker-<a>", "epoch": 1},
        {"at_us": START + 2_000_000, "event": "killed", "who": "broker-<a>", "where": "while it led"},
        {"at_us": START + 4_500_000, "event": "leads", "who": "broker-b", "epoch": 2, "seconds": 2.5},
        {"at_us": START + 4_750_000, "event": "answered", "who": "broker-b", "seconds": 2.75},
    )
    text = page(CLEAN, PICTURES, Events((*EVENTS.every, *more)))
    rows = re.findall(r"<tr>(.*?)</tr>", text.split("Changes of leader")[1])
    cells = [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<td.*?</td>", row)] for row in rows[-2:]]
    assert cells == [["0.0 s", "broker-&lt;a&gt;", "1", "", ""], ["4.5 s", "broker-b", "2", "2.50 s", "2.75 s"]]
    assert (
        re.search('fill="#[0-9a-f]+"', text.split("broker-&lt;a&gt; killed")[1])[0]
        == re.search('fill="#[0-9a-f]+"', text.split("broker killed at 9.0 s")[1])[0]
    )  # a broker's colour, whatever its name


def test_findings_are_named() -> None:
    wrong = (Finding("altered", "536365<", "orders.db orders → topic orders", 1, 1),)
    text = page(replace(CLEAN, altered=1, findings=wrong, findings_in_all=1), PICTURES, EVENTS)
    assert "The sides disagree" in text
    assert "536365&lt;" in text


def test_an_empty_run_is_still_a_page(tmp_path: Path) -> None:
    path = write_page(tmp_path, replace(CLEAN, ids=0, comparisons=()), Pictures(0, 1, {}, {}), Events())
    assert path.read_text().startswith("<!doctype html>")


@given(st.floats(0, 1e12), st.integers(2, 10))
def test_ticks_are_few_and_reach_the_top(top: float, about: int) -> None:
    ticks = svg.nice_ticks(top, about)
    assert ticks[0] == 0
    assert ticks[-1] >= top * (1 - 1e-9)
    assert 2 <= len(ticks) <= about + 2


@pytest.mark.parametrize("top", [0, 1, 3, 999, 25_000])
def test_every_bar_lies_within_the_plot(top: int) -> None:
    series = [svg.Series("a", "#000", [top, 0, 1]), svg.Series("b", "#111", [0, 1, top])]
    chart = ElementTree.fromstring(svg.bars("bars", [0, 1, 2, 3], series, scale=math.sqrt))
    for bar in chart.iter("{http://www.w3.org/2000/svg}rect"):
        if bar.find("{http://www.w3.org/2000/svg}title") is not None:
            y, height = float(bar.attrib["y"]), float(bar.attrib["height"])
            assert y >= svg.TOP - 1
            assert y + height <= svg.HEIGHT - svg.BOTTOM + 1


@given(st.lists(st.floats(0, 20), min_size=1, max_size=8), st.sampled_from(["5 s", "23:25:40", "21 Nov 23:25"]))
def test_no_tick_is_cut_off_at_the_right_edge(places: list[float], text: str) -> None:
    series = [svg.Series("a", "#000", [0.0, 1.0])]
    chart = svg.lines("lines", [0.0, 20.0], series, x_ticks=[(place, text) for place in places])
    shown = [one for one in ElementTree.fromstring(chart).iter("{http://www.w3.org/2000/svg}text") if one.text == text]
    assert len(shown) == len(places)
    for one in shown:
        width = len(text) * svg.LETTER
        assert (
            float(one.get("x", "")) + {"middle": width / 2, "end": 0.0}[one.get("text-anchor", "")] <= svg.WIDTH + 0.05
        )


SVG = "{http://www.w3.org/2000/svg}"


def test_a_legend_that_does_not_fit_goes_on_in_the_next_line() -> None:
    names = [f"a series with a rather long name, number {n}" for n in range(9)]
    chart = ElementTree.fromstring(svg.lines("lines", [0.0, 1.0], [svg.Series(n, "#000", [0.0, 1.0]) for n in names]))
    entries = [one for one in chart.iter(f"{SVG}text") if one.get("class") == "legend"]
    assert [one.text for one in entries] == names
    places = [(float(one.attrib["y"]), float(one.attrib["x"]), one.text or "") for one in entries]
    for (y, x, text), (next_y, next_x, _) in itertools.pairwise(places):
        assert x + svg.LETTER * len(text) <= svg.WIDTH
        assert next_y > y or next_x >= x + svg.LETTER * len(text) + 12  # the square of the next one
    moved = chart.find(f"{SVG}g")
    assert moved is not None
    down = float(moved.attrib["transform"].split()[1].rstrip(")"))
    assert places[-1][0] <= down + svg.TOP  # the plot begins below the last line
    assert float(chart.attrib["viewBox"].split()[3]) == svg.HEIGHT + down


def test_no_line_leaves_the_plot() -> None:
    """A series with moments of its own may go on after the last of the others; a mark may come before the first."""
    longer = svg.Series("applied", "#000", [0.0, 5.0, 9.0], x=[0.0, 30.0, 90.0])
    mark = svg.Mark(-5.0, "killed", "#f00", "kills")
    chart = ElementTree.fromstring(
        svg.lines("lines", [0.0, 10.0], [svg.Series("all", "#111", [0.0, 9.0]), longer], marks=[mark])
    )
    for path in chart.iter(f"{SVG}path"):
        if path.get("stroke-width") == "2":
            for point in path.attrib["d"].removeprefix("M").split(" L"):
                x, y = map(float, point.split(","))
                assert svg.LEFT <= x <= svg.WIDTH - svg.RIGHT
                assert svg.TOP <= y <= svg.HEIGHT - svg.BOTTOM
    ends = [line for line in chart.iter(f"{SVG}line") if line.get("stroke") == "#f00"]
    assert [float(line.attrib["x1"]) for line in ends] == [svg.LEFT]


def test_a_page_says_when_and_by_which_command_it_was_made(tmp_path: Path) -> None:
    text = write_page(tmp_path, CLEAN, PICTURES, EVENTS).read_text()
    assert f"<code>escrowmq audit {tmp_path}</code>" in text
    assert re.search(r"made 20\d\d-\d\d-\d\d \d\d:\d\d UTC", text)
    assert re.search(r"EscrowMQ \d\S*, Spark \d\S*, Python \d", text)


def test_a_page_shows_differences_over_time_pending_work_and_the_sample() -> None:
    wrong = replace(
        CLEAN,
        altered=7,
        leaked=2,
        sample="1%",
        differing=(Differing("a → b", "price<", 7, 7, (Pair("o-1", "5", None), Pair("o-2", "<b>", "6"))),),
    )
    found = replace(PICTURES, pending={"open": 3, "parked": 1}, differences={"altered": [7] + [0] * (BUCKETS - 1)})
    text = page(wrong, found, EVENTS)
    assert "Differences over time" in [chart.get("aria-label") for chart in charts(text)]
    assert "2 without a half message are not shown" in text
    assert "A sample: 1% of the ids" in text
    assert re.search(r"<b>1</b><span>checks exhausted", text)
    rows = re.findall(r"<tr>(.*?)</tr>", text.split("Columns that differ most")[1])
    cells = [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<td.*?</td>", row)] for row in rows[:3]]
    assert cells[1:] == [["a → b", "price&lt;", "7 of 7", "o-1", "5", "NULL"], ["", "", "", "o-2", "&lt;b&gt;", "6"]]


@pytest.mark.parametrize(
    ("bucket_us", "unit"), [(1_000, "s"), (1_000_000, "s"), (10_000_000, "min"), (200_000_000, "h"), (10**11, "d")]
)
def test_times_have_the_unit_of_their_span(bucket_us: int, unit: str) -> None:
    chart = charts(page(CLEAN, replace(PICTURES, bucket_us=bucket_us), Events()))[0]
    ticks = [text for one in chart.iter(f"{SVG}text") if one.get("class") == "tick" and " " in (text := one.text or "")]
    assert len(ticks) >= 3
    assert {text.split()[1] for text in ticks} == {unit}


def test_a_page_is_one_file_with_a_dark_mode_and_a_width_for_phones() -> None:
    text = page(CLEAN, PICTURES, EVENTS)
    assert "prefers-color-scheme: dark" in text
    assert "max-width: 640px" in text
    assert not re.search(r"(src|href)=|url\(|@import", text)
