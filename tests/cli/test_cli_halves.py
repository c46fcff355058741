"""``escrowmq prepare``, ``commit`` and ``rollback``: a half message seen from the command line."""

from collections.abc import Callable
from typing import Any

from cli_runs import Run

import escrowmq as mq
from escrowmq.cli.failures import Exit
from escrowmq.cli.halves import GROUP


def test_a_half_message_is_invisible_until_its_commit(run: Run) -> None:
    prepared = run("prepare", "orders", "one book", "--key", "o-1", "--tag", "paid", "-p", "shop=north")
    transaction = prepared.out.strip()
    assert prepared.code == 0
    assert f"escrowmq commit {transaction}" in prepared.err
    assert "do not receive it" in prepared.err
    assert run("tail", "orders", "--from-start").out == ""
    assert run("commit", transaction).err == f"{transaction}  COMMITTED\n"
    (message,) = run("tail", "orders", "--json").lines
    assert (message["body"], message["key"], message["tag"]) == ("one book", "o-1", "paid")
    assert message["properties"]["shop"] == "north"
    again = run("commit", transaction, "--json")
    assert again.lines == [{"transaction": transaction, "result": "ALREADY_COMMITTED"}]
    assert run("rollback", transaction).code == Exit.REJECTED


def test_a_rolled_back_message_is_never_visible(run: Run) -> None:
    transaction = run("prepare", "orders", "-", input=b"from a pipe").out.strip()
    assert run("rollback", transaction).err == f"{transaction}  ROLLED_BACK\n"
    assert run("tail", "orders", "--from-start").out == ""
    assert run("commit", transaction).code == Exit.REJECTED


def test_an_id_of_ones_own_names_message_and_transaction(run: Run) -> None:
    first, again = (run("prepare", "orders", "x", "--message-id", "order-17", "--json").lines[0] for _ in range(2))
    assert first == again, "prepared again, it makes no second message"
    assert "order-17  COMMITTED" in run("commit", "order-17").err
    assert len(run("tail", "orders", "--json").lines) == 1
    assert run("commit", "order-18").code == Exit.REJECTED


def test_the_group_is_that_of_the_transaction(run: Run) -> None:
    run("send", "orders", "plain")
    transaction = run("prepare", "orders", "x", "--group", "shop").out.strip()
    assert "WRONG_GROUP" in run("commit", transaction, "--group", GROUP).err
    assert run("commit", transaction).code == 0
    (found,) = run("transactions", "list", "--json").json
    assert (found["group"], found["decided_by"]) == ("shop", "producer")


def test_a_program_of_the_group_answers_the_check_back(run: Run, url: str) -> None:
    transaction = run("prepare", "orders", "x", "--group", "shop").out.strip()
    with mq.connect(url, transaction_timeout=0.1, check_interval=0.1) as bus:
        bus.producer("shop", checker=lambda check: mq.COMMIT).wait_until_listening()
        message = next(iter(bus.consumer("cart", "orders")))
        assert message.body == b"x"
    assert run("transactions", "show", transaction, "--json").json["state"] == "committed"


def test_undecided_and_unanswered_it_is_parked_and_open_to_a_decision(
    run: Run, url: str, eventually: Callable[..., Any]
) -> None:
    transaction = run("prepare", "orders", "x", "--group", "shop").out.strip()
    with mq.connect(url, transaction_timeout=0.05, check_interval=0.05, check_max=1) as bus:
        asked = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
        asked.wait_until_listening()
        eventually(lambda: bus.admin.transaction(transaction)["state"] == "parked")
    assert run("tail", "orders", "--from-start").out == ""
    assert run("commit", transaction).code == 0
    assert len(run("tail", "orders", "--json").lines) == 1


def test_deciding_makes_no_folder(run: Run) -> None:
    assert "NOT_A_DATA_FOLDER" in run("commit", "order-17").err
    assert "NOT_A_DATA_FOLDER" in run("rollback", "9f3a01c2-3-2a").err
