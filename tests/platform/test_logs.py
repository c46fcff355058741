"""The log of a process: for people and for machines, and nothing that a client sent can forge a line."""

import json
import logging
import sys

import pytest

from escrowmq.platform.logs import JsonLines, PlainLines


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("escrowmq.events", logging.WARNING, "file.py", 1, message, (), None)
    made.__dict__.update(extra)
    return made


def test_a_line_of_json_has_the_facts_as_fields() -> None:
    line = JsonLines().format(
        record("parked: é", facts={"event": "parked", "transaction": "1-1-1", "level": "hidden?"})
    )
    found = json.loads(line)
    assert (found["event"], found["transaction"], found["message"]) == ("parked", "1-1-1", "parked: é")
    assert (found["level"], found["logger"]) == ("warning", "escrowmq.events")  # no fact takes the place of these
    assert found["time"].endswith("Z")


def test_an_exception_stays_in_the_line() -> None:
    made = record("it failed")
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = JsonLines().format(made)
    assert "\n" not in line
    assert "ValueError: why" in json.loads(line)["exception"]


def test_what_a_traceback_quotes_begins_no_line_for_people_either() -> None:
    made = record("it failed")
    try:
        raise ValueError("a\n2026-01-01 ERROR forged\x1b[2J")
    except ValueError:
        made.exc_info = sys.exc_info()
    first, *others = PlainLines().format(made).split("\n")
    assert first.endswith("it failed")
    assert any("ERROR forged" in line for line in others)
    assert all(line.startswith("    ") and line.isprintable() for line in others)


@pytest.mark.parametrize("forged", ["a\n2026-01-01 ERROR forged", "a\x1b[2J", "a\r\x00", "a\u2028b"])
def test_what_a_client_sent_begins_no_line_and_moves_no_cursor(forged: str) -> None:
    for formatter in (PlainLines(), JsonLines()):
        line = formatter.format(record(f"dead: {forged}"))
        assert line.isprintable()
