"""Transactions, and decisions by an operator; producer groups, and writers of numbered batches."""

from __future__ import annotations

from typing import Any, Literal, Unpack

from escrowmq.client import entries
from escrowmq.client.admin.asking import Asking, given, single, with_body
from escrowmq.client.altering import ProducersChanges, producers_request, signed
from escrowmq.client.entries import UndecidedTransactions
from escrowmq.client.links.answers import Listing
from escrowmq.client.producing.own_ids import AnyTransactionId
from escrowmq.errors import Code
from escrowmq.message.names import check_name
from escrowmq.wire.actions import producers, transactions, writers

Outcome = Literal["commit", "rollback"]


class TransactionsAdmin(Asking):
    """Transactions, producer groups and writers. See :class:`escrowmq.client.admin.Admin`."""

    def transactions(
        self,
        state: str | None = None,
        group: str | None = None,
        older_than: float | None = None,
        limit: int | None = None,
        *,
        cause: str | None = None,
    ) -> Listing[entries.Transaction]:
        """Return the transactions in a ``state`` ("open", "parked", ...), of a producer group, prepared at least
        ``older_than`` seconds ago, undecided for a ``cause`` (see :meth:`transactions_summary`); None: any. At most
        ``limit`` per broker."""
        request = given(transactions.List, state=state, group=group, older_than=older_than, cause=cause)
        return self._pages(transactions.LIST(request), "transactions", limit)

    def transactions_summary(self, group: str | None = None, *, samples: int = 3) -> Listing[UndecidedTransactions]:
        """Summarize the undecided transactions of each producer group (or of this one) by cause: counts, ages,
        number of checks, and the ``samples`` oldest of each cause."""
        request = given(transactions.Summarize, group=group, samples=samples)
        return self._pages(transactions.SUMMARY(request), "groups", None)

    def transaction(
        self, transaction_id: AnyTransactionId, *, bodies: bool = False, why: str | None = None
    ) -> entries.TransactionDetails:
        """Return one transaction, its messages (with ``body``) and its timeline.

        If it was rolled back or has expired, bodies are None and ``withheld`` is true. ``bodies`` requests them, which
        is recorded as an operator action, with ``why``, and refused by a data folder without its broker. Raises
        UNKNOWN_TRANSACTION or WRONG_SHARD.
        """
        identity, number = self._find(transaction_id)
        answer: Any = self._ask(number, transactions.SHOW({"id": str(identity)}))
        if bodies and any(message.get("withheld") for message in answer["messages"]):
            request = transactions.Reveal(id=str(identity))
            revealed = self._ask(number, transactions.REVEAL(signed(request, why)))
            texts = {one["position"]: one["body_base64"] for one in revealed["bodies"]}
            answer["messages"] = [one | {"body_base64": texts.get(one["position"])} for one in answer["messages"]]
        details: entries.TransactionDetails = answer
        details["messages"] = [with_body(message) for message in answer["messages"]]
        return details

    def commit(self, transaction_id: AnyTransactionId, *, why: str | None = None, group: str | None = None) -> Code:
        """Commit a transaction, as a recorded operator action. Returns COMMITTED or ALREADY_COMMITTED; raises CONFLICT
        if it was rolled back.

        The id is the transaction's, or a text that a producer gave as ``message_id`` to a half message of it, in
        producer group ``group`` (None: in any). Raises UNKNOWN_TRANSACTION if there is none, BAD_ARGUMENT, which names
        them, if there are several.
        """
        return self._settle(transaction_id, "commit", why, group)

    def rollback(self, transaction_id: AnyTransactionId, *, why: str | None = None, group: str | None = None) -> Code:
        """Roll back a transaction, as a recorded operator action. Returns ROLLED_BACK or ALREADY_ROLLED_BACK; raises
        CONFLICT if it was committed. Ids as for :meth:`commit`."""
        return self._settle(transaction_id, "rollback", why, group)

    def recheck(self, transaction_id: AnyTransactionId, *, why: str | None = None, group: str | None = None) -> Code:
        """Open a parked transaction again, with new checks, as a recorded operator action. Raises TRANSACTION_DECIDED
        and so on. Ids as for :meth:`commit`."""
        identity, number = self._find(transaction_id, group)
        return single(self._ask(number, transactions.RECHECK(signed(transactions.Recheck(ids=[str(identity)]), why))))

    def _settle(
        self,
        transaction_id: AnyTransactionId,
        outcome: Literal["commit", "rollback"],
        why: str | None,
        group: str | None,
    ) -> Code:
        identity, number = self._find(transaction_id, group)
        request = transactions.Settle(ids=[str(identity)], outcome=outcome)
        return single(self._ask(number, transactions.SETTLE(signed(request, why))))

    def producers(self) -> Listing[entries.Producer]:
        """Return all producer groups, each with the number of its undecided transactions and of its connected
        sessions."""
        return self._rows(producers.LIST({}), "producers")

    def alter_producers(
        self, group: str, *, why: str | None = None, **changes: Unpack[ProducersChanges]
    ) -> Listing[entries.AlteredProducers]:
        """Give a producer group rules of its own, at every broker; it is made if it does not exist. Rules that are not
        given stay as they are, those in ``reset`` become the broker's again. They apply to undecided transactions, too.

        ``kind="plain"`` corrects a group that was used for transactions by mistake. Raises BAD_GROUP_NAME, BAD_REQUEST,
        BAD_DELAY for a time over ``half_retention``. Returns the group's own rules.
        """
        check_name(group, Code.BAD_GROUP_NAME)
        return self._rows(producers.ALTER(signed(producers_request(group, changes), why)), None)

    def writers(self, limit: int | None = None) -> Listing[entries.Writer]:
        """List writers of numbered batches (Spark queries, writes with a ``write_id``), ``limit`` per broker."""
        return self._pages(writers.LIST({}), "writers", limit)

    def forget_writer(self, writer: str, *, why: str | None = None) -> Listing[entries.ForgottenWriter]:
        """Forget a writer (as listed, or its query id or ``write_id``) and its producer group at every broker. If it
        writes again, its next batch counts, whatever its number is. Raises NOT_FOUND, CONFLICT while it has undecided
        transactions."""
        return self._rows(writers.FORGET(signed(writers.Forget(writer=writer), why)), None, Code.NOT_FOUND)
