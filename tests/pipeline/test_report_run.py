"""The report on a real folder: every number against what was done; the page; an empty log."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pyspark.sql import SparkSession

import escrowmq as mq
from escrowmq.pipeline.report import report
from escrowmq.pipeline.report.measures import Report
from escrowmq.pipeline.report.page import page, write_report

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 plain messages; 20 transactions of 2 messages: 11 committed, 4 rolled back, 5 open; 6 of 11 orders
    acknowledged."""
    made = tmp_path_factory.mktemp("report") / "data"
    with mq.connect(f"file:{made}", transaction_timeout=3600) as bus:  # nobody is asked
        assert bus.producer("plain").send_batch([mq.Message("points", b"x", key=str(n)) for n in range(30)]).ok
        shop = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
        for number in range(20):
            receipt = shop.prepare("orders", b"one", key=f"o-{number}")
            shop.prepare("carts", b"two", key=f"o-{number}", transaction_id=receipt.transaction_id)
            if number < 11:
                shop.commit(receipt.transaction_id)
            elif number < 15:
                shop.rollback(receipt.transaction_id)
        with bus.consumer("cart", ["orders"]) as consumer:
            for number, message in enumerate(consumer.messages(idle_timeout=60)):
                message.ack()
                if number == 5:
                    break
    return made


@pytest.fixture(scope="module")
def measured(spark: SparkSession, folder: Path) -> Report:
    return report(f"file:{folder}", spark=spark)


def test_every_number_is_what_was_done(measured: Report) -> None:
    total = measured.totals
    assert [total[name] for name in ("transactions", "committed", "rolled_back", "expired", "undecided", "asked")] == [
        20,
        11,
        4,
        0,
        5,
        0,
    ]
    assert [(t["topic"], t["messages"], t["committed"]) for t in measured.topics] == [
        ("points", 30, 0),
        ("carts", 11, 11),
        ("orders", 11, 11),
    ]
    assert {name: sum(values) for name, values in measured.volumes.items()} == {"points": 30, "carts": 11, "orders": 11}
    assert sum(measured.begun) == 20
    assert {name: sum(values) for name, values in measured.ended.items()} == {"producer": 15}
    assert {row["state"]: row["transactions"] for row in measured.latencies} == {"committed": 11, "rolled_back": 4}
    assert all(0 <= row["p50_us"] <= row["p95_us"] <= row["p99_us"] <= row["most_us"] for row in measured.latencies)
    assert {state: sum(by.values()) for state, by in measured.latency_steps.items()} == {
        "committed": 11,
        "rolled_back": 4,
    }
    [shop] = [group for group in measured.producers if group["group"] == "shop"]
    assert (shop["open"], shop["parked"]) == (5, 0)
    [cart] = measured.consumers
    assert (cart["lag"], cart["dead"]) == (5, 0)


def test_page_and_json_say_the_same_and_need_nothing_else(measured: Report, tmp_path: Path) -> None:
    write_report(tmp_path / "out", measured)
    told = json.loads((tmp_path / "out" / "report.json").read_text())
    assert told["totals"] == measured.totals
    html = (tmp_path / "out" / "report.html").read_text()
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in html
    for picture in html.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + picture.split("</svg>")[0] + "</svg>")
    for words in ("points", "rolled back", "shop", "cart", "5"):
        assert words in html


def test_again_the_same_report(spark: SparkSession, folder: Path, measured: Report) -> None:
    again = report(f"file:{folder}", spark=spark)
    assert again.to_json() == measured.to_json()


def test_an_empty_log_has_a_page_too(spark: SparkSession, tmp_path: Path) -> None:
    with mq.connect(f"file:{tmp_path / 'data'}"):
        pass
    found = report(f"file:{tmp_path / 'data'}", spark=spark)
    assert (found.totals["transactions"], found.topics, found.latencies) == (0, [], [])
    assert "There is no topic yet" in page(found)


def test_names_cannot_break_the_page() -> None:
    nasty = "<b>&\"'"
    none = dict.fromkeys(("transactions", "committed", "rolled_back", "undecided", "asked", "asked_about"), 1)
    made = Report(
        url=nasty,
        as_of_us=10_000_000,
        start_us=0,
        bucket_us=1_000_000,
        totals={**none, "oldest_us": 1},
        topics=[{"topic": nasty, "messages": 3, "committed": 0, "first_s": 0, "last_s": 9}],
        volumes={nasty: [3] + [0] * 9},
        begun=[1] * 10,
        ended={},
        latencies=[],
        latency_steps={},
        producers=[{"group": nasty, "transactional": True, "open": 1, "parked": 2, "oldest_us": 5, "broker": nasty}],
        consumers=[
            {
                "group": nasty,
                "topics": [nasty],
                "waiting": 1,
                "leased": 1,
                "retrying": 1,
                "lag": 3,
                "dead": 1,
                "broker": "b",
            }
        ],
    )
    assert "<b>&" not in page(made)
