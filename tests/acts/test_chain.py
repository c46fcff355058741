"""A chain of records: what its bytes are, and that no edit of it stays unnoticed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.acts.chain import Record, is_sealed, origin, parse, verify

SHARD = 7
GOLDEN = Path(__file__).parent / "golden.journal"


def lines_of(records: list[Record], shard: int = SHARD) -> tuple[list[bytes], tuple[int, str]]:
    """The lines, and what the file beside them says."""
    previous, lines = origin(shard), []
    for record in records:
        line, previous = record.sealed(previous)
        lines.append(line[:-1])
    return lines, (len(records), previous)


def some(count: int) -> list[Record]:
    """Acts with their ends, by turns."""
    return [
        Record(n, 1000 + n, of=n - 1, ended={"results": {"OK": n}})
        if n % 2 == 0
        else Record(n, 1000 + n, "transactions.settle", "anna@shop", "why not", {"ids": [f"1-1-{n}"], "é": "\n\0"})
        for n in range(1, count + 1)
    ]


def test_the_format_is_kept() -> None:
    lines, _ = lines_of(some(4))
    assert b"".join(line + b"\n" for line in lines) == GOLDEN.read_bytes()


texts = st.text(max_size=20)
contents = st.dictionaries(
    texts, st.one_of(texts, st.integers(-(1 << 62), 1 << 62), st.lists(texts, max_size=3)), max_size=3
)


@given(
    st.builds(
        Record, st.integers(1, 1 << 40), st.integers(0, 1 << 60), texts, st.none() | texts, st.none() | texts, contents
    )
    | st.builds(
        lambda n, at, of, ended: Record(n, at, of=of, ended=ended),
        st.integers(1),
        st.integers(0),
        st.integers(1),
        contents,
    )
)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    line, digest = record.sealed(origin(1))
    assert line.count(b"\n") == 1
    assert parse(line[:-1]) == (record, origin(1), digest)
    assert is_sealed(line[:-1])


def test_an_untouched_chain_holds() -> None:
    lines, last = lines_of(some(6))
    assert verify(lines, SHARD, last) == (6, [])
    assert verify([], SHARD, None) == (0, [])


def changed(lines: list[bytes], at: int) -> None:
    lines[at] = lines[at].replace(b'"at_us":1', b'"at_us":2')


def rewritten(lines: list[bytes], at: int) -> None:
    """Sealed anew, as by somebody who knows how."""
    record, previous, _ = parse(lines[at])
    lines[at] = Record(record.number, record.at_us + 1, "nothing", what={}).sealed(previous)[0][:-1]


def removed(lines: list[bytes], at: int) -> None:
    del lines[at]


def swapped(lines: list[bytes], at: int) -> None:
    lines[at], lines[at - 1] = lines[at - 1], lines[at]


def doubled(lines: list[bytes], at: int) -> None:
    lines.insert(at, lines[at])


def garbage(lines: list[bytes], at: int) -> None:
    lines[at] = b"\xff no JSON"


def hidden(lines: list[bytes], at: int) -> None:
    """A second field of the name: who reads with the eye sees another thing than who parses."""
    lines[at] = lines[at].replace(b'"at_us"', b'"by":"eve","at_us"', 1)


@pytest.mark.invariant("I44")
@pytest.mark.parametrize("edit", [changed, rewritten, removed, swapped, doubled, garbage, hidden])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_edit_is_found_at_its_place(edit: Callable[[list[bytes], int], None], at: int) -> None:
    lines, last = lines_of(some(6))
    edit(lines, at)
    _, breaks = verify(lines, SHARD, last)
    assert breaks
    assert min(one.line for one in breaks) in (at, at + 1, at + 2)


@pytest.mark.invariant("I44")
@given(st.data())
def test_no_changed_bit_stays_unnoticed(data: Any) -> None:
    lines, last = lines_of(some(4))
    at = data.draw(st.integers(0, 3))
    bit = data.draw(st.integers(0, 8 * len(lines[at]) - 1))
    content = bytearray(lines[at])
    content[bit // 8] ^= 1 << bit % 8
    whole = b"\n".join([*lines[:at], bytes(content), *lines[at + 1 :]]).split(b"\n")  # it may be a line's end now
    assert verify(whole, SHARD, last)[1]


def test_what_is_cut_off_at_the_end_is_missed() -> None:
    lines, last = lines_of(some(6))
    assert [str(one) for one in verify(lines[:4], SHARD, last)[1]] == [
        "line 5 (record 6): records 5 to 6 are missing at the end"
    ]
    assert verify([], SHARD, last)[1]


def test_the_journal_of_another_shard_is_noticed() -> None:
    lines, last = lines_of(some(2), SHARD + 1)
    assert [one.line for one in verify(lines, SHARD, last)[1]] == [1]
