"""Dead letters in blocks against a dict of them, pages and summaries against plain loops, and the kinds of causes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.ledger.groups.dead import letters
from escrowmq.ledger.groups.dead.letters import MOST_TEXT, NOT_DEAD, DeadLetters, block_of, kind_of
from escrowmq.ledger.groups.dead.listing import Wanted, died_between, page, summary

CAUSES = ["no stock for order 17", "no stock for order 4", "timeout after 30 s", "poison", "ValueError: x\nat line 4"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(letters, "BLOCK", 4)
    monkeypatch.setattr(letters, "FEW_KINDS", 2)


Model = dict[int, tuple[int, int, str]]


def checked(dead: DeadLetters, model: Model) -> None:
    offsets = sorted(model)
    assert dead.offsets.tolist() == offsets
    assert len(dead) == len(model) == sum(map(len, dead.blocks))
    assert dead["dead_us"].tolist() == [model[offset][0] for offset in offsets]
    assert dead["causes"].tolist() == [model[offset][2] for offset in offsets]
    assert dead["kinds"].tolist() == [kind_of(model[offset][2]) for offset in offsets]
    assert all(0 < len(block) <= 8 for block in dead.blocks)
    assert dead.last_us == max((one[0] for one in model.values()), default=NOT_DEAD)
    asked = np.arange(0, 70)
    died_us, attempts = dead.deaths(asked)
    nothing = (NOT_DEAD, NOT_DEAD, "")
    assert died_us.tolist() == [model.get(offset, nothing)[0] for offset in asked.tolist()]
    assert attempts.tolist() == [model.get(offset, nothing)[1] for offset in asked.tolist()]
    for some in (asked, asked[1::3], np.array(offsets[::2], np.int64)):
        among = dead.among(some)
        assert ([] if among is None else among.offsets.tolist()) == [
            offset for offset in some.tolist() if offset in model
        ]
    assert [dead.letter(offset) for offset in range(70)] == [model.get(offset) for offset in range(70)]


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("bury"), st.lists(st.tuples(st.sets(st.integers(0, 63), min_size=1, max_size=20),
            st.sampled_from(CAUSES)), max_size=3)
        ),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 63), max_size=20)),
        st.tuples(st.just("range"), st.tuples(st.integers(0, 64), st.integers(0, 64)).map(sorted)),
        st.tuples(st.just("reload"), st.none()),
    ),
    max_size=12,
)  # fmt: skip


@given(STEPS)
def test_blocks_are_what_a_dict_would_be(steps):
    dead, model = DeadLetters(), Model()
    for now, (name, what) in enumerate(steps, 1):
        before = list(dead.blocks)
        shown = [block.offsets.tolist() for block in before]
        if name == "bury":
            parts = []
            for number, (chosen, cause) in enumerate(what):
                fresh = sorted(chosen - set(model))
                model.update(dict.fromkeys(fresh, (now, number + 1, cause)))
                if fresh:
                    parts.append(block_of(np.array(fresh), number + 1, now, cause))
            dead.bury(parts)
        elif name == "remove":
            chosen = sorted(what & set(model))
            dead.remove(np.array(chosen, np.int64))
            model = {offset: one for offset, one in model.items() if offset not in what}
        elif name == "range":
            dead.remove_range(*what)
            model = {offset: one for offset, one in model.items() if not what[0] <= offset < what[1]}
        else:
            offsets, attempts, dead_us, causes = (dead[name] for name in ("offsets", "attempts", "dead_us", "causes"))
            dead = DeadLetters()
            dead.load(offsets, attempts, dead_us, pa.array(causes.tolist(), pa.utf8()))
        assert [block.offsets.tolist() for block in before] == shown, "who read them goes on reading them"
        checked(dead, model)


@given(
    st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 40)), st.tuples(st.integers(1, 9),
    st.sampled_from(CAUSES))),
    st.integers(1, 7),
    st.sampled_from([None, *CAUSES, kind_of(CAUSES[0]), "unheard of"]),
    st.one_of(st.none(), st.integers(0, 10)),
)  # fmt: skip
def test_pages_and_summaries_are_what_plain_loops_would_find(everything, limit, cause, before_us):
    parts = {}
    for queue_id in range(3):
        dead = DeadLetters()
        here = [(offset, *one) for (queue, offset), one in sorted(everything.items()) if queue == queue_id]
        for offset, died_us, text in here:
            dead.bury([block_of(np.array([offset]), 1, died_us, text)])
        parts[queue_id] = dead.blocks
    expected = [
        place
        for place, (died_us, text) in sorted(everything.items())
        if (cause is None or kind_of(text) == kind_of(cause)) and (before_us is None or died_us < before_us)
    ]
    found, after = [], None
    while True:
        part = page(parts, limit, after, Wanted(cause, before_us))
        found += zip(part.queue_ids.tolist(), part.offsets.tolist(), strict=True)
        assert [everything[place] for place in found[len(found) - len(part) :]] == list(
            zip(part.dead_us.tolist(), part.causes.tolist(), strict=True)
        )
        if len(part) < limit:
            break
        after = found[-1]
    assert found == expected
    queue_ids, offsets = died_between(parts, 3, 7)
    timed = sorted((died_us, *place) for place, (died_us, _) in everything.items() if 3 <= died_us < 7)
    assert list(zip(queue_ids.tolist(), offsets.tolist(), strict=True)) == [(q, o) for _, q, o in timed]
    told = summary(parts, 2, 2)
    kinds: dict[str, list[int]] = {}
    for died_us, text in everything.values():
        kinds.setdefault(kind_of(text), []).append(died_us)
    ordered = sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0]))
    assert (told.count, told.kinds) == (len(everything), len(kinds))
    assert [(one.kind, one.count, one.oldest_us, one.newest_us) for one in told.causes] == [
        (kind, len(times), min(times), max(times)) for kind, times in ordered[:2]
    ]
    for one in told.causes:
        assert len(one.samples) == min(one.count, 2)
        for queue_id, offset, died_us, _, text in one.samples:
            assert everything[queue_id, offset] == (died_us, text)
            assert kind_of(text) == one.kind
    left = [died_us for _, times in ordered[2:] for died_us in times]
    others = told.others and (told.others.count, told.others.oldest_us, told.others.newest_us)
    assert others == ((len(left), min(left), max(left)) if left else None)


@given(st.text())
def test_the_kind_of_a_kind_is_itself(text):
    kind = kind_of(text)
    assert kind_of(kind) == kind
    assert len(kind) <= MOST_TEXT


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("no stock for order 4711, attempt 16 of 16", "no stock for order #"),
        ("KeyError: 'a3b1c2d4-0000-4000-8000-0123456789ab', attempt 1 of 1", "KeyError: '#'"),
        ("transaction 9f3a01c2 of 2026-11-23 10:04:59.123 is lost", "transaction # of # # is lost"),
        ("ConnectionError: 10.0.0.7:5432 refused", "ConnectionError: # refused"),
        ("ValueError: bad total\n  in line 14\n", "ValueError: bad total"),
        ("Traceback (most recent call last):\n  File x, line 3\nOSError: full", "OSError: full"),
        ("", ""),
        ("poison", "poison"),
    ],
)
def test_what_differs_by_numbers_and_ids_alone_is_of_one_kind(cause, kind):
    assert kind_of(cause) == kind
