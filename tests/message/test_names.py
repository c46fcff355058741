"""Names: which there can be, and what is said of those that cannot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code, Misuse, Rejected
from escrowmq.message.names import MAX_NAME, check_name, is_name, is_text


@pytest.mark.parametrize("name", ["a", "0", "_", "-", "a.b", "A-Z_0.9", "x" * MAX_NAME])
def test_names(name):
    assert is_name(name)
    assert check_name(name, Code.BAD_TOPIC_NAME) == name


@pytest.mark.parametrize("name", ["", ".", ".a", "%half", "a b", "a/b", "a\n", "é", "x" * (MAX_NAME + 1), "\ud800"])
def test_what_are_no_names(name):
    assert not is_name(name)
    with pytest.raises(Rejected, match="BAD_GROUP_NAME"):
        check_name(name, Code.BAD_GROUP_NAME)


@pytest.mark.parametrize("name", [None, 7, b"a", ["a"]])
def test_what_is_no_text_is_no_name(name):
    with pytest.raises(Misuse, match="is not a str"):
        check_name(name, Code.BAD_TOPIC_NAME)


@given(st.text(st.characters() | st.characters(categories=["Cs"])))
def test_text_has_no_half_characters(value):
    assert is_text(value) == (not any("\ud800" <= character <= "\udfff" for character in value))
