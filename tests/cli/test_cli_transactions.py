"""Transactions, groups and dead letters, seen and settled by hand."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from cli_runs import Run

import escrowmq as mq
from escrowmq.cli.failures import Exit

Prepare = Callable[[str], str]


def test_listing_by_state_group_and_age(run: Run, undecided: Prepare) -> None:
    one, two = undecided("o-1"), undecided("o-2")
    run("transactions", "commit", one)
    listed = run("transactions", "list", "--json").json
    assert [(t["id"], t["state"], t["group"], t["messages"], t["checks"]) for t in listed] == [
        (one, "committed", "shop", 1, 0),
        (two, "open", "shop", 1, 0),
    ]
    assert [t["id"] for t in run("transactions", "list", "-s", "undecided", "--json").json] == [two]
    assert [t["id"] for t in run("transactions", "list", "-n", "1", "--json").json] == [one]
    assert run("transactions", "list", "--older-than", "1h", "--json").json == []
    assert len(run("transactions", "list", "-g", "shop", "--json").json) == 2
    assert two in run("transactions", "list").out


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("list", "-s", "nonsense"), Exit.REJECTED, "not a state"),
        (("list", "-g", "nobody"), Exit.REJECTED, "UNKNOWN_GROUP"),
        (("list", "--older-than", "long"), Exit.USAGE, "--older-than"),
        (("show", "nonsense"), Exit.REJECTED, "9f3a01c2-3-2a"),
        (("show", "1-1-1"), Exit.REJECTED, "WRONG_SHARD"),
        (("commit", "1-1-1"), Exit.REJECTED, "WRONG_SHARD"),
        (("commit",), Exit.USAGE, "--group"),
    ],
)
@pytest.mark.usefixtures("made")
def test_wrong_questions(run: Run, words: tuple[str, ...], code: Exit, told: str) -> None:
    ran = run("transactions", *words)
    assert (ran.code, told in ran.err) == (code, True), ran


def test_showing_one_tells_its_story(run: Run, undecided: Prepare) -> None:
    identity = undecided("o-1")
    run("transactions", "commit", identity)
    shown = run("transactions", "show", identity, "--json").json
    assert (shown["id"], shown["state"], shown["decided_by"]) == (identity, "committed", "operator")
    assert [(m["topic"], m["key"], m["body"]) for m in shown["messages"]] == [("orders", "o-1", "body of o-1")]
    assert [e["event"] for e in shown["timeline"]] == ["prepared", "committed"]
    text = run("transactions", "show", identity).out
    assert all(word in text for word in (identity, "committed", "prepared", "o-1", "by operator"))


@pytest.mark.invariant("I3", "I5")
def test_committing_makes_visible_and_the_first_decision_stands(run: Run, undecided: Prepare) -> None:
    identity = undecided("o-1")
    assert run("tail", "orders", "--json").lines == []
    assert run("transactions", "commit", identity, "--json").json == [
        {"id": identity, "result": "COMMITTED", "ok": True}
    ]
    assert [row["transaction"] for row in run("tail", "orders", "--json").lines] == [identity]
    assert run("transactions", "commit", identity, "--json").json[0]["result"] == "ALREADY_COMMITTED"
    late = run("transactions", "rollback", identity, "--json")
    assert (late.code, late.json[0]["result"], late.json[0]["ok"]) == (Exit.REJECTED, "CONFLICT", False)
    assert len(run("tail", "orders", "--json").lines) == 1


def test_each_of_several_has_its_own_result(run: Run, undecided: Prepare) -> None:
    good, gone = undecided("o-1"), undecided("o-2")
    run("transactions", "rollback", gone)
    both = run("transactions", "commit", gone, good)
    assert both.code == Exit.REJECTED
    assert "CONFLICT" in both.err
    assert "COMMITTED" in both.out
    assert run("transactions", "list", "-s", "committed", "--json").json[0]["id"] == good


def test_recheck_asks_anew_and_refuses_the_decided(run: Run, undecided: Prepare) -> None:
    identity = undecided("o-1")
    assert run("transactions", "recheck", identity, "--json").json[0]["ok"]
    run("transactions", "commit", identity)
    late = run("transactions", "recheck", identity, "--json")
    assert (late.code, late.json[0]["ok"]) == (Exit.REJECTED, False)


def test_members_and_fencing(run: Run, bus: mq.Bus) -> None:
    bus.producer("p").send_batch([mq.Message("orders", b"x", queue=0) for _ in range(5)]).check()
    consumer = bus.consumer("cart", "orders", instance="one", in_doubt="hold")
    assert len(consumer.receive(3, wait=60)) == 3
    (member,) = run("groups", "members", "cart", "--json").json
    assert (member["instance"], member["messages"]) == ("one", 3)
    assert "orders/0 0-2" in run("groups", "members", "cart").out
    assert "held" in run("groups", "show", "cart").out
    assert "3 messages went back" in run("groups", "fence", "cart", "one").out
    assert run("groups", "fence", "cart", "one", "--json").json["messages"] == 0
    assert "fenced" in run("groups", "members", "cart").out
    absent = run("groups", "fence", "cart", "two")
    assert absent.code != 0
    assert "NOT_FOUND" in absent.err


def test_groups_show_who_consumes_and_who_produces(run: Run, bus: mq.Bus, undecided: Prepare) -> None:
    undecided("o-1")
    run("send", "orders", "x", "-q", "0")
    with bus.consumer("cart", ["orders"], tags="paid") as consumer:
        assert consumer.receive(1) == []
    (group,) = run("groups", "list", "--json").json
    assert (group["name"], group["topics"], group["tags"], group["dead_letters"]) == ("cart", ["orders"], ["paid"], 0)
    assert run("groups", "show", "cart", "--json").json == [group]
    assert "cart" in run("groups", "show", "cart").out
    producers = {p["group"]: p for p in run("groups", "list", "--producers", "--json").json}
    assert (producers["shop"]["transactional"], producers["shop"]["open"]) == (True, 1)
    assert (producers["command-line"]["transactional"], producers["command-line"]["open"]) == (False, 0)
    assert "transactional" in run("groups", "list", "--producers").out
    absent = run("groups", "show", "carts")
    assert (absent.code, "did you mean 'cart'?" in absent.err) == (Exit.REJECTED, True)


def test_a_consumer_group_is_altered(run: Run, bus: mq.Bus) -> None:
    bus.consumer("cart", "orders", tags="paid")
    shown = run("groups", "show", "cart").out
    assert "after 1 s, doubled, at most 5 min; 16 deliveries" in shown
    assert "earliest" in shown
    changes = ["--topic", "orders", "--topic", "points", "--tags", "*", "--redelivery", "3x5min", "--ordered"]
    (altered,) = run("groups", "alter", "cart", *changes, "--json").json
    assert (altered["topics"], altered["tags"], altered["ordered"]) == (["orders", "points"], [], True)
    assert (altered["retry_delays"], altered["max_attempts"]) == ([300.0] * 3, 4)
    assert "after 5 min, 5 min, 5 min; 4 deliveries" in run("groups", "show", "cart").out
    assert (
        "at most 1 min; 3 deliveries"
        in run(
            "groups", "alter", "cart", "--retry-backoff", "1s", "--retry-backoff-max", "1min", "--max-attempts", "3"
        ).out
    )
    assert "16 deliveries" in run("groups", "alter", "cart", "--redelivery", "broker").out
    assert "any" in run("groups", "alter", "cart", "--any-order", "--in-doubt", "redeliver", "--start", "latest").out
    absent = run("groups", "alter", "carts", "--tags", "a")
    assert (absent.code, "UNKNOWN_GROUP" in absent.err) == (Exit.REJECTED, True)


def test_a_producer_group_is_altered(run: Run, undecided: Prepare) -> None:
    undecided("o-1")
    assert "producer group shop has its own rules: none" in run("groups", "alter-producers", "shop").out
    rules = ["--transaction-timeout", "1min", "--check-interval", "2min", "--check-max", "3", "--checks-exhausted"]
    (altered,) = run("groups", "alter-producers", "shop", *rules, "rollback", "--json").json
    own = {"transaction_timeout": 60.0, "check_interval": 120.0, "check_max": 3, "checks_exhausted": "rollback"}
    assert own.items() <= altered.items()
    assert "1 min, 3 x 2 min, rollback" in run("groups", "list", "--producers").out
    assert "kind plain" in run("groups", "alter-producers", "shop", "--kind", "plain").out
    assert run("send", "orders", "x", "--group", "shop").code == 0
    assert "check_max" not in run("groups", "alter-producers", "shop", "--reset", "check-max").out
    refused = run("groups", "alter-producers", "shop", "--kind", "both")
    assert (refused.code, "one of plain, transactional, mixed" in refused.err) == (Exit.REJECTED, True)


@pytest.fixture
def dead(run: Run, bus: mq.Bus) -> list[str]:
    """Two dead letters of the group ``cart``, as places."""
    run("send", "orders", "bad {n}", "-k", "o-{n}", "-q", "0", "-c", "2", "-p", "a=b")
    with bus.consumer("cart", ["orders"], max_attempts=1) as consumer:
        for message in islice(consumer.messages(idle_timeout=60), 2):
            message.nack(cause="cannot read it")
        consumer.flush()
    return ["orders/0/0", "orders/0/1"]


def test_dead_letters_are_listed_and_shown(run: Run, dead: list[str]) -> None:
    letters = run("dead-letters", "list", "cart", "--json").json
    assert [(x["place"], x["attempts"], x["cause"], x["key"]) for x in letters] == [
        (dead[0], 1, "cannot read it, attempt 1 of 1", "o-0"),
        (dead[1], 1, "cannot read it, attempt 1 of 1", "o-1"),
    ]
    assert dead[0] in run("dead-letters", "list", "cart").out
    shown = run("dead-letters", "show", "cart", dead[1], "--json").json
    assert (shown["body"], shown["properties"]) == ("bad 1", {"a": "b"})
    assert shown["cause"].startswith("cannot read it")
    assert [(one["event"], one["attempt"]) for one in shown["last_attempts"]] == [("dead", 1)]
    printed = run("dead-letters", "show", "cart", dead[1]).out
    assert "bad 1" in printed
    assert "attempt" in printed
    assert len(run("tail", "%dead-letters.cart", "--json").lines) == 2


def test_a_dead_letter_is_edited_and_delivered_again(run: Run, bus: mq.Bus, dead: list[str], tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"good")
    change = ("--body", str(tmp_path / "body"), "--key", "o-9", "--property", "c=d", "--without", "a", "--why", "typo")
    done = run("dead-letters", "edit", "cart", dead[0], *change, "--json").json
    with bus.consumer("cart", ["orders"], max_attempts=1) as consumer:
        (message,) = consumer.receive(10, wait=60)
        assert (message.body, message.key, message.message_id.hex()) == (b"good", "o-9", done["message_id"])
        assert dict(message.properties) == {"c": "d", "ESCROWMQ_EDITED_FROM": done["edited_from"]}
        message.ack()
        consumer.flush()
    assert run("dead-letters", "edit", "cart", dead[0], "--key", "x").code == Exit.REJECTED
    assert "in place of" in run("dead-letters", "edit", "cart", dead[1], "--key", "x").err
    assert run("acts", "list", "--act", "dead_letters.edit", "--json").json[0]["why"] == "typo"


def test_what_waits_is_summed_up(run: Run, bus: mq.Bus, dead: list[str]) -> None:
    (told,) = run("dead-letters", "summary", "--json").json
    assert [(one["cause"], one["count"]) for one in told["causes"]] == [("cannot read it", 2)]
    printed = run("dead-letters", "summary", "cart").out
    assert "cannot read it" in printed
    assert dead[0] in printed
    assert [x["place"] for x in run("dead-letters", "list", "cart", "--cause", "cannot read it", "--json").json] == dead
    assert run("dead-letters", "list", "cart", "--older-than", "1h", "--topic", "orders", "--json").json == []
    bus.producer("undecided", unasked=True).prepare("orders", b"half", check_immunity=3600.0)
    groups = run("transactions", "summary", "undecided", "--json").json
    assert [(one["state"], one["cause"], one["count"]) for one in groups[0]["causes"]] == [("open", "not_due", 1)]
    assert "the first check is not due yet" in run("transactions", "summary").out
    assert len(run("transactions", "list", "--cause", "not_due", "--json").json) == 1


@pytest.mark.invariant("I25")
def test_dead_letters_are_retried_or_discarded(run: Run, bus: mq.Bus, dead: list[str]) -> None:
    assert run("dead-letters", "retry", "cart", dead[0], "--json").json == {
        "group": "cart",
        "act": "retry",
        "settled": 1,
    }
    with bus.consumer("cart", ["orders"], max_attempts=1) as consumer:
        (message,) = consumer.receive(10, wait=60)
        assert message.body == b"bad 0"
        message.ack()
        consumer.flush()
    unasked = run("dead-letters", "discard", "cart", "--all")
    assert (unasked.code, dead[1] in unasked.out, "--yes" in unasked.err) == (Exit.USAGE, True, True)
    assert run("dead-letters", "discard", "cart", "--cause", "other", "--yes").code == Exit.REJECTED
    assert run("dead-letters", "discard", "cart", "--all", "--yes", "--json").json["outcomes"] == {"done": 1}
    assert run("dead-letters", "list", "cart", "--json").json == []
    again = run("dead-letters", "discard", "cart", dead[1])
    assert again.code == Exit.FINDING


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("list", "nobody"), Exit.REJECTED, "UNKNOWN_GROUP"),
        (("show", "cart", "orders/0/99"), Exit.REJECTED, "NOT_FOUND"),
        (("show", "cart", "orders"), Exit.USAGE, "TOPIC/QUEUE/OFFSET"),
        (("retry", "cart"), Exit.USAGE, "--all"),
        (("discard", "cart", "orders/0/0", "--all"), Exit.USAGE, "--all"),
    ],
)
def test_wrong_dead_letters(run: Run, dead: list[str], words: tuple[str, ...], code: Exit, told: str) -> None:
    ran = run("dead-letters", *words)
    assert (ran.code, told in ran.err) == (code, True), ran
    assert len(run("dead-letters", "list", "cart", "--json").json) == 2


def test_writers_are_listed_by_age_and_forgotten_by_hand(run: Run, bus: mq.Bus) -> None:
    assert "no writers yet" in run("writers", "list").err
    for name in ("old", "new"):
        producer = bus.producer(f"spark.{name}", checker=lambda check: mq.UNKNOWN)
        producer.commit_batch(name, 7, [])
    listed = run("writers", "list", "--json").json
    assert [(writer["group"], writer["batch"]) for writer in listed] == [("spark.old", 7), ("spark.new", 7)]
    assert "spark.old" in run("writers", "list").out
    assert "forgot producer group spark.old and its 1 sessions" in run("writers", "forget", "old").out
    assert run("writers", "forget", listed[1]["writer"], "--json").json[0]["group"] == "spark.new"
    absent = run("writers", "forget", "new")
    assert absent.code != 0
    assert "NOT_FOUND" in absent.err


def test_what_a_group_without_a_checker_left_open_is_found_and_ended(run: Run, bus: mq.Bus) -> None:
    producer = bus.producer("oneway", unasked=True, confirm="oneway")
    kept, dropped = (producer.prepare("orders", body, key="o-1") for body in (b"kept", b"dropped"))
    identities = [str(receipt.transaction_id) for receipt in (kept, dropped)]
    assert run("tail", "orders", "--json").lines == []
    listed = run("transactions", "list", "-s", "undecided", "-g", "oneway", "--json").json
    assert [(one["id"], one["checks"]) for one in listed] == [(identity, 0) for identity in identities]
    assert run("transactions", "commit", identities[0]).code == 0
    assert run("transactions", "rollback", identities[1]).code == 0
    assert producer.commit(dropped.transaction_id) is mq.Code.SENT
    assert producer.flush()
    assert producer.refused_ends == 1
    seen = run("tail", "orders", "--from-start", "--limit", "1", "--json").lines
    assert [(one["message_id"], one["key"], one["body"]) for one in seen] == [(kept.message_id.hex(), "o-1", "kept")]
    states = {one["message_id"]: one["state"] for one in run("lookup", "o-1", "--json").json}
    assert states == {kept.message_id.hex(): "committed", dropped.message_id.hex(): "rolled_back"}


def test_a_transaction_is_ended_by_the_id_of_its_message(bus: mq.Bus, run: Run) -> None:
    producer = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
    for number in range(2):
        producer.prepare("orders", b"", message_id=f"order-{number}")
    bus.close()
    ran = run("transactions", "commit", "order-0", "--group", "shop", "--json")
    assert (ran.code, [(one["id"], one["result"]) for one in ran.json]) == (0, [("order-0", "COMMITTED")])
    ran = run("transactions", "rollback", "order-1")
    assert ran.code == 0
    assert run("transactions", "commit", "order-7", "--group", "shop").code == Exit.REJECTED
