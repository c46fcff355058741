"""Bank A: takes the money and says so, in one transaction. Two ways to say it."""

import json
from dataclasses import dataclass

import sqlalchemy as sa
from bank_tables import accounts_a, debits

import escrowmq as mq
from escrowmq.outbox import bind_tx, send_tx
from escrowmq.platform.failpoints import reach

TRANSFERS = "transfers"
DONE = "transfers.done"
PRODUCERS = "bank-a"


@dataclass(frozen=True)
class Transfer:
    """Money from an account of bank A to an account of bank B."""

    transfer_id: str
    payer: str
    payee: str
    amount: int

    def message(self, message_id: str | None = None) -> mq.Message:
        """What bank B is told. The key keeps a payer's transfers in order."""
        body = json.dumps({"transfer_id": self.transfer_id, "payee": self.payee, "amount": self.amount})
        return mq.Message(TRANSFERS, body.encode(), key=self.payer, message_id=message_id)


class Refused(Exception):
    """The payer has not that much: nothing was changed."""


def send_by_outbox(bank: sa.Engine, transfer: Transfer) -> None:
    """The local message table: debit and message are two rows of one transaction; a relay sends the message later."""
    with bank.begin() as connection:
        debit(connection, transfer)
        send_tx(connection, transfer.message(message_id=transfer.transfer_id))
        reach("bank-a.message-written")
    reach("bank-a.committed")


def send_by_barrier(bank: sa.Engine, producer: mq.Producer, transfer: Transfer) -> None:
    """The half message: first into escrow, then the debit; the broker asks the database whenever it is not told.

    The message has no id of ours: an attempt that was settled as rolled back stays so, and the next one is another
    message.
    """
    with producer.transaction() as txn:
        txn.send(transfer.message())
        reach("bank-a.escrowed")
        with bank.begin() as connection:
            bind_tx(connection, txn)
            debit(connection, transfer)
        reach("bank-a.committed")
    reach("bank-a.told")


def debit(connection: sa.Connection, transfer: Transfer) -> None:
    """Take the money. Raises Refused; IntegrityError if this transfer was made before."""
    connection.execute(
        sa.insert(debits).values(transfer_id=transfer.transfer_id, user_id=transfer.payer, amount=transfer.amount)
    )
    has_it = sa.and_(accounts_a.c.user_id == transfer.payer, accounts_a.c.amount >= transfer.amount)
    take = sa.update(accounts_a).where(has_it).values(amount=accounts_a.c.amount - transfer.amount)
    if connection.execute(take).rowcount != 1:
        raise Refused(transfer.transfer_id)
    reach("bank-a.debited")


def was_made(bank: sa.Engine, transfer: Transfer) -> bool:
    """Whether this transfer left the bank: what a bank that was restarted asks before it makes it again."""
    with bank.connect() as connection:
        same = debits.c.transfer_id == transfer.transfer_id
        return connection.scalar(sa.select(debits.c.transfer_id).where(same)) is not None
