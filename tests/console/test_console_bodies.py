"""Bodies and foreign texts as they are shown: readable, whole up to the bound, never acting on the page."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.console.bodies import HEX_MOST, MOST, shown
from escrowmq.console.words import age, duration, moment, number, preview, size, visible

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=50)
@given(st.lists(JSON) | st.dictionaries(st.text(), JSON), st.booleans())
def test_json_is_set_out_and_keeps_its_values(value: Any, ascii_only: bool) -> None:
    body = shown(json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))
    if body.kind != "json":  # half a letter is no UTF-8
        assert not ascii_only
        return
    text = re.sub(r"\\x([0-9a-f]{2})", lambda m: f"\\u00{m[1]}", body.text) if ascii_only else body.text
    if ascii_only:
        assert json.loads(text) == value
    assert body.kinds == ("json", "text", "hex")


@pytest.mark.parametrize(
    ("sent", "set_out"),
    [
        (b'{"a":1.10,"b":[]}', '{\n  "a": 1.10,\n  "b": []\n}'),
        (
            b'[1e400,{"x":{}},12345678901234567890123]',
            '[\n  1e400,\n  {\n    "x": {}\n  },\n  12345678901234567890123\n]',
        ),
        (b'{"a,b":"c:{d}"}', '{\n  "a,b": "c:{d}"\n}'),
    ],
)
def test_numbers_and_strings_stay_as_they_were_sent(sent: bytes, set_out: str) -> None:
    assert shown(sent).text == set_out


@pytest.mark.parametrize(
    "body", [b'"text"', b"17", b"{", b'{"a":}', b"[" * 60_000, b"[" + b"9" * 5000 + b"]", b"\xef\xbb\xbf{}"]
)
def test_what_is_no_json_is_text(body: bytes) -> None:
    assert shown(body).kind == "text"


@given(st.binary(max_size=300), st.sampled_from([None, "json", "text", "hex", "<b>"]))
def test_any_bytes_can_be_shown(body: bytes, wanted: str | None) -> None:
    found = shown(body, wanted)
    assert found.size == len(body)
    assert found.kind in found.kinds
    assert all(letter.isprintable() or letter in "\n\t" for letter in found.text)


@given(st.binary(max_size=200))
def test_hexadecimal_digits_are_the_bytes(body: bytes) -> None:
    rows = [line[8:55].split() for line in shown(body, "hex").text.splitlines()]
    assert bytes.fromhex("".join(digits for row in rows for digits in row)) == body


def test_a_large_body_is_cut_and_says_so() -> None:
    letters = ("ä" * MOST).encode()
    found = shown(b"x" + letters)
    assert (found.kind, found.kinds) == ("text", ("text", "hex"))
    assert found.shown == MOST
    assert set(found.text) == {"x", "ä"}, "a letter that the cut went through is left out"
    assert shown(b"\xff" * MOST * 2).shown == HEX_MOST
    assert shown(b"[" + b"1," * MOST + b"1]").kind == "text", "half of a JSON text is none"


@given(st.text(max_size=200))
def test_a_foreign_text_keeps_to_its_line(text: str) -> None:
    found = visible(text)
    assert "\n" not in found
    assert all(letter.isprintable() for letter in found)


def test_numbers_times_and_sizes_are_for_people() -> None:
    assert [number(n) for n in (None, 0, 1234567, 0.5, 1234.5, 3.0)] == ["–", "0", "1,234,567", "0.5", "1,234", "3"]
    assert [size(n) for n in (0, 1023, 4 << 20, 1 << 40)] == ["0 B", "1023 B", "4 MiB", "1 TiB"]
    assert [duration(s) for s in (0.25, 12.5, 90, 7200, 90061)] == ["250 ms", "12.5 s", "1 min 30 s", "2 h", "1 d 1 h"]
    assert moment(0) == moment(1 << 62) == moment(-5) == "–"
    assert 'datetime="2026-11-23T03:00:00+00:00"' in moment(1_795_402_800_000_000)
    assert age(1_000_000, 3_000_000) == "2 s"
    assert preview(b"\xff<b>\n") == "\\xff<b>\\n"
    assert len(preview(b"x" * 1000)) == 160
