"""send_tx, claim_tx and bind_tx inside ``transaction.atomic``, and what Django makes of their errors."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import Any

import django_project
import pytest
from django.core.management import call_command
from django.db import DatabaseError, IntegrityError, connection, transaction
from till_app.models import Effect, Order

import escrowmq as mq
from escrowmq import django as escrow
from escrowmq import outbox
from escrowmq.django.models import OutboxMessage
from escrowmq.errors import Code, Fenced, Misuse, Rejected
from escrowmq.outbox import inbox

ONE = bytes.fromhex("01" * 16)
BODIES = (b"", b"\x00\xff'\"\\%s:x", "ключ 😀".encode())


def place(number: int, *, fails: bool = False) -> None:
    with transaction.atomic():
        Order.objects.create(id=number)
        escrow.send_tx("orders", b"placed", key=str(number))
        if fails:
            raise LookupError


def agree() -> set[str]:
    """Each order has exactly one message, and each message its order; their ids."""
    business = sorted(str(number) for number in Order.objects.values_list("id", flat=True))
    assert sorted(OutboxMessage.objects.values_list("key", flat=True)) == business
    return set(business)


@pytest.mark.usefixtures("site")
def test_a_message_is_there_if_and_only_if_the_block_commits() -> None:
    place(1)
    with pytest.raises(LookupError):
        place(2, fails=True)
    with transaction.atomic():
        place(3)
        with pytest.raises(LookupError):
            place(4, fails=True)  # a savepoint is rolled back, and takes its message along
        place(5)
    with suppress(LookupError), transaction.atomic():
        place(6)
        raise LookupError
    assert agree() == {"1", "3", "5"}


@pytest.mark.usefixtures("site")
def test_content_is_stored_as_it_is() -> None:
    with transaction.atomic():
        ids = escrow.send_batch_tx([mq.Message("orders", body, key="k%s", tag="t") for body in BODIES])
        ids.append(escrow.send_tx("orders", b"x", message_id=ONE, properties={"a": "%s"}, delay=2.5))
    rows = list(OutboxMessage.objects.order_by("seq"))
    assert [bytes(row.message_id) for row in rows] == ids
    assert [bytes(row.body) for row in rows] == [*BODIES, b"x"]
    assert [row.key for row in rows] == ["k%s"] * 3 + [None]
    assert (rows[3].properties, rows[3].delay_us) == ('{"a":"%s"}', 2_500_000)
    engine = escrow.engine_of()
    assert [row.id for row in outbox.attention.list_messages(engine, state=None)] == ids


@pytest.mark.usefixtures("site")
def test_without_an_atomic_block_nothing_is_written() -> None:
    calls = (
        lambda: escrow.send_tx("orders", b"x"),
        lambda: escrow.send_batch_tx([mq.Message("orders", b"x")]),
        lambda: escrow.claim_tx(group="cart", message_id=ONE),
        lambda: escrow.claim_batch_tx([ONE], "cart"),
        lambda: escrow.bind_tx(ONE.hex()),
    )
    for call in calls:
        with pytest.raises(Misuse) as caught:
            call()
        assert caught.value.code is Code.NO_TRANSACTION
    assert not OutboxMessage.objects.exists()


@pytest.mark.usefixtures("site")
def test_a_broken_block_takes_nothing_more() -> None:
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(Misuse) as caught:
            escrow.send_tx("orders", b"x")
    assert caught.value.code is Code.NO_TRANSACTION
    assert not OutboxMessage.objects.exists()


@pytest.mark.usefixtures("empty")
def test_missing_tables_are_named() -> None:
    with pytest.raises(Misuse) as caught, transaction.atomic():
        escrow.send_tx("orders", b"x")
    assert caught.value.code is Code.NO_TABLES


@pytest.mark.usefixtures("site")
def test_an_id_names_one_message() -> None:
    place(1)
    with transaction.atomic():
        escrow.send_tx("orders", b"x", message_id=ONE)

    @transaction.atomic
    def place_again() -> None:
        Order.objects.create(id=2)
        escrow.send_tx("orders", b"y", message_id=ONE)

    with pytest.raises(Rejected) as caught:
        place_again()
    assert caught.value.code is Code.MESSAGE_ID_TAKEN
    assert not Order.objects.filter(id=2).exists()
    place(3)  # the connection is as good as before


@pytest.mark.usefixtures("site")
def test_other_errors_of_the_database_are_djangos() -> None:
    with pytest.raises(DatabaseError) as caught, transaction.atomic(), escrow.connection() as lent:
        lent.exec_driver_sql("SELECT * FROM no_such_thing")
    assert type(caught.value).__module__ == "django.db.utils"
    Order.objects.create(id=1, number=7)
    with pytest.raises(IntegrityError), transaction.atomic(), escrow.connection() as lent:
        lent.exec_driver_sql("INSERT INTO till_app_order (id, number) VALUES (2, 7)")
    place(3)


@pytest.mark.usefixtures("site")
def test_the_wrapper_neither_commits_nor_closes() -> None:
    with suppress(LookupError), transaction.atomic():
        Order.objects.create(id=1)
        with escrow.connection() as lent:
            lent.commit()
            lent.close()
        Order.objects.create(id=2)
        raise LookupError
    assert not Order.objects.exists()


@pytest.mark.usefixtures("site")
def test_the_first_claim_is_true_and_every_repeat_false() -> None:
    with suppress(LookupError), transaction.atomic():
        assert escrow.claim_tx(group="cart", message_id=ONE, topic="orders")
        raise LookupError
    for first in (True, False):
        with transaction.atomic():
            assert escrow.claim_tx(group="cart", message_id=ONE, topic="orders") is first
            assert escrow.claim_tx(group="cart", message_id=ONE, topic="orders") is False
    with transaction.atomic():
        others = [bytes([number]) * 16 for number in range(1, 4)]
        assert escrow.claim_batch_tx(others, "cart") == [False, True, True]


@pytest.mark.usefixtures("site")
def test_messages_are_handled_once_in_djangos_transaction(bus: mq.Bus) -> None:
    bus.producer("shop").send_batch([mq.Message("orders", b"x", key=str(number)) for number in range(20)]).check()

    def handle(_: Any, message: mq.Received) -> None:
        Effect.objects.create(order=int(message.key or 0))

    received: list[int] = []
    count = lambda _, messages: received.append(len(messages))  # noqa: E731
    for rounds, expected in ((1, 20), (2, 0)):
        effects = 0
        with bus.consumer("cart", ["orders"]) as consumer:
            while sum(received) < 20 * rounds:
                effects += inbox.consume(consumer, escrow.Database(), handle, idle_timeout=0.3, within=count)
        assert effects == expected
        bus.admin.reset_group("cart", to="earliest")
    assert sum(received) == 40
    assert sorted(Effect.objects.values_list("order", flat=True)) == list(range(20))


@pytest.mark.usefixtures("site")
def test_a_half_message_stands_and_falls_with_the_block(bus: mq.Bus) -> None:
    producer = bus.producer("shop", checker=escrow.barrier())
    for number, fails in ((1, False), (2, True)):
        with suppress(LookupError), producer.transaction() as txn:
            txn.send("orders", b"placed", key=str(number))
            with transaction.atomic():
                Order.objects.create(id=number)
                escrow.bind_tx(txn)
                if fails:
                    raise LookupError
    with suppress(LookupError), producer.transaction() as txn:
        txn.send("orders", b"placed", key="3")
        with transaction.atomic():
            Order.objects.create(id=3)
            escrow.bind_tx(txn)
        raise LookupError  # too late: the database has committed, so the message is committed
    with bus.consumer("cart", ["orders"]) as consumer:
        keys = {message.key for message in islice(consumer.messages(idle_timeout=60.0), 2)}
        keys |= {message.key for message in consumer.messages(idle_timeout=0.3)}
    assert keys == {str(number) for number in Order.objects.values_list("id", flat=True)} == {"1", "3"}


@pytest.mark.usefixtures("site")
def test_a_block_that_is_late_cannot_commit(bus: mq.Bus) -> None:
    barrier = escrow.barrier()
    txn = bus.producer("shop", checker=barrier).transaction()
    txn.send("orders", b"placed")
    assert txn.id is not None
    assert barrier.decide(txn.id) is mq.Outcome.ROLLBACK
    with transaction.atomic():
        Order.objects.create(id=1)
        with pytest.raises(Fenced) as caught:
            escrow.bind_tx(txn.id)
        # the exception is swallowed here, and the block ends without an error
    assert caught.value.code is Code.LATE_COMMIT
    assert not Order.objects.exists()
    with transaction.atomic():
        Order.objects.create(id=2)
        with transaction.atomic():
            Order.objects.create(id=3)
            with pytest.raises(Fenced):
                escrow.bind_tx(txn.id)
        Order.objects.create(id=4)  # outside of the savepoint that failed
    assert sorted(Order.objects.values_list("id", flat=True)) == [2, 4]


def test_a_database_in_memory_has_messages_in_the_same_transaction() -> None:
    """As in a ``TestCase`` of the user: no other connection is opened."""
    django_project.use_database("sqlite:///:memory:")
    call_command("migrate", "escrowmq", verbosity=0)
    with transaction.atomic():
        escrow.send_tx("orders", b"x")
        assert escrow.claim_tx(group="cart", message_id=ONE)
        assert OutboxMessage.objects.count() == 1
        transaction.set_rollback(True)
    assert not OutboxMessage.objects.exists()
    connection.connection.close()  # Django keeps one in memory open
