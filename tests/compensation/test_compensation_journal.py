"""The journal and the cases on each kind of database."""

from __future__ import annotations

import threading
import uuid

import pytest
import sqlalchemy as sa

import escrowmq as mq
from escrowmq.compensation import CaseState, Journal, count_cases, list_cases, purge_cases, retry_cases, settle_cases
from escrowmq.compensation.cases import Cases
from escrowmq.outbox import claim_batch_tx, migrate


@pytest.mark.invariant("I48")
def test_journal_and_cases(engine: sa.Engine, monkeypatch) -> None:
    migrate(engine)
    journal = Journal(engine, "cart")
    assert journal.read() is None
    seen = journal.begin("one")
    assert (seen.version, seen.epoch, seen.settled_us, seen.suspended) == (1, "one", 0, False)
    assert journal.begin("two") == seen
    assert journal.raise_settled(seen, 17)
    assert not journal.raise_settled(seen, 18)  # it has changed since
    started = Journal(engine, "other").begin(None, "down")
    assert (started.epoch, started.suspended, started.reason) == (None, True, "down")
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(journal.suspend("down"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, False, False, True]
    suspended = journal.read()
    assert suspended is not None
    assert (suspended.settled_us, suspended.suspended) == (17, True)
    assert [journal.resume(suspended, "two"), journal.resume(suspended, "three")] == [True, False]
    # marks, in pages that begin in the middle of a moment
    monkeypatch.setattr("escrowmq.compensation.journal.MARKS_PAGE", 3)
    ids = [uuid.uuid4().bytes for _ in range(10)]
    for part in (ids[:4], ids[4:]):
        with engine.begin() as connection:
            claim_batch_tx(connection, part, "cart")
            claim_batch_tx(connection, [uuid.uuid4().bytes], "other")
    assert sorted(one for page in journal.marks("cart", 0) for one in page) == sorted(ids)
    assert list(journal.marks("cart", journal.now_us() + 10**9)) == []
    # cases
    cases = Cases(engine, "cart", 2)
    first, second, third = sorted(ids[:3])
    assert cases.record_failures({first: "why", second: "why"}) == set()
    assert cases.record_failures({first: "again"}) == {first}
    cases.record_conflicts({third: "x" * 1000})
    assert [(case.message_id, case.state, case.reason[:5]) for case in list_cases(engine)] == [
        (first, CaseState.STUCK, "again"),
        (third, CaseState.CONFLICT, "xxxxx"),
    ]
    page = list_cases(engine, "cart", states=None, limit=2)
    assert [case.message_id for case in page] == [first, second]
    assert [case.message_id for case in list_cases(engine, "cart", states=None, after=page[-1])] == [third]
    assert list_cases(engine, "other", states=None) == []
    done = retry_cases(engine, "cart", [first, second.hex(), ids[9]], by="ann")
    assert [one.code for one in done] == [mq.Code.OK, mq.Code.CONFLICT, mq.Code.NOT_FOUND]
    assert cases.find_to_retry(10) == [first]
    assert cases.find_settled([first, third]) == set()
    assert [one.code for one in settle_cases(engine, "cart", [third], by="ann")] == [mq.Code.OK]
    assert cases.find_settled([first, third]) == {third}
    assert cases.record_failures({third: "again"}) == {third}
    cases.record_done([first, second, third])
    assert {case.message_id: case.state for case in list_cases(engine, "cart", states=None)} == {
        first: CaseState.DONE,
        third: CaseState.SETTLED,
    }
    assert count_cases(engine)[CaseState.DONE] == 1
    assert purge_cases(engine, 3600.0) == 0
    assert purge_cases(engine, 0.0, "cart") == 2
