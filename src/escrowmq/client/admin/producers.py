"""Producer groups, and writers of numbered batches."""

from __future__ import annotations

from typing import Unpack

from escrowmq.client.admin.asking import Asking
from escrowmq.client.altering import ProducersChanges, producers_request, signed
from escrowmq.client.entries import AlteredProducers, ForgottenWriter, Producer, Writer
from escrowmq.client.links.answers import Listing
from escrowmq.errors import Code
from escrowmq.message.names import check_name
from escrowmq.wire.actions import producers, writers


class ProducersAdmin(Asking):
    """Producer groups, and writers of numbered batches. See :class:`escrowmq.client.admin.Admin`."""

    def producers(self) -> Listing[Producer]:
        """Return all producer groups, with what they have undecided."""
        return self._rows(producers.LIST({}), lambda answer: answer["producers"])

    def alter_producers(
        self, group: str, *, why: str | None = None, **changes: Unpack[ProducersChanges]
    ) -> Listing[AlteredProducers]:
        """Give a producer group rules of its own, at every broker; it is made if it does not exist. What is not given
        stays as it is, what ``reset`` names goes back to the broker's. They hold for all that is undecided from now on.

        ``kind="plain"`` puts a group right that somebody prepared under by mistake. Raises BAD_GROUP_NAME, BAD_REQUEST,
        BAD_DELAY for a time over ``half_retention``. The rules that the group has of its own now.
        """
        check_name(group, Code.BAD_GROUP_NAME)
        request = signed(producers_request(group, changes), why)
        return self._rows(producers.ALTER(request), lambda made: [made])

    def writers(self, limit: int | None = None) -> Listing[Writer]:
        """List writers of numbered batches (Spark queries, writes with a ``write_id``), ``limit`` per broker."""
        return self._pages(writers.LIST({}), "writers", limit)

    def forget_writer(self, writer: str, *, why: str | None = None) -> Listing[ForgottenWriter]:
        """Forget a writer (as listed, or its query id or ``write_id``) and its producer group at every broker. Should
        it write again, its next batch counts whatever its number is.

        Raises NOT_FOUND, CONFLICT while it has undecided transactions.
        """
        call = writers.FORGET(signed(writers.Forget(writer=writer), why))
        return self._rows(call, lambda answer: [answer], Code.NOT_FOUND)
