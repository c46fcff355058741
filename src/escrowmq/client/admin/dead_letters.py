"""Dead letters, delivered again or discarded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from escrowmq.client.admin.asking import Asking
from escrowmq.client.altering import signed
from escrowmq.client.entries import DeadLetter
from escrowmq.client.links.answers import Count, Listing
from escrowmq.errors import Code, Misuse
from escrowmq.wire.actions import dead_letters


class DeadLettersAdmin(Asking):
    """Dead letters, delivered again or discarded. See :class:`escrowmq.client.admin.Admin`."""

    def dead_letters(self, group: str, limit: int | None = None) -> Listing[DeadLetter]:
        """The dead letters of a consumer group; at most ``limit`` per broker."""
        return self._pages(dead_letters.LIST({"group": group}), "dead_letters", limit)

    def retry_dead_letters(
        self, group: str, items: Iterable[Mapping[str, Any]] | None = None, *, why: str | None = None
    ) -> Count:
        """Deliver dead letters again, attempts counted anew: all, or ``items`` of :meth:`dead_letters`. How many."""
        return self._settle_dead(group, items, "retry", why)

    def discard_dead_letters(
        self, group: str, items: Iterable[Mapping[str, Any]] | None = None, *, why: str | None = None
    ) -> Count:
        """Settle dead letters for good: all, or ``items`` of :meth:`dead_letters`. How many."""
        return self._settle_dead(group, items, "discard", why)

    def _settle_dead(
        self, group: str, items: Iterable[Mapping[str, Any]] | None, act: Literal["retry", "discard"], why: str | None
    ) -> Count:
        chosen = None if items is None else list(items)
        if chosen and len(self._router.links) > 1 and any("broker" not in item for item in chosen):
            hint = "give it as dead_letters() lists it, or connect to that broker alone: each has another message at this place"
            raise Misuse(Code.BAD_ARGUMENT, "of several brokers, which one has this dead letter? It names none", hint)

        def settle(number: int) -> int:
            address = self._router.links[number].address
            request = signed(dead_letters.Settle(group=group, act=act), why)
            if chosen is None:
                request["all"] = True
            else:
                mine = [item for item in chosen if item.get("broker", address) == address]
                if not mine:
                    return 0
                request["items"] = [
                    {"topic": item["topic"], "queue": item["queue"], "offset": item["offset"]} for item in mine
                ]
            return self._ask(number, dead_letters.SETTLE(request))["codes"].count(Code.OK.name)

        answers = self._router.every(settle, self._timeout)
        return Count(sum(answers.values), answers.missing)
