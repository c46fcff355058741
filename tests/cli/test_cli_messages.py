"""Topics, send, tail and lookup."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from cli_runs import Run

import escrowmq as mq
from damaging import flip
from escrowmq.cli.failures import Exit


def test_a_topic_is_made_and_listed(run: Run) -> None:
    assert run("topics", "create", "orders", "--queues", "2", "--json").json[0] == {"name": "orders", "queues": 2}
    (topic,) = run("topics", "list", "--json").json
    assert topic["name"] == "orders"
    assert [(q["queue"], q["head"], q["end"]) for q in topic["queues"]] == [(0, 0, 0), (1, 0, 0)]
    assert "orders" in run("topics", "list").out


def test_a_topic_is_made_once(run: Run) -> None:
    run("topics", "create", "orders")
    again = run("topics", "create", "orders")
    assert again.code == Exit.REJECTED
    assert again.err.startswith("ALREADY_EXISTS")
    assert run("topics", "create", "orders", "--may-exist").code == 0


@pytest.mark.usefixtures("made")
def test_an_empty_list_is_a_list(run: Run) -> None:
    assert run("topics", "list", "--json").json == []
    told = run("topics", "list")
    assert (told.out, told.err) == ("", "no topics yet\n")


def test_a_sent_message_is_read_back_whole(run: Run) -> None:
    sent = run("send", "orders", "one böok", "-k", "o-1", "-t", "paid", "-p", "a=b", "-p", "c=d=e", "--json")
    (receipt,) = sent.lines
    assert set(receipt) == {"message_id", "topic", "queue", "offset", "position"}
    (row,) = run("tail", "orders", "--json").lines
    assert (row["body"], row["key"], row["tag"]) == ("one böok", "o-1", "paid")
    assert row["properties"] == {"a": "b", "c": "d=e"}
    assert (row["message_id"], row["offset"], row["position"]) == (
        receipt["message_id"],
        receipt["offset"],
        receipt["position"],
    )
    assert row["transaction"] is None


def test_bodies_come_from_files_and_standard_input(run: Run, tmp_path: Path) -> None:
    content = bytes(range(256))
    (tmp_path / "body").write_bytes(content)
    assert run("send", "files", "--file", str(tmp_path / "body")).code == 0
    assert run("send", "files", "-", input=b"from input").code == 0
    assert run("send", "files", "--lines", input=b"one\ntwo\n").code == 0
    rows = run("tail", "files", "--json").lines
    assert {row["body"] for row in rows} == {None, "from input", "one", "two"}
    assert [row["body_base64"] for row in rows if row["body"] is None]


@pytest.mark.invariant("I9")
def test_many_messages_are_numbered(run: Run) -> None:
    receipts = run("send", "orders", "book {n}", "-k", "o-{n}", "--id", "id-{n}", "-c", "30", "--json").lines
    assert len({r["message_id"] for r in receipts}) == 30
    rows = run("tail", "orders", "--json", "--from-start").lines
    assert {(row["key"], row["body"]) for row in rows} == {(f"o-{n}", f"book {n}") for n in range(30)}
    again = run("send", "orders", "book {n}", "-k", "o-{n}", "--id", "id-{n}", "-c", "30", "--json").lines
    assert again == receipts, "the same ids give the same receipts"


def test_a_single_message_keeps_its_braces(run: Run) -> None:
    run("send", "orders", '{"n": {n}}')
    assert run("tail", "orders", "--json").lines[0]["body"] == '{"n": {n}}'


@pytest.mark.invariant("I21")
def test_a_delayed_message_has_no_place_yet(run: Run) -> None:
    (receipt,) = run("send", "orders", "later", "--delay", "1h", "--json").lines
    assert receipt["offset"] is None
    assert run("tail", "orders", "--json").lines == []


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("send", "bad/topic", "x"), Exit.REJECTED, "BAD_TOPIC_NAME"),
        (("send", "orders", "x", "-p", "novalue"), Exit.USAGE, "NAME=VALUE"),
        (("send", "orders", "x", "--delay", "soon"), Exit.USAGE, "--delay"),
        (("send", "orders", "x", "--file", "f"), Exit.USAGE, "one of them"),
        (("send", "orders", "--file", "absent"), Exit.USAGE, "cannot read absent"),
        (("send", "orders", "x", "--id", "one", "-c", "2"), Exit.USAGE, "{n}"),
        (("send", "orders", "x", "-c", "0"), Exit.USAGE, "--count"),
        (("send", "orders", "x", "-k", "k" * 2000), Exit.REJECTED, "KEY_TOO_LARGE"),
        (("send", "orders", "x", "-q", "99"), Exit.REJECTED, "BAD_QUEUE"),
        (("tail", "nothing"), Exit.REJECTED, "UNKNOWN_TOPIC"),
        (("tail", "%nothing"), Exit.REJECTED, "UNKNOWN_TOPIC"),
        (("tail", "%dead-letters.nobody"), Exit.REJECTED, "UNKNOWN_GROUP"),
        (("lookup",), Exit.USAGE, "by key or by id"),
        (("lookup", "k", "--id", "i"), Exit.USAGE, "by key or by id"),
        (("topics", "create", "bad/topic"), Exit.REJECTED, "BAD_TOPIC_NAME"),
        (("topics", "list", "--url", "http://x"), Exit.USAGE, "BAD_URL"),
        (("no-such-command",), Exit.USAGE, "no-such-command"),
    ],
)
@pytest.mark.usefixtures("made")
def test_what_is_wrong_is_said_and_has_its_exit_code(run: Run, words: tuple[str, ...], code: Exit, told: str) -> None:
    ran = run(*words)
    assert (ran.code, told in ran.err) == (code, True), ran
    assert ran.out == ""


def test_tail_shows_the_last_ones_or_all(run: Run) -> None:
    run("send", "orders", "m{n}", "-c", "25", "-q", "0")
    assert [row["offset"] for row in run("tail", "orders", "--json").lines] == list(range(15, 25))
    assert [row["offset"] for row in run("tail", "orders", "-n", "3", "--json").lines] == [22, 23, 24]
    assert [row["offset"] for row in run("tail", "orders", "-n", "3", "-s", "--json").lines] == [0, 1, 2]
    assert len(run("tail", "orders", "-s", "--json").lines) == 25
    assert run("tail", "orders", "-q", "1", "-s", "--json").lines == []
    assert run("tail", "orders", "-q", "9").code == Exit.REJECTED
    assert len(run("tail", "orders").out.splitlines()) == 10


def test_tail_takes_nothing_away(run: Run, bus: mq.Bus) -> None:
    run("send", "orders", "stay")
    run("tail", "orders")
    with bus.consumer("cart", ["orders"]) as consumer:
        (message,) = consumer.receive(10, wait=60)
        assert message.body == b"stay"


def test_the_views_show_half_messages_and_decisions(run: Run, undecided: Callable[[str], str]) -> None:
    kept, dropped = undecided("o-1"), undecided("o-2")
    assert run("tail", "orders", "--json").lines == [], "not visible before its commit"
    run("transactions", "commit", kept)
    run("transactions", "rollback", dropped)
    halves = run("tail", "%half", "--json").lines
    assert [(h["transaction"], h["state"], h["key"]) for h in halves] == [
        (kept, "committed", "o-1"),
        (dropped, "rolled_back", "o-2"),
    ]
    decisions = run("tail", "%op", "--json").lines
    assert [(d["transaction"], d["state"], d["decided_by"]) for d in decisions] == [
        (kept, "committed", "operator"),
        (dropped, "rolled_back", "operator"),
    ]
    assert [d["half_position"] for d in decisions] == [h["position"] for h in halves]
    assert kept in run("tail", "%half").out
    assert dropped in run("tail", "%op").out


def test_acknowledgements_are_shown(run: Run, bus: mq.Bus) -> None:
    run("send", "orders", "one", "-q", "0")
    with bus.consumer("cart", ["orders"]) as consumer:
        (message,) = consumer.receive(10, wait=60)
        message.ack()
    (ack,) = run("tail", "%acks", "--json").lines
    assert (ack["group"], ack["topic"], ack["queue"], ack["start"], ack["count"]) == ("cart", "orders", 0, 0, 1)
    assert ack["attempt"] == 1
    assert f"cart orders/0 0 attempt=1 lease={ack['lease']}" in run("tail", "%acks").out


def test_control_characters_of_others_do_not_reach_the_terminal(run: Run) -> None:
    run("send", "orders", "\x1b[31mred [bold]x[/]", "-k", "\x07key")
    shown = run("tail", "orders").out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[bold]x[/]" in shown


def test_lookup_finds_by_key_and_id_wherever_a_message_stands(run: Run, undecided: Callable[[str], str]) -> None:
    run("send", "orders", "plain", "-k", "o-1", "--id", "mine")
    transaction = undecided("o-1")
    found = run("lookup", "o-1", "--json").json
    assert [(m["state"], m["transaction"]) for m in found] == [("open", transaction), ("plain", None)]
    assert found[0]["body"] == "body of o-1"
    (by_id,) = run("lookup", "--id", "mine", "--json").json
    assert by_id["body"] == "plain"
    assert run("lookup", "--id", found[0]["message_id"], "--json").json == found[:1]
    assert len(run("lookup", "o-1", "-n", "1", "--json").json) == 1
    assert transaction in run("lookup", "o-1").out
    assert "body of o-1" in run("lookup", "--id", found[0]["message_id"]).out


@pytest.mark.usefixtures("made")
def test_nothing_found_is_an_exit_code(run: Run) -> None:
    none = run("lookup", "absent", "--json")
    assert (none.code, none.json) == (Exit.FINDING, [])
    assert run("lookup", "absent").err == "nothing found\n"


def test_tail_shows_what_is_asked_for(run: Run, undecided: Callable[[str], str]) -> None:
    for n in range(12):
        run("send", "orders", str(n), "-k", f"k{n % 2}", "-t", "paid" if n == 3 else "open")
    undecided("o-1")
    undecided("o-2")
    assert [row["body"] for row in run("tail", "orders", "--key", "k1", "--json").lines] == [
        "1",
        "3",
        "5",
        "7",
        "9",
        "11",
    ]
    assert [row["body"] for row in run("tail", "orders", "--tag", "paid", "--json").lines] == ["3"]
    assert len(run("tail", "orders", "--tag", "paid", "--tag", "open", "-s", "--json").lines) == 12
    assert len(run("tail", "orders", "--since", "1h", "-n", "20", "--json").lines) == 12
    assert [row["key"] for row in run("tail", "%half", "--key", "o-2", "--json").lines] == ["o-2"]
    assert run("tail", "%op", "--key", "o-2").code == Exit.REJECTED


def test_a_damaged_message_is_shown_without_content(run: Run, url: str) -> None:
    folder = Path(url.removeprefix("file:"))
    with mq.connect(f"file:{folder}", segment_bytes=1 << 12, default_queues=1) as bus:
        bus.producer("p").send_batch([mq.Message("orders", b"body %d." % n, key=f"k{n}") for n in range(3)]).check()
        bus.producer("p").send("filler", bytes(5000))
    segment, _ = flip(folder, b"body 1.")
    again = mq.connect(f"file:{folder}", segment_bytes=1 << 12, default_queues=1)
    with again as bus, bus.consumer("cart", "orders") as consumer:
        assert [message.key for message in islice(consumer.messages(idle_timeout=60), 2)] == ["k0", "k2"]
    rows = run("tail", "orders", "--json").lines
    assert [row["body"] for row in rows] == ["body 0.", None, "body 2."]
    assert segment in rows[1]["damaged"]
    assert "damaged" not in rows[0]
    assert "key=k1 damaged: " + segment in run("tail", "orders").out
    assert "(damaged: " in run("lookup", "k1").out
    assert "(damaged: " in run("dead-letters", "show", "cart", "orders/0/1").out
    (letter,) = run("dead-letters", "list", "cart", "--json").json
    assert (letter["key"], letter["attempts"], letter["cause"][:8]) == ("k1", 0, "DAMAGED:")
    assert run("tail", "%dead-letters.cart", "--json").lines[0]["damaged"] == rows[1]["damaged"]
    retried = run("dead-letters", "retry", "cart", "orders/0/1", "--json")
    assert (retried.code, retried.json["settled"]) == (Exit.FINDING, 0)
