"""The record of acts on the command line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import Run

from escrowmq.cli.failures import Exit

Prepare = Callable[[str], str]


def test_who_did_what_is_listed_shown_and_found(run: Run, undecided: Prepare) -> None:
    one, two = undecided("o-1"), undecided("o-2")
    assert run("acts", "list", "--json").json == []
    run("transactions", "commit", one, "--why", "the customer paid")
    run("transactions", "rollback", two)
    found = run("acts", "list", "--json").json
    assert [(act["act"], act["why"], act["what"]["ids"]) for act in found] == [
        ("transactions.settle", "the customer paid", [one]),
        ("transactions.settle", None, [two]),
    ]
    assert [act["number"] for act in run("acts", "list", "--about", two, "--json").json] == [3]
    assert run("acts", "list", "--act", "groups.alter", "--json").json == []
    (by,) = {act["by"] for act in found}
    assert len(run("acts", "list", "--by", by.partition("@")[0], "--json").json) == 2
    assert [act["number"] for act in run("acts", "list", "-n", "1", "--json").json] == [3]
    told = run("acts", "show", "1").out
    assert "the customer paid" in told
    assert "unverified" in told
    assert "1 COMMITTED" in told
    missing = run("acts", "show", "99")
    assert (missing.code, "NOT_FOUND" in missing.err) == (Exit.REJECTED, True)


@pytest.mark.invariant("I44")
def test_an_edited_record_is_found_with_its_place(run: Run, undecided: Prepare, tmp_path: Path) -> None:
    run("transactions", "commit", undecided("o-1"), "--why", "honest")
    run("transactions", "commit", undecided("o-2"))
    assert run("acts", "verify").code == Exit.OK
    journal = tmp_path / "data" / "acts.journal"
    journal.write_bytes(journal.read_bytes().replace(b"honest", b"forged"))
    told = run("acts", "verify")
    assert (told.code, "line 1 (record 1): it was changed" in told.err) == (Exit.FINDING, True)
    (found,) = run("acts", "verify", "--json").json
    assert [place["line"] for place in found["broken"]] == [1]
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], *lines[2:]]))
    assert "record 2 is missing before it" in run("acts", "verify").err
