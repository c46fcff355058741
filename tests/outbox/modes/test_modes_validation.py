"""The check by id sees what a check by count does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.outbox.modes import compare

IDS = st.sets(st.binary(min_size=2, max_size=2), max_size=8)


def by_count(confirmed: list[bytes], consumed: list[bytes], unconfirmed: list[bytes]) -> bool:
    """The other project's checker."""
    return len(confirmed) <= len(consumed) <= len(confirmed) + len(unconfirmed)


@pytest.mark.invariant("I43")
def test_one_lost_and_one_repeated_cancel_out_for_who_counts() -> None:
    confirmed, consumed = [b"a", b"b"], [b"a", b"a"]
    assert by_count(confirmed, consumed, [])
    verdict = compare(confirmed, consumed)
    assert not verdict.ok
    assert (verdict.lost, verdict.repeated, verdict.foreign) == ({b"b"}, {b"a"}, set())
    assert str(verdict) == "1 lost: 62; 1 repeated: 61"


def test_one_lost_and_one_foreign_cancel_out_too() -> None:
    assert by_count([b"a"], [b"z"], [])
    assert str(compare([b"a"], [b"z"])) == "1 lost: 61; 1 foreign: 7a"


def test_what_is_unconfirmed_may_or_may_not_be_there() -> None:
    assert compare([b"a"], [b"a"], [b"b"]).ok
    assert compare([b"a"], [b"a", b"b"], [b"b"]).ok
    assert not compare([b"a"], [b"b"], [b"b"]).ok


def test_a_long_list_is_cut() -> None:
    verdict = compare([bytes([n]) for n in range(30)], [])
    assert str(verdict).startswith("30 lost: 00, ")
    assert str(verdict).endswith(", ...")


@pytest.mark.invariant("I43")
@given(IDS, IDS, st.data())
def test_exactly_the_sets_of_the_rule_pass(confirmed: set[bytes], unconfirmed: set[bytes], data: st.DataObject) -> None:
    """confirmed ≤ consumed ≤ confirmed + unconfirmed, each once."""
    allowed = st.sets(st.sampled_from(sorted(unconfirmed))) if unconfirmed else st.just(set())
    consumed = confirmed | data.draw(allowed)
    assert compare(confirmed, consumed, unconfirmed).ok
    foreign = data.draw(st.binary(min_size=3, max_size=3))
    assert compare(confirmed, [*consumed, foreign], unconfirmed).foreign == {foreign}
    for identity in confirmed:
        assert compare(confirmed, consumed - {identity}, unconfirmed).lost == {identity}
        assert compare(confirmed, [*consumed, identity], unconfirmed).repeated == {identity}
