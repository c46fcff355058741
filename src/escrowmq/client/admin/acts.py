"""The record of what operators did."""

from __future__ import annotations

from typing import cast

from escrowmq.client.admin.asking import Asking
from escrowmq.client.entries import Act, VerifiedActs
from escrowmq.client.links.answers import Listing
from escrowmq.wire.actions import acts
from escrowmq.wire.values import MAX_PAGE


class ActsAdmin(Asking):
    """The record of what operators did. See :class:`escrowmq.client.admin.Admin`."""

    def acts(self, limit: int | None = None, *, after: int = 0, newest: bool = False) -> Listing[Act]:
        """List operator actions, oldest first: who (unverified), when, what, why, and the result; at most ``limit``
        per broker of those numbered above ``after``, or the ``newest`` (at most 10,000)."""
        if newest:
            call = acts.LIST({"limit": min(limit or MAX_PAGE, MAX_PAGE), "after": after, "newest": True})
            return self._rows(call, lambda answer: answer["acts"])
        found = self._pages(acts.LIST({"after": after}), "acts", limit)
        return cast(Listing[Act], found)

    def verify_acts(self) -> Listing[VerifiedActs]:
        """Return whether anybody changed, removed or moved a record: of each broker how many records, the last
        one's hash, and the places."""
        return self._rows(acts.VERIFY({}), lambda answer: [answer])
