"""events.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest

from escrowmq.errors import Misuse
from escrowmq.pipeline.audit.events import Events


def test_events_come_in_the_order_of_their_times_without_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(
        '{"at_us": 2, "event": "killed", "who": "b"}\n{"at_us": 1, "event": "killed", "who": "a"}\n'
        '{"at_us": 3, "event": "asked", "who": "a"}\n{"at_us": 4, "eve'
    )
    assert [event["who"] for event in Events.read(path).kills] == ["a", "b"]
    assert len(Events.read(path).every) == 3


def test_no_file_is_no_events_and_other_lines_are_an_error(tmp_path: Path) -> None:
    assert Events.read(None).every == Events.read(tmp_path / "none").every == ()
    (tmp_path / "x").write_text("hello\n")
    with pytest.raises(Misuse, match="not made of JSON lines"):
        Events.read(tmp_path / "x")
