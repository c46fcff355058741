"""Consumer groups and their members."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Unpack, cast

from escrowmq.client.admin.asking import Asking, given
from escrowmq.client.altering import GroupChanges, group_request, signed
from escrowmq.client.consuming.options import start_text
from escrowmq.client.entries import AlteredGroup, DeletedGroup, Group, LimitedGroup, Member, MovedGroup, PausedGroup
from escrowmq.client.links.answers import Count, Listing, away
from escrowmq.errors import Code, Misuse, Rejected, error
from escrowmq.wire.actions import groups
from escrowmq.wire.actions.groups import Group as OneGroup

_REDELIVERY = ("max_attempts", "retry_backoff", "retry_backoff_max", "retry_delays")


def _pause(group: str, topics: str | Sequence[str] | None) -> groups.Pause:
    named = [topics] if isinstance(topics, str) else list(topics or ())
    return {"group": group, "topics": named} if named else {"group": group}


class GroupsAdmin(Asking):
    """Consumer groups and their members. See :class:`escrowmq.client.admin.Admin`."""

    def groups(self) -> Listing[Group]:
        """Return all consumer groups, with their subscriptions and their progress in each queue."""
        return self._rows(groups.LIST({}), "groups")

    def alter_group(
        self, group: str, *, why: str | None = None, **changes: Unpack[GroupChanges]
    ) -> Listing[AlteredGroup]:
        """Change the subscription of a consumer group at every broker; settings that are not given stay. Returns the
        new subscription. Brokers without the group get it as the others have it.

        ``tags="*"`` is all; tags apply to messages that the group has not passed yet. It begins at ``start``
        (``"earliest"``) in topics that are new to it, and continues in a topic that it had before. Leases of a topic
        that it leaves can be settled. ``redelivery`` as for a consumer, or ``"broker"``: the broker's settings. Running
        consumers receive by the new subscription; new ones must name it.

        Raises UNKNOWN_GROUP, UNKNOWN_TOPIC, BAD_REQUEST; CONFLICT for ``ordered`` or ``in_doubt`` while messages are
        leased.
        """
        request = signed(group_request(group, changes), why)
        self._make_everywhere(group, why)
        return self._rows(groups.ALTER(request), None, Code.UNKNOWN_GROUP)

    def reset_group(
        self,
        group: str,
        to: str | datetime | None = None,
        *,
        offset: int | None = None,
        shift: int | None = None,
        topic: str | None = None,
        queue: int | None = None,
        force: bool = False,
        dry_run: bool = False,
        why: str | None = None,
    ) -> Listing[MovedGroup]:
        """Set where a consumer group continues, at every broker, in all its queues, those of ``topic`` or one ``queue``
        of it: ``to`` ``"earliest"``, ``"latest"`` or a time, at an ``offset`` of that queue, or ``shift`` offsets from
        where it stands (back if below 0). Returns the new offset in each queue; with ``dry_run`` nothing changes.

        If the group moves back, settled messages are redelivered as repeats, with attempts counted anew; if it moves
        forward, messages in between are *skipped*. Leases there end, and their acknowledgements get LEASE_LOST. Dead
        letters below stay. Running consumers continue at the new offset. Effects that an inbox has marked are not
        repeated.

        Raises UNKNOWN_GROUP, UNKNOWN_TOPIC, BAD_QUEUE, BAD_REQUEST; CONFLICT for messages that members of a group of
        ``in_doubt="hold"`` hold, unless ``force``.
        """
        start = None if to is None else start_text(to)
        asked = given(groups.Reset, group=group, start=start, offset=offset, shift=shift, topic=topic, queue=queue)
        asked["force"] = force
        if offset is not None and len(self._router.links) > 1:
            hint = "connect to that broker alone: each has another message at this place"
            raise Misuse(Code.BAD_ARGUMENT, "of several brokers, whose offset is it?", hint)

        # Two steps, so that the repeat of a request whose answer was lost moves nothing twice.
        def act(number: int) -> list[groups.Moved]:
            moves = self._ask(number, groups.RESET({**asked, "dry_run": True}))["queues"]
            if dry_run:
                return moves
            places = [groups.Place(topic=m["topic"], queue=m["queue"], offset=m["now"]) for m in moves]
            request = groups.Reset(group=group, places=places, force=force)
            return self._ask(number, groups.RESET(signed(request, why)))["queues"]

        found, missing = self._act_each(act, Code.UNKNOWN_GROUP, Code.UNKNOWN_TOPIC)
        return Listing(({**move, **at} for at, moves in found for move in moves), missing)

    def pause_group(
        self, group: str, topics: str | Sequence[str] | None = None, *, why: str | None = None
    ) -> Listing[PausedGroup]:
        """Deliver nothing to a consumer group (of these ``topics``, if they are given) at every broker until
        :meth:`resume_group`. Returns what is paused.

        Members may settle their messages. A lease that expires meanwhile counts no attempt. Raises UNKNOWN_GROUP,
        UNKNOWN_TOPIC.
        """
        self._make_everywhere(group, why)
        return self._rows(groups.PAUSE(signed(_pause(group, topics), why)), None, Code.UNKNOWN_GROUP)

    def resume_group(
        self, group: str, topics: str | Sequence[str] | None = None, *, why: str | None = None
    ) -> Listing[PausedGroup]:
        """Deliver to a consumer group again, of all topics or of these. Returns what is still paused.

        Raises UNKNOWN_GROUP, UNKNOWN_TOPIC; CONFLICT for some topics of a group that is paused as a whole.
        """
        return self._rows(groups.RESUME(signed(_pause(group, topics), why)), None, Code.UNKNOWN_GROUP)

    def limit_group(
        self,
        group: str,
        *,
        rate: float | None = None,
        in_flight: int | None = None,
        in_flight_per_key: int | None = None,
        why: str | None = None,
    ) -> Listing[LimitedGroup]:
        """Limit what a consumer group receives: ``rate`` messages per second, ``in_flight`` leased messages, and of
        each key ``in_flight_per_key``. Returns its limits. What is not given has no limit afterwards.

        Receives that a limit holds back wait, as without messages. Of several brokers each enforces an equal share of
        ``rate`` and ``in_flight``; the messages of a key are at one broker. Raises UNKNOWN_GROUP, BAD_REQUEST.
        """
        size = len(self._router.links)
        if wrong := [x for x in (rate, in_flight) if isinstance(x, bool) or not isinstance(x, int | float | None)]:
            raise Misuse(Code.BAD_ARGUMENT, f"{wrong[0]!r:.100} is no number")
        if in_flight is not None and 0 < in_flight < size:
            hint = f"each of the {size} brokers enforces a share of at least one message"
            raise Misuse(Code.BAD_ARGUMENT, f"{in_flight} messages in flight at {size} brokers", hint)
        self._make_everywhere(group, why)

        def act(number: int) -> groups.Limited:
            shares = {
                "rate": None if rate is None else rate / size,
                "in_flight": None if in_flight is None else (in_flight + number) // size,
            }
            request = given(groups.Limit, group=group, in_flight_per_key=in_flight_per_key, **shares)
            return self._ask(number, groups.LIMIT(signed(request, why)))

        found, missing = self._act_each(act, Code.UNKNOWN_GROUP)
        return Listing(({**limits, **at} for at, limits in found), missing)

    def delete_group(self, group: str, *, force: bool = False, why: str | None = None) -> Listing[DeletedGroup]:
        """Delete a consumer group at every broker, with its offsets, retries and dead letters. Returns what is lost.
        Afterwards the same name is a new group.

        Raises UNKNOWN_GROUP; CONFLICT while consumers wait for messages or hold some, unless ``force``.
        """
        listed = self.groups()
        numbers = {one["broker"]: one["group"] for one in listed if one["name"] == group}
        if not numbers:
            text = f"no consumer group {group!r}"
            raise away(listed.missing, text) if listed.missing else error(Code.UNKNOWN_GROUP, text)

        # By number, so that the repeat of a request whose answer was lost does not delete a new group of the name.
        def act(number: int) -> groups.Deleted | None:
            if (known := numbers.get(self._router.links[number].address)) is None:
                return None
            try:
                request = groups.Delete(group=group, number=known, force=force)
                return self._ask(number, groups.DELETE(signed(request, why)))
            except Rejected as problem:
                if problem.code is not Code.UNKNOWN_GROUP:
                    raise
                return None

        answers = self._router.every(act, self._timeout)
        found = [(self._router.links[number].address, gone) for number, gone in answers.found if gone is not None]
        missing = {one["broker"]: one for one in (*listed.missing, *answers.missing)}
        return Listing(({**gone, "broker": broker} for broker, gone in found), [*missing.values()])

    def _make_everywhere(self, group: str, why: str | None) -> None:
        """Create a consumer group that only some brokers have at the others, too, because a change must apply at all of
        them when its consumers come."""
        if len(self._router.links) == 1:
            return
        known = self._router.every(lambda number: self._group_at(number, group), self._timeout).found
        have = next((one for _, one in known if one is not None), None)
        for number in [number for number, one in known if one is None and have is not None]:
            try:
                self._make_like(number, cast(OneGroup, have), why)
            except Rejected as problem:
                if problem.code is not Code.UNKNOWN_TOPIC:  # then no consumer can make it either
                    raise

    def _group_at(self, number: int, group: str) -> OneGroup | None:
        listed = self._ask(number, groups.LIST({}))["groups"]
        return next((one for one in listed if one["name"] == group), None)

    def _make_like(self, number: int, have: OneGroup, why: str | None) -> None:
        """Create a consumer group at broker ``number`` with the subscription, redelivery, pauses and limits that it has
        at another one (``have``)."""
        name = have["name"]
        wanted = groups.Subscribe(group=name, topics=have["topics"], ordered=have["ordered"], start=have["start"])
        if have["tags"]:
            wanted["tags"] = have["tags"]
        if have["in_doubt"] == "hold":
            wanted["in_doubt"] = "hold"
        self._ask(number, groups.SUBSCRIBE(wanted))
        made = self._group_at(number, name)
        if made is not None and any(made.get(rule) != have.get(rule) for rule in _REDELIVERY):
            change = groups.Alter(group=name, max_attempts=have["max_attempts"])
            if have["retry_delays"]:
                change["retry_delays"] = have["retry_delays"]
            else:
                change |= {"retry_backoff": have["retry_backoff"], "retry_backoff_max": have["retry_backoff_max"]}
            self._ask(number, groups.ALTER(signed(change, why)))
        paused = have.get("paused_topics", [])
        for topics in ([None] if have.get("paused") else []) + ([paused] if paused else []):
            self._ask(number, groups.PAUSE(signed(_pause(name, topics), why)))
        if limits := have.get("limits"):
            self._ask(number, groups.LIMIT(signed(given(groups.Limit, group=name, **limits), why)))

    def members(self, group: str) -> Listing[Member]:
        """Return the members of a consumer group and the messages that they hold. Raises UNKNOWN_GROUP."""
        return self._rows(groups.MEMBERS({"group": group}), "members", Code.UNKNOWN_GROUP)

    def fence(self, group: str, instance: str, *, why: str | None = None) -> Count:
        """Return the messages of a silent named member to its group, and fence its process. Returns how many messages.

        Do it when the process is surely dead, or can do no harm: its effects are not undone, and its messages are
        delivered to others. Raises UNKNOWN_GROUP, NOT_FOUND without such a member.
        """
        call = groups.FENCE(signed(groups.FenceMember(group=group, instance=instance), why))
        found, missing = self._each(call, Code.UNKNOWN_GROUP, Code.NOT_FOUND)
        return Count(sum(answer["messages"] for _, answer in found), missing)
