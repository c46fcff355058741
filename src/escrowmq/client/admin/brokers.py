"""Admin calls about the brokers: their state, what they hold, and their record of operator actions."""

from __future__ import annotations

from escrowmq.client.admin.asking import Asking, given
from escrowmq.client.altering import signed
from escrowmq.client.entries import Act, AllStands, Health, Hello, MessageStands, SteppedDown, VerifiedActs
from escrowmq.client.links.answers import Listing
from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.wire import Link, ask
from escrowmq.wire.actions import acts, brokers, standing
from escrowmq.wire.values import MAX_PAGE


class BrokersAdmin(Asking):
    """Calls about the brokers. See :class:`escrowmq.client.admin.Admin`."""

    def health(self) -> Listing[Health]:
        """Return the health of each broker: status ("ok", "damaged", "full", "stopped", "stopping", "incomplete", or
        "unreachable") and reason."""
        links, timeout = self._router.links, self._timeout
        answers = self._router.every(lambda number: _health_of(links[number], timeout), timeout + 1.0)
        rows, silent = dict(answers.found), {one["broker"]: one["reason"] for one in answers.missing}
        for number, link in enumerate(links):
            if link.address in silent:
                rows[number] = _unreachable(link, silent[link.address])
        listed = [rows[number] for number in sorted(rows)]
        lost = [row for row in listed if row["status"] == "unreachable"]
        return Listing(listed, [{"broker": row["broker"], "reason": row["reason"]} for row in lost])

    def stats(self) -> Listing[dict[str, float | str]]:
        """Return the metrics of each broker, a number by name, and its ``broker``."""
        return self._rows(brokers.STATS({}), None)

    def hello(self) -> Listing[Hello]:
        """Return each broker's description of itself: versions, shard, epoch, limits."""
        return self._rows(brokers.HELLO({}), None)

    def step_down(self, *, why: str | None = None) -> Listing[SteppedDown]:
        """Make each broker hand over to another one of its shard, and wait until that leads. Recorded as an operator
        action.

        Returns its address, how long it took, and the URL that leads now. Raises BAD_REQUEST for a broker without a
        standby, NOT_LEADER for one that does not lead.
        """

        def hand_over(number: int) -> brokers.SteppedDown:
            epoch = self._ask(number, brokers.HELLO({}))["epoch"]
            return self._ask(number, brokers.STEP_DOWN(signed(brokers.StepDown(epoch=epoch), why)))

        found, missing = self._act_each(hand_over)
        return Listing(({**answer, **at} for at, answer in found), missing)

    def acts(self, limit: int | None = None, *, after: int = 0, newest: bool = False) -> Listing[Act]:
        """List operator actions, oldest first: who (unverified), when, what, why, and the result; at most ``limit``
        per broker of those numbered above ``after``, or the ``newest`` (at most 10,000)."""
        if newest:
            call = acts.LIST({"limit": min(limit or MAX_PAGE, MAX_PAGE), "after": after, "newest": True})
            return self._rows(call, "acts")
        return self._pages(acts.LIST({"after": after}), "acts", limit)

    def verify_acts(self) -> Listing[VerifiedActs]:
        """Verify each broker's record of operator actions by its hash chain. Returns the number of records, the last
        one's hash, and the places where a record was changed, removed or moved."""
        return self._rows(acts.VERIFY({}), None)

    def standing(self) -> Listing[AllStands]:
        """Return the state of all topics, consumer groups (lag in messages and seconds) and producer groups of each
        broker."""
        return self._rows(standing.ALL({}), None)

    def message_standing(
        self, topic: str, queue: int, offset: int, *, broker: str | None = None, history: bool = True
    ) -> Listing[MessageStands]:
        """Return the state of the message at an offset of a queue for each consumer group, and, with ``history``, its
        events; one entry for each broker that has this offset, or for the one with the address ``broker``.

        The history is read from the log: at most 10,000 frames, and ``until_us`` says if there were more. Raises
        UNKNOWN_TOPIC, BAD_QUEUE, NOT_FOUND, RANGE_PURGED if no broker has it.
        """
        call = standing.OF_MESSAGE(
            given(standing.AskOfMessage, topic=topic, queue=queue, offset=offset, history=history)
        )
        if broker is None:
            return self._rows(call, None, Code.UNKNOWN_TOPIC, Code.BAD_QUEUE, Code.NOT_FOUND, Code.RANGE_PURGED)
        addresses = [link.address for link in self._router.links]
        if broker not in addresses:
            raise Misuse(Code.BAD_ARGUMENT, f"{broker} is none of this bus's brokers", ", ".join(addresses))
        return Listing([{**self._ask(addresses.index(broker), call), "broker": broker}])


def _health_of(link: Link, timeout: float) -> Health:
    try:
        return {**ask(link, brokers.HEALTH({}), timeout), "broker": link.address}
    except EscrowError as problem:
        return _unreachable(link, str(problem))


def _unreachable(link: Link, reason: str) -> Health:
    return {"status": "unreachable", "reason": reason, "broker": link.address}
