"""Plans on the command line: made, looked at, run, gone on with."""

from collections.abc import Callable
from pathlib import Path

from cli_runs import Run

from escrowmq.cli.failures import Exit

Prepare = Callable[[str], str]


def test_a_plan_from_its_making_to_its_end(run: Run, undecided: Prepare) -> None:
    ids = [undecided(f"o-{number}") for number in range(6)]
    assert run("plan", "list", "--json").json == []
    made = run("plan", "make", "transactions.commit", "--group", "shop", "--why", "paid, says the bank", "--json").json
    plan = made["id"]
    assert (made["rows"], made["counts"]["state"]) == (6, {"open": 6})
    told = run("plan", "show", plan).out
    assert "paid, says the bank" in told
    assert made["digest"] in told
    assert ids[0] in told
    run("transactions", "rollback", ids[5])
    looked = run("plan", "dry-run", plan, "--json")
    assert (looked.code, looked.json["by_outcome"]) == (Exit.FINDING, {"done": 5, "conflict": 1})
    assert "it was decided the other way" in run("plan", "dry-run", plan).out
    unasked = run("plan", "run", plan)
    assert (unasked.code, "--yes" in unasked.err) == (Exit.USAGE, True)
    ran = run("plan", "run", plan[:16], "--yes", "--pause", "0s", "--json")
    assert (ran.code, ran.json["outcomes"]) == (Exit.FINDING, {"done": 5, "conflict": 1})
    rows = run("plan", "rows", plan, "--json").json
    assert [(row["row"], row["id"], row["outcome"]) for row in rows][4:] == [
        (4, ids[4], "done"),
        (5, ids[5], "conflict"),
    ]
    assert [row["id"] for row in run("plan", "rows", plan, "--result", "conflict", "--json").json] == [ids[5]]
    assert ids[5] in run("plan", "rows", plan).out
    (listed,) = run("plan", "list", "--json").json
    assert (listed["state"], listed["next"]) == ("finished", 6)
    assert "finished" in run("plan", "list").out
    assert "paid, says the bank" in run("acts", "list", "--about", ids[4]).out
    assert run("plan", "stop", plan).code == Exit.FINDING
    assert run("plan", "delete", plan).code == Exit.OK
    assert run("plan", "show", plan).code == Exit.REJECTED


def test_ids_from_a_file_a_digest_and_words_that_are_wrong(run: Run, undecided: Prepare, tmp_path: Path) -> None:
    ids = [undecided(f"o-{number}") for number in range(4)]
    (tmp_path / "ids").write_text("\n".join([*ids[:2], "1-2-3", ""]))
    made = run("plan", "make", "transactions.rollback", "--ids", str(tmp_path / "ids"), "--json").json
    assert (made["rows"], made["not_found"]) == (2, 1)
    from_input = run("plan", "make", "transactions.rollback", "--ids", "-", "--json", input=ids[3].encode())
    assert from_input.json["rows"] == 1
    wrong = run("plan", "run", made["id"], "--yes", "--digest", "00")
    assert (wrong.code, "CONFLICT" in wrong.err) == (Exit.REJECTED, True)
    for words in (
        ["make", "transactions.comit"],
        ["make", "transactions.commit", "--containing", "x"],
        ["make", "transactions.commit", "--ids", str(tmp_path / "none")],
        ["run", made["id"], "--yes", "--ramp", "10,5"],
        ["run", made["id"], "--yes", "--stop-after", "few"],
        ["rows", made["id"], "--result", "good"],
    ):
        assert run("plan", *words).code == Exit.USAGE, words
    nothing = run("plan", "make", "transactions.commit", "--older-than", "2h")
    assert (nothing.code, "NOT_FOUND" in nothing.err) == (Exit.REJECTED, True)
    assert run("plan", "run", made["id"], "--yes", "--digest", made["digest"][:8], "--pause", "0s").code == Exit.OK


def test_transactions_that_are_chosen_are_decided_by_a_plan(run: Run, undecided: Prepare) -> None:
    ids = [undecided(f"o-{number}") for number in range(3)]
    unasked = run("transactions", "commit", "--group", "shop", "--why", "paid")
    assert (unasked.code, "--yes" in unasked.err, ids[0] in unasked.out) == (Exit.USAGE, True, True)
    (waiting,) = run("plan", "list", "--json").json
    assert (waiting["state"], waiting["act"], waiting["why"]) == ("made", "transactions.commit", "paid")
    assert run("transactions", "recheck", "--state", "open", "--yes").code == Exit.OK
    assert run("transactions", "rollback", "--older-than", "2h", "--yes").code == Exit.REJECTED
    done = run("transactions", "commit", "--group", "shop", "--yes", "--json").json
    assert (done["state"], done["outcomes"]) == ("finished", {"done": 3})
    for words in ([], [ids[0], "--group", "shop", "--state", "open"]):
        assert run("transactions", "commit", *words).code == Exit.USAGE
