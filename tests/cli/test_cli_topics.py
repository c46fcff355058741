"""Topics on the command line: their retention, and how they are deleted."""

from collections.abc import Callable

from cli_runs import Run

from escrowmq.cli.failures import Exit

Prepare = Callable[[str], str]


def test_a_topic_gets_a_retention_and_loses_it(run: Run) -> None:
    run("topics", "create", "orders", "--queues", "1")
    run("send", "orders", "hello")
    (altered,) = run(
        "topics",
        "alter",
        "orders",
        "--retention",
        "7d",
        "--retention-size",
        "10GB",
        "--queues",
        "2",
        "--why",
        "so",
        "--json",
    ).json
    assert {name: altered[name] for name in ("queues", "retention", "retention_size")} == {
        "queues": 2,
        "retention": 7 * 86400.0,
        "retention_size": 10**10,
    }
    listed = run("topics", "list").out
    assert "7 d, 9.313 GiB a queue" in listed
    assert "105 B" in listed
    run("topics", "alter", "orders", "--retention", "broker", "--retention-size", "broker")
    assert "keeps" not in run("topics", "list").out
    for wrong in (("--retention", "soon"), ("--retention-size", "much"), ("--retention", "1ms"), ("--queues", "1")):
        assert run("topics", "alter", "orders", *wrong).code != Exit.OK
    assert [act["act"] for act in run("acts", "list", "--json").json][:2] == ["topics.alter"] * 2


def test_a_topic_is_deleted_with_what_hangs_on_it_only_by_force(run: Run, undecided: Prepare) -> None:
    identity = undecided("o-1")
    (topic,) = [one["name"] for one in run("topics", "list", "--json").json]
    refused = run("topics", "delete", topic)
    assert (refused.code, "undecided half messages: 1" in refused.err) == (Exit.REJECTED, True)
    would = run("topics", "delete", topic, "--force", "--dry-run").out
    assert "no, it would be" in would
    (gone,) = run("topics", "delete", topic, "--force", "--why", "moved", "--json").json
    assert (gone["deleted"], gone["rolled_back"]) == (True, 1)
    assert run("transactions", "show", identity, "--json").json["state"] == "rolled_back"
    assert "create it with `escrowmq topics create NAME`" in run("send", topic, "again").err
    assert run("topics", "create", topic).code == Exit.OK
    assert run("send", topic, "again").code == Exit.OK
