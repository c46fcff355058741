"""The pure rules, and the columns: every row of every answer is accounted for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq import schemas
from escrowmq.errors import Code, Misuse, Rejected, error
from escrowmq.outbox.relay import RelayOptions
from escrowmq.outbox.relay.reading import Row, outgoing
from escrowmq.outbox.relay.verdicts import REFUSED, Rules, judge
from escrowmq.outbox.tables import State

RULES = Rules(redeliveries=2, interval_us=1000, aside_us=10, waiting_holds=True)
CODES = [Code.OK, Code.OK, Code.BODY_TOO_LARGE, Code.UNKNOWN_TOPIC, Code.TIMED_OUT, Code.QUEUE_FULL, Code.DENIED]


def row(seq: int, key: str | None = None, attempts: int = 0, state: State = State.PENDING) -> Row:
    return Row(
        seq, 0 if key is None else len(key), state, attempts, seq.to_bytes(16, "big"), "t", key, None, None, b"", 5, 0
    )


def test_the_refusing_codes_are_those_of_the_rejected_branch() -> None:
    for code in Code:
        if code >= Code.CONFLICT:
            assert REFUSED[code] == isinstance(error(code), Rejected), code
        else:
            assert not REFUSED[code]


@pytest.mark.invariant("I39")
@given(
    st.lists(
        st.tuples(st.sampled_from([None, "a", "bb", "ccc"]), st.sampled_from(CODES), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
    st.booleans(),
)
def test_every_row_has_one_fate(answers: list[tuple[str | None, Code, int]], holds: bool, partly: bool) -> None:
    rows = [row(number, key, attempts) for number, (key, _, attempts) in enumerate(answers)]
    codes = np.array([code for _, code, _ in answers], np.uint8)
    rules = Rules(2, 1000, 10, holds)
    verdict = judge(rows, codes, {}, rules, 0, partly_there=partly)
    sent, aside = set(verdict.sent), {a.seq for a in verdict.aside}
    behind = {seq for seq, _ in verdict.behind}
    assert sent == {n for n, (_, code, _) in enumerate(answers) if code is Code.OK}
    assert not sent & aside
    assert not (sent | aside) & behind
    if verdict.away is not None:
        assert not partly
        assert not sent | aside | behind
        return
    for a in verdict.aside:
        counted = REFUSED[answers[a.seq][1]]
        assert a.attempts == answers[a.seq][2] + counted
        assert (a.state is State.WAITING) == (counted and a.attempts > 2)
    for key in ("a", "bb", "ccc"):  # one head a key at most, and it is its first row that did not get through
        places = [n for n, (k, code, _) in enumerate(answers) if k == key and code is not Code.OK]
        if places:
            assert aside & set(places) == {places[0]}
            held = (len(key), key) in verdict.heads
            assert held == (
                holds or verdict.aside[[a.seq for a in verdict.aside].index(places[0])].state is State.RETRYING
            )
            assert behind & set(places) == (set(places[1:]) if held else set())


def test_a_head_that_gets_through_frees_its_key() -> None:
    rows = [row(3, "a", 1, State.RETRYING), row(9, "bb")]
    verdict = judge(rows, np.zeros(2, np.uint8), {(1, "a"): 3, (2, "bb"): 7}, RULES, 0)
    assert verdict.freed == [(1, "a")]
    mixed = judge([*rows, row(10)], np.array([0, 0, Code.BAD_DELAY], np.uint8), {(1, "a"): 3}, RULES, 0)
    assert mixed.freed == [(1, "a")]


def test_away_is_nobodys_fault() -> None:
    codes = np.array([Code.TIMED_OUT, Code.DISK_FULL], np.uint8)
    assert judge([row(1), row(2, "a")], codes, {}, RULES, 0).away is Code.TIMED_OUT


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)


@given(
    st.lists(
        st.tuples(
            texts, st.none() | texts, st.none() | st.dictionaries(texts, texts, max_size=3), st.binary(max_size=4)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_rows_become_the_columns_of_a_batch(
    content: list[tuple[str, str | None, dict[str, str] | None, bytes]],
) -> None:
    import json

    rows: list[Any] = [
        (n, 0, 0, 0, bytes([n]) * 16, topic, key, None, None if p is None else json.dumps(p), body, 7 + n, 0)
        for n, (topic, key, p, body) in enumerate(content)
    ]
    batch = outgoing(rows)
    batch.validate(full=True)
    assert batch.schema == schemas.OUTGOING
    found = batch.to_pylist()
    assert [(r["topic"], r["key"], r["body"]) for r in found] == [(t, k, b) for t, k, _, b in content]
    assert [None if r["properties"] is None else dict(r["properties"]) for r in found] == [p for _, _, p, _ in content]
    assert [r["message_id"] for r in found] == [bytes([n]) * 16 for n in range(len(rows))]


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease": 0},
        {"workers": True},
        {"batch_rows": 0.5},
        {"on_exhausted": "drop"},
        {"name": "a b"},
        {"redeliveries": -1},
    ],
)
def test_options_out_of_range_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(Misuse) as refused:
        RelayOptions(**wrong)
    assert refused.value.code is Code.BAD_SETTING
    assert next(iter(wrong)) in refused.value.message
