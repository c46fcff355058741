"""What people read: numbers, times, bodies, rows as JSON."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.cli.flags import lines
from escrowmq.cli.printing import body_text, cell, duration, moment, print_facts, print_table, size
from escrowmq.cli.rows import plain
from escrowmq.model import DecidedBy, TransactionId, TransactionState
from escrowmq.settings import BrokerSettings


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0004, "0.4 ms"),
        (0.25, "250 ms"),
        (1, "1 s"),
        (1.5, "1.5 s"),
        (59.99, "60 s"),
        (90, "1 min 30 s"),
        (7200, "2 h"),
        (259_200, "3 d"),
        (90_061, "1 d 1 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(17, "17 B"), (4 << 20, "4 MiB"), (1 << 30, "1 GiB"), (32 << 10, "32 KiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize("line", list(lines()), ids=lambda line: line.name)
def test_every_default_can_be_typed_back_in(line) -> None:
    typed = BrokerSettings.of({line.name: line.default_text})
    assert getattr(typed, line.name) == line.default


def test_no_moment_for_zero() -> None:
    assert moment(0) is None
    assert moment(None) is None
    assert str(moment(1_700_000_000_123_456)).endswith(".123")


@given(st.text())
def test_cells_are_printable_and_unstyled(text: str) -> None:
    shown = cell(text)
    assert shown.plain.isprintable()
    assert not shown.spans


@given(st.binary(max_size=3000), st.integers(1, 100))
def test_bodies_are_cut(body: bytes, most: int) -> None:
    shown = body_text(body, most)
    assert len(shown) <= most
    assert shown == body.decode(errors="backslashreplace") or shown.endswith("…")


def test_tables_fit_the_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a screen
    monkeypatch.setenv("NO_COLOR", "1")
    print_table(("name", ">count"), [("long " * 40, 1_234_567)], "nothing")
    shown = capsys.readouterr().out
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in shown.splitlines()) <= 60
    assert "1,234,567" in shown
    assert shown.count("long") == 40, "wrapped, not cut"


properties = st.lists(st.tuples(st.text(), st.text()))
values = st.fixed_dictionaries(
    {
        "body": st.binary(),
        "message_id": st.binary(min_size=16, max_size=16),
        "transaction": st.none() | st.binary(min_size=16, max_size=16),
        "properties": st.none() | properties,
        "state": st.sampled_from(TransactionState).map(int),
        "decided_by": st.sampled_from(DecidedBy).map(int),
        "key": st.none() | st.text(),
        "offset": st.integers(-1, 2**62),
    }
)


@given(values)
def test_rows_as_json_keep_everything(row: dict) -> None:
    made = json.loads(json.dumps(plain(row)))
    assert set(made) - {"body_base64"} == set(row)
    assert bytes.fromhex(made["message_id"]) == row["message_id"]
    assert made["properties"] == dict(row["properties"] or [])
    assert made["state"] == TransactionState(row["state"]).name.lower()
    assert made["decided_by"] == DecidedBy(row["decided_by"]).name.lower()
    assert (made["body"] is None) == ("body_base64" in made)
    if made["body"] is not None:
        assert made["body"].encode() == row["body"]
    if row["transaction"] is not None:
        assert bytes(TransactionId.parse(made["transaction"])) == row["transaction"]


ID = "5512d6ce8039354f0000000000000001"
WIDE = (
    ["message id", ">count", "owner", "text"],
    [(ID, 1, "a-relay-with-a-long-name", "words that may stand in lines of their own " * 3)],
)


def test_nothing_is_broken_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(*WIDE, "")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if ID in line]
    assert "lines of their own words that" in row
    print_facts({"message id": ID, "body": "x" * 200})
    assert "x" * 200 in capsys.readouterr().out


@pytest.mark.parametrize("columns", [20, 80])
def test_an_id_is_not_broken_on_a_narrow_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a screen
    print_table(*WIDE, "")
    told = capsys.readouterr().out
    assert ID in told
    assert "a-relay-with-a-long-name" in told
    assert "words that may stand in lines of their own " * 3 not in told
    print_facts({"message id": ID})
    assert ID in capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (
            ("group", "topics", "order", ">waiting", ">leased", ">retrying", ">dead letters", "paused"),
            ("billing-of-orders-in-the-north", "orders-of-the-north-region", "ordered", 1234, 12, 3, 0, None),
        ),
        (
            ("transaction", "state", "group", ">messages", ">checks", "prepared", "decided by"),
            ("a850d6c0-7-14abcdef01", "rolled_back", "billing-of-orders-in-the-north", 1, 15, "3 d ago", "operator"),
        ),
        (
            ("topic", ">queue", ">first offset", ">next offset", ">messages", ">size", "keeps"),
            ("orders-of-the-north-region-of-it", 0, 1_234_567, 12_345_678, 11_111_111, "1.21 GiB", "7 d, 10 GiB"),
        ),
        (
            ("message", ">attempts", "dead since", "key", "tag", "cause"),
            ("orders-of-the-north-region/12/345678", 16, "2026-11-28 01:05:34.640", ID, "paid", "no such row " * 9),
        ),
    ],
    ids=["groups", "transactions", "topics", "dead letters"],
)
def test_long_names_fit_80_columns_in_one_piece(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: tuple[str, ...], row: tuple[object]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a screen
    monkeypatch.setenv("NO_COLOR", "1")
    print_table(columns, [row, row], "nothing")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, shown.splitlines())) <= 80
    words = [word for value in row if isinstance(value, str) for word in value.split()]
    assert [word for word in words if word not in shown.split()] == []
    assert all(column.removeprefix(">").split()[0] in shown for column in columns)
