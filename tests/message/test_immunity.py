"""The property CheckImmunityTimeInSeconds, by columns: against the same said naively, row by row."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code
from escrowmq.message.immunity import PROPERTY, read_immunities
from escrowmq.message.limits import Limits
from escrowmq.schemas import PROPERTIES
from escrowmq.testing.ledgers import outgoing

values = st.sampled_from(["0", "7", "007", "60", "61", "-1", "7.0", "x", "", "1234567890", "٣"])
pairs = st.lists(st.tuples(st.sampled_from([PROPERTY, "a", "checkimmunitytimeinseconds"]), values), max_size=3)
rows = st.lists(st.tuples(st.none() | pairs, st.sampled_from([0, 7_000_000, 60_000_000])), max_size=6)


def expected(properties: list[tuple[str, str]] | None, given_us: int) -> tuple[int | None, Code]:
    text = next((value for name, value in properties or () if name == PROPERTY), None)
    if text is None:
        return given_us, Code.OK
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) > 60 or (int(text) and given_us not in (0, int(text) * 10**6)):
        return None, Code.BAD_IMMUNITY
    return max(int(text) * 10**6, given_us), Code.OK


@given(rows, st.integers(0, 2))
def test_a_column_says_what_its_rows_say(rows, cut):
    batch = outgoing([{"immunity_us": given_us} for _, given_us in rows])
    properties = pa.array([pairs for pairs, _ in rows], PROPERTIES)
    batch = batch.set_column(batch.schema.get_field_index("properties"), "properties", properties)
    batch = batch.slice(min(cut, len(rows)))
    times, codes = read_immunities(batch, Limits(half_retention_us=60_000_000))
    for (pairs, given_us), time_us, code in zip(rows[cut:], times.tolist(), codes.tolist(), strict=True):
        wanted, wanted_code = expected(pairs, given_us)
        assert code == wanted_code
        assert wanted is None or time_us == wanted


def test_what_has_no_such_property_costs_no_copy():
    batch = outgoing([{"immunity_us": 5}])
    times, _ = read_immunities(batch, Limits())
    assert np.shares_memory(times, batch.column("immunity_us").to_numpy())
