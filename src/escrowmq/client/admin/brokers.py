"""Admin calls about the brokers themselves."""

from __future__ import annotations

from escrowmq.client.admin.asking import Asking
from escrowmq.client.altering import signed
from escrowmq.client.entries import Health, Hello, SteppedDown
from escrowmq.client.links.answers import Listing
from escrowmq.client.links.presence import Missing
from escrowmq.errors import EscrowError
from escrowmq.wire import Link, ask
from escrowmq.wire.actions import brokers


class BrokersAdmin(Asking):
    """Calls about the brokers themselves. See :class:`escrowmq.client.admin.Admin`."""

    def health(self) -> Listing[Health]:
        """Of each broker: status ("ok", "damaged", "full", "stopped", "stopping", "incomplete", or "unreachable") and
        reason."""
        links, timeout = self._router.links, self._timeout
        answers = self._router.every(lambda number: _health_of(links[number], timeout), timeout + 1.0)
        rows, silent = dict(answers.found), {one["broker"]: one["reason"] for one in answers.missing}
        for number, link in enumerate(links):
            if link.address in silent:
                rows[number] = {"status": "unreachable", "reason": silent[link.address], "broker": link.address}
        listed = [rows[number] for number in sorted(rows)]
        unreachable: list[Missing] = [
            {"broker": row["broker"], "reason": row["reason"]} for row in listed if row["status"] == "unreachable"
        ]
        return Listing(listed, unreachable)

    def stats(self) -> Listing[dict[str, float | str]]:
        """Return the numbers of each broker, one per metric, and ``broker``."""
        return self._rows(brokers.STATS({}), lambda numbers: [numbers])

    def hello(self) -> Listing[Hello]:
        """Return each broker's description of itself: versions, shard, epoch, limits."""
        return self._rows(brokers.HELLO({}), lambda answer: [answer])

    def step_down(self, *, why: str | None = None) -> Listing[SteppedDown]:
        """Have each broker hand over to another one of its shard, and wait until that leads; recorded as an act. Of
        each its address, how long it took, and the URL that leads now. BAD_REQUEST from a broker that has its log for
        itself, NOT_LEADER from one that does not lead."""

        def hand_over(number: int) -> brokers.SteppedDown:
            epoch = self._ask(number, brokers.HELLO({}))["epoch"]
            return self._ask(number, brokers.STEP_DOWN(signed(brokers.StepDown(epoch=epoch), why)))

        found, missing = self._ask_each(hand_over)
        return Listing(({**answer, **at} for at, answer in found), missing)


def _health_of(link: Link, timeout: float) -> Health:
    try:
        return {**ask(link, brokers.HEALTH({}), timeout), "broker": link.address}
    except EscrowError as problem:
        return {"status": "unreachable", "reason": str(problem), "broker": link.address}
