"""Bank B: gives the money, once, however often it is told."""

import json
from collections.abc import Iterable

import sqlalchemy as sa
from bank_a import DONE
from bank_tables import accounts_b, credits

import escrowmq as mq
from escrowmq.outbox import claim_tx, confirm_tx
from escrowmq.platform.failpoints import reach

CONSUMERS = "bank-b"


def receive(bank: sa.Engine, messages: Iterable[mq.Received], call_back: bool) -> None:
    """Credit what comes in, until the consumer is closed."""
    for message in messages:
        reach("bank-b.received")
        try:
            take(bank, message, call_back)
        except sa.exc.DBAPIError as problem:  # a deadlock, a database that is away: nothing stands, it comes again
            message.nack(cause=str(problem))
            continue
        reach("bank-b.committed")
        message.ack()
        reach("bank-b.acknowledged")


def take(bank: sa.Engine, message: mq.Received, call_back: bool) -> None:
    """Mark and credit in one transaction: a message that comes again finds the mark."""
    with bank.begin() as connection:
        if claim_tx(connection, message, group=CONSUMERS):
            reach("bank-b.claimed")
            credit(connection, json.loads(message.body))
            if call_back:  # through this bank's own message table: it arrives if and only if the credit stands
                confirm_tx(connection, message, to=DONE)
        reach("bank-b.credited")


def credit(connection: sa.Connection, transfer: dict) -> None:
    """Give the money."""
    line = {"transfer_id": transfer["transfer_id"], "user_id": transfer["payee"], "amount": transfer["amount"]}
    connection.execute(sa.insert(credits).values(line))
    payee = accounts_b.c.user_id == transfer["payee"]
    give = sa.update(accounts_b).where(payee).values(amount=accounts_b.c.amount + transfer["amount"])
    if connection.execute(give).rowcount != 1:
        raise LookupError(f"bank B has no account {transfer['payee']}")
