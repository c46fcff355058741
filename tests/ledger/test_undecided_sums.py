"""Sums of what is undecided, and the oldest of each group, against what the listing has, while all of it changes; in
looks of any size.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from undecided_sums import undecided

from escrowmq.ledger import listings
from escrowmq.ledger.commands import Park, Recheck
from escrowmq.ledger.transactions import oldest
from escrowmq.model import COMMIT, DecidedBy
from escrowmq.schemas import ID
from escrowmq.testing.ledgers import LedgerDriver

GROUPS = ("one", "two", "three")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("prepare"), st.integers(0, 2), st.integers(1, 4)),
        st.tuples(st.sampled_from(["end", "park", "reopen"]), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("ask"), st.integers(0, 2), st.integers(1, 3)),
        st.tuples(st.just("wait"), st.integers(1, 40), st.just(0)),
        st.tuples(st.just("look"), st.just(0), st.just(0)),
    ),
    max_size=15,
)


@pytest.fixture(autouse=True)
def small_looks(monkeypatch):
    monkeypatch.setattr(listings, "SPAN", 2)
    monkeypatch.setattr(listings, "LOOKED", 3)
    monkeypatch.setattr(oldest, "CHUNK", 2)


def listed(driver: LedgerDriver, **wanted: Any) -> list[dict[str, Any]]:
    return listings.transactions(driver.ledger, now_us=driver.now_us, limit=1000, **wanted)


def checked(driver: LedgerDriver) -> None:
    expected: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cause in ("not_due", "due", "unanswered", "asked_out", "aged"):
        for row in listed(driver, cause=cause, state="undecided"):
            expected.setdefault((row["group"], cause), []).append(row)
    told = undecided(driver.ledger, None, -1, 10, 2, driver.now_us)
    found = {(line["group"], cause.pop("cause")): cause for line in told for cause in line["causes"]}
    assert found == {
        key: {
            "state": rows[0]["state"],
            "count": len(rows),
            "oldest_us": rows[0]["prepared_us"],
            "newest_us": rows[-1]["prepared_us"],
            "checks": [min(row["checks"] for row in rows), max(row["checks"] for row in rows)],
            "samples": rows[:2],
        }
        for key, rows in expected.items()
    }
    for group in listings.producers_list(driver.ledger):
        rows = listed(driver, state="open", group=group["group"])
        assert (group["open"], group["oldest_us"]) == (len(rows), rows[0]["prepared_us"] if rows else None)


@settings(max_examples=60)
@given(STEPS)
def test_sums_and_the_oldest_are_what_the_listing_has(steps):
    driver = LedgerDriver(strict=False)
    sessions = [driver.session(group) for group in GROUPS]
    prepared: list[dict[str, Any]] = []
    for name, which, count in steps:
        chosen = prepared[which % len(prepared)] if prepared else None
        if name == "prepare":
            prepared += driver.prepare(sessions[which], *[{}] * count)
        elif name == "ask":
            driver.ask(GROUPS[which], count)
        elif name == "wait":
            driver.advance(which)
            driver.tick()
        elif name == "look":
            listings.producers_list(driver.ledger)
        elif chosen is not None and name == "end":
            driver.end(0, (chosen["transaction"], COMMIT), by=DecidedBy.OPERATOR)
        elif chosen is not None and name == "park":
            driver.do(Park(chosen["position"]))
        elif chosen is not None:
            driver.do(Recheck(pa.array([chosen["transaction"]], ID)))
        driver.advance(1)
    checked(driver)
    checked(driver)  # once more, with what was remembered


def test_a_sum_ends_though_producers_go_on(driver):
    session = driver.session("one")
    driver.prepare(session, *[{}] * 5)
    found, looks = listings.Waiting(driver.ledger, None, -1, 10, 1, driver.now_us), 1
    while found.look(driver.ledger):
        driver.prepare(session, *[{}] * 5)
        looks += 1
    assert looks == 3
    assert [cause["count"] for line in found.to_json() for cause in line["causes"]] == [5]
