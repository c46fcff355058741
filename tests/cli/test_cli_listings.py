"""Every listing on a terminal of 80 columns, with long names: no line is longer, and no name or id is broken."""

from __future__ import annotations

import re

import pytest
from cli_runs import Run

import escrowmq as mq

REST = "-of-the-northern-region-with-along-name"
TOPIC, GROUP, SHOP = (f"{word}{REST}"[:40] for word in ("orders", "cart", "shop"))
ID = "5512d6ce8039354f0000000000000001"
LISTINGS: list[tuple[str, tuple[str, ...]]] = [
    ("topics list", (TOPIC,)),
    ("groups list", (GROUP, TOPIC)),
    ("groups list --producers", (SHOP,)),
    (f"groups show {GROUP}", (GROUP, TOPIC)),
    (f"groups members {GROUP}", ()),
    ("transactions list", (SHOP,)),
    ("transactions summary", (SHOP,)),
    (f"dead-letters list {GROUP}", (TOPIC, ID)),
    (f"dead-letters summary {GROUP}", ()),
    ("acts list", (GROUP,)),
    ("status", (GROUP, TOPIC, SHOP)),
    (f"lookup {ID}", (ID, TOPIC)),
    (f"find {ID}", (ID,)),
    ("writers list", ()),
]


@pytest.fixture
def filled(url: str) -> None:
    with mq.connect(url) as bus:
        shop = bus.producer(SHOP, unasked=True)
        shop.send(TOPIC, b"1", key=ID)
        shop.transaction().send(TOPIC, b"2", key=ID)
        with bus.consumer(GROUP, [TOPIC], max_attempts=1) as consumer:
            for message in consumer:
                message.nack(cause=f"KeyError: no row of {ID} in the table of the orders of the northern region")
                break
        bus.admin.pause_group(GROUP, why="the table of the orders of the northern region is away")


@pytest.mark.usefixtures("filled")
def test_each_listing_fits_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    for words, names in LISTINGS:
        ran = run(*words.split())
        assert ran.code in (0, 1), (words, ran)  # 1: status, if something needs an operator
        shown = re.sub(r"\x1b\[[0-9;]*m", "", ran.out)
        assert not [name for name in names if name not in shown], (words, shown)
        assert not [line for line in shown.splitlines() if len(line.rstrip()) > 80], (words, shown)
