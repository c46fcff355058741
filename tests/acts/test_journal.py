"""The journal on a disk that crashes, fills up and fails: what was done is recorded, and what is not recorded was not
done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

import escrowmq.acts.journal
from escrowmq.acts.journal import LAST, NAME, Journal
from escrowmq.errors import Code, EscrowError, Overloaded, Unknown, error
from escrowmq.testing.disks import MODES, FaultDisk, MemoryDisk, SimulatedCrash

SHARD = 3


def clock() -> Callable[[], int]:
    numbers = itertools.count(1000)
    return lambda: next(numbers)


def do(journal: Journal, done: list[str], *names: str) -> None:
    """Acts; ``done`` is what was really done."""
    now = clock()
    for name in names:
        with journal.act("settle", {"ids": [name] * 60}, now, "anna@shop", f"because of {name}") as act:
            done.append(name)
            act.ended = {"results": {"OK": 1}}


def recorded(journal: Journal) -> list[str]:
    return [one.begun.what["ids"][0] for one in journal.listed()]


def test_an_act_is_recorded_before_it_is_done_and_its_end_after() -> None:
    disk = MemoryDisk()
    journal = Journal(disk, SHARD)
    with journal.act("settle", {"ids": ["a"]}, lambda: 5, "anna@shop", "so") as act:
        (one,) = Journal(disk, SHARD).listed()
        assert (one.begun.act, one.begun.by, one.begun.why, one.ended) == ("settle", "anna@shop", "so", None)
        act.ended = {"results": {"OK": 1}}
    (one,) = journal.listed()
    assert one.ended is not None
    assert one.ended.ended == {"results": {"OK": 1}}
    assert journal.verify()[::2] == (2, [])


def test_nothing_is_written_where_nobody_acts() -> None:
    disk = MemoryDisk()
    journal = Journal(disk, SHARD)
    assert (journal.listed(), journal.verify()[0], journal.resolve(lambda record: {}, 0), disk.list()) == ([], 0, 0, [])


def test_a_refused_act_says_so_and_other_errors_too() -> None:
    journal = Journal(MemoryDisk(), SHARD)
    with pytest.raises(EscrowError), journal.act("settle", {}, lambda: 1):
        raise error(Code.NOT_FOUND, "nothing there")
    (one,) = journal.listed()
    assert one.ended is not None
    assert one.ended.ended == {"refused": "NOT_FOUND"}


def test_acts_come_by_pages_and_the_newest_alone() -> None:
    journal = Journal(MemoryDisk(), SHARD)
    names = [f"n{number}" for number in range(7)]
    do(journal, [], *names)
    first = journal.listed(limit=3)
    assert [one.begun.number for one in first] == [1, 3, 5]
    assert [one.begun.what["ids"][0] for one in journal.listed(first[-1].begun.number, 2)] == ["n3", "n4"]
    assert [one.begun.what["ids"][0] for one in journal.listed(limit=2, newest=True)] == ["n5", "n6"]
    again = Journal(journal._disk, SHARD)
    assert recorded(again) == names


def test_a_page_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(escrowmq.acts.journal, "PAGE_BYTES", 2500)
    journal = Journal(MemoryDisk(), SHARD)
    names = [f"n{number}" for number in range(7)]
    do(journal, [], *names)
    found, pages = list[str](), 0
    after = 0
    while page := journal.listed(after):
        assert 1 <= len(page) < 7
        found += [one.begun.what["ids"][0] for one in page]
        after, pages = page[-1].begun.number, pages + 1
        assert journal.has_after(after) == (len(found) < 7)
    assert found == names
    assert pages > 1
    newest = [one.begun.what["ids"][0] for one in journal.listed(newest=True)]
    assert newest == names[-len(newest) :]
    assert 1 <= len(newest) < 7


@pytest.mark.invariant("I44")
@pytest.mark.parametrize("mode", MODES)
def test_whatever_a_crash_at_any_operation_leaves_everything_done_is_recorded(mode: str) -> None:
    for crash_at in itertools.count(1):
        disk, done = FaultDisk(crash_at, crash_at=crash_at), list[str]()
        try:
            do(Journal(disk, SHARD), done, "a", "b", "c")
            break
        except SimulatedCrash:
            left = disk.survivors(mode)  # type: ignore[arg-type]
        goes_on(left, done)
    assert crash_at > 12


def goes_on(disk: FaultDisk, done: list[str]) -> None:
    """What was done is recorded; what was interrupted gets an end; the next act stands behind it, and the chain
    holds."""
    journal = Journal(disk, SHARD)
    known = recorded(journal)
    assert set(done) <= set(known), "an act was done and is not recorded"
    open_ones = [one.begun.number for one in journal.listed() if one.ended is None]
    assert len(open_ones) <= 1, "only the last one can have been interrupted"
    assert journal.resolve(lambda record: {"interrupted": record.number}, 9) == len(open_ones)
    do(journal, [], "later")
    assert recorded(journal) == [*known, "later"]
    assert all(one.ended is not None for one in journal.listed())
    again = Journal(disk, SHARD)
    assert again.verify()[2] == []
    assert recorded(again) == [*known, "later"]


def test_on_a_full_disk_nothing_is_done_and_acts_go_on_with_space() -> None:
    disk, done = FaultDisk(), list[str]()
    journal = Journal(disk, SHARD)
    do(journal, done, "a")
    disk.budget = disk._used_bytes() + 100
    with pytest.raises(Overloaded) as refused:
        do(journal, done, "b")
    assert refused.value.code is Code.DISK_FULL
    assert done == recorded(journal) == ["a"]
    disk.budget = None
    do(journal, done, "c")
    assert done == recorded(journal) == ["a", "c"]
    assert Journal(disk, SHARD).verify()[2] == []


@pytest.mark.invariant("I44")
def test_after_a_failed_sync_no_act_is_done_until_the_journal_is_opened_anew() -> None:
    disk, done = FaultDisk(), list[str]()
    journal = Journal(disk, SHARD)
    do(journal, done, "a")
    disk.fail_next_sync = True
    for _ in range(2):
        with pytest.raises(Unknown) as refused:
            do(journal, done, "b")
        assert refused.value.code is Code.SHARD_STOPPED
    assert done == ["a"]
    do(Journal(disk.survivors("kept"), SHARD), done, "c")


def test_an_act_whose_end_finds_no_space_is_left_open() -> None:
    disk = FaultDisk()
    journal = Journal(disk, SHARD)
    with journal.act("settle", {"ids": ["a"]}, clock()) as act:
        disk.budget = disk._used_bytes()
        act.ended = {"results": {}}
    assert [one.ended for one in journal.listed()] == [None]
    disk.budget = None
    assert Journal(disk, SHARD).resolve(lambda record: {"found": record.what["ids"]}, 7) == 1


def test_what_is_under_way_is_not_resolved() -> None:
    journal = Journal(MemoryDisk(), SHARD)
    with journal.act("settle", {}, clock()):
        assert journal.resolve(lambda record: {}, 7) == 0


def test_records_that_were_removed_stay_missing() -> None:
    disk = MemoryDisk()
    do(Journal(disk, SHARD), [], "a", "b")
    files = disk.files()
    files[NAME] = b"".join(line + b"\n" for line in files[NAME].split(b"\n")[:2])
    journal = Journal(MemoryDisk(files), SHARD)
    assert [str(one) for one in journal.verify()[2]] == ["line 3 (record 4): records 3 to 4 are missing at the end"]
    do(journal, [], "c")
    assert [str(one) for one in journal.verify()[2]] == ["line 3 (record 5): records 3 to 4 are missing before it"]


def test_what_is_put_behind_the_last_record_of_a_running_broker_is_found() -> None:
    disk = MemoryDisk()
    journal = Journal(disk, SHARD)
    do(journal, [], "a")
    file = disk.open(NAME)
    file.write_at(file.size(), [b'{"n":3}\n'])
    assert [one.line for one in journal.verify()[2]] == [3]


def test_the_number_of_the_last_record_stands_beside_it() -> None:
    disk = MemoryDisk()
    journal = Journal(disk, SHARD)
    do(journal, [], "a")
    assert disk.files()[LAST].decode().split() == ["2", journal.verify()[1]]


def test_long_names_and_reasons_are_cut() -> None:
    journal = Journal(MemoryDisk(), SHARD)
    with journal.act("settle", {}, clock(), "b" * 5000, "w" * 5000):
        pass
    (one,) = journal.listed()
    assert (len(one.begun.by or ""), len(one.begun.why or "")) == (1000, 1000)
