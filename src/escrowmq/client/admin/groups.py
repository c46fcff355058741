"""Consumer groups and their members."""

from __future__ import annotations

from typing import Unpack

from escrowmq.client.admin.asking import Asking
from escrowmq.client.altering import GroupChanges, group_request, signed
from escrowmq.client.entries import AlteredGroup, Group, Member
from escrowmq.client.links.answers import Count, Listing
from escrowmq.errors import Code
from escrowmq.wire.actions import groups


class GroupsAdmin(Asking):
    """Consumer groups and their members. See :class:`escrowmq.client.admin.Admin`."""

    def groups(self) -> Listing[Group]:
        """All consumer groups, with where they stand in each queue."""
        return self._rows(groups.LIST({}), lambda answer: answer["groups"])

    def alter_group(
        self, group: str, *, why: str | None = None, **changes: Unpack[GroupChanges]
    ) -> Listing[AlteredGroup]:
        """Give a consumer group another subscription, at every broker; what is not given stays as it is. What it is now.

        ``tags="*"`` is all; they choose among what the group has not passed over yet. It begins at ``start`` (``"earliest"``) in
        topics that are new to it; in one that it had before it goes on where it was. What it holds of a topic that
        it leaves can be settled. ``redelivery`` as for a consumer, or ``"broker"``: the broker's settings. Consumers that run get
        what the new subscription chooses; those that start must name it.

        Raises UNKNOWN_GROUP, UNKNOWN_TOPIC, BAD_REQUEST; CONFLICT for ``ordered`` or ``in_doubt`` while something is leased.
        """
        request = signed(group_request(group, changes), why)
        return self._rows(groups.ALTER(request), lambda altered: [altered], Code.UNKNOWN_GROUP)

    def members(self, group: str) -> Listing[Member]:
        """Which member of a consumer group holds what, in doubt or not. Raises UNKNOWN_GROUP."""
        return self._rows(groups.MEMBERS({"group": group}), lambda answer: answer["members"], Code.UNKNOWN_GROUP)

    def fence(self, group: str, instance: str, *, why: str | None = None) -> Count:
        """Give what a silent named member holds back to its group, and shut its process out; how many messages.

        Do it when the process is surely dead, or cannot harm any more: what it did is not undone, and its messages are
        delivered to others. Raises UNKNOWN_GROUP, NOT_FOUND without such a member.
        """
        call = groups.FENCE(signed(groups.FenceMember(group=group, instance=instance), why))
        found, missing = self._each(call, Code.UNKNOWN_GROUP, Code.NOT_FOUND)
        return Count(sum(answer["messages"] for _, answer in found), missing)
