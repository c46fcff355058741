"""Admin calls about the state of topics, groups and single messages."""

from __future__ import annotations

from escrowmq.client.admin.asking import Asking, given
from escrowmq.client.entries import AllStands, MessageStands
from escrowmq.client.links.answers import Listing
from escrowmq.errors import Code, Misuse
from escrowmq.wire.actions import standing as actions


class StandingAdmin(Asking):
    """How topics, groups and single messages stand. See :class:`escrowmq.client.admin.Admin`."""

    def standing(self) -> Listing[AllStands]:
        """Of each broker: all topics, consumer groups (lag in messages and seconds) and producer groups."""
        return self._rows(actions.ALL({}), lambda answer: [answer])

    def message_standing(
        self, topic: str, queue: int, offset: int, *, broker: str | None = None, history: bool = True
    ) -> Listing[MessageStands]:
        """Return where the message at a place stands for each consumer group, and, with ``history``, what happened to
        it there; one entry for each broker that has such a place, or for the one with the address ``broker``.

        The history is read from the log: at most 10,000 frames, and ``until_us`` says if there were more. Raises
        UNKNOWN_TOPIC, BAD_QUEUE, NOT_FOUND, RANGE_PURGED if no broker has it.
        """
        request = given(actions.AskOfMessage, topic=topic, queue=queue, offset=offset, history=history)
        call = actions.OF_MESSAGE(request)
        if broker is not None:
            number = self._at(broker)
            return Listing([{**self._ask(number, call), "broker": broker}])
        unknown = (Code.UNKNOWN_TOPIC, Code.BAD_QUEUE, Code.NOT_FOUND, Code.RANGE_PURGED)
        return self._rows(call, lambda answer: [answer], *unknown)

    def _at(self, address: str) -> int:
        """Return the number of the broker with an address. Raises Misuse(BAD_ARGUMENT)."""
        addresses = [link.address for link in self._router.links]
        if address not in addresses:
            raise Misuse(Code.BAD_ARGUMENT, f"{address} is none of this bus's brokers", ", ".join(addresses))
        return addresses.index(address)
