"""Dead letters, delivered again or discarded."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from escrowmq.client.admin.asking import Asking, given
from escrowmq.client.altering import signed
from escrowmq.client.entries import DeadLetter, DeadLettersSummary
from escrowmq.client.links.answers import Count, Listing
from escrowmq.errors import Code, Misuse, Overloaded, Unknown
from escrowmq.model import message_id as id_of
from escrowmq.wire.actions import dead_letters, standing
from escrowmq.wire.actions.dead_letters import Edited
from escrowmq.wire.actions.standing import Happened, OfMessage

MOST_AT_ONCE = 4096
"""Dead letters in one request, and in one record of an act."""
_PIECE = 48 << 10
"""Bytes of a body in one piece of a request."""
_SHOWN = ("topic", "queue", "offset", "dead_us", "attempts")


ATTEMPTS_SHOWN = 5


def last_attempts(stands: OfMessage, group: str) -> list[Happened]:
    """Return the last failed attempts of a group, oldest first, from the history of a message."""
    failed = [one for one in stands.get("events", []) if one["group"] == group and one["event"] in ("failed", "dead")]
    return failed[-ATTEMPTS_SHOWN:]


class DeadLettersAdmin(Asking):
    """Dead letters, delivered again or discarded. See :class:`escrowmq.client.admin.Admin`."""

    def dead_letters(
        self,
        group: str,
        limit: int | None = None,
        *,
        cause: str | None = None,
        topic: str | None = None,
        older_than: float | None = None,
    ) -> Listing[DeadLetter]:
        """Return the dead letters of a consumer group, at most ``limit`` per broker; with a ``cause`` those of like
        ones (numbers and ids in it do not count: see :meth:`dead_letters_summary`), of one ``topic``, dead for
        ``older_than`` seconds."""
        request = given(dead_letters.List, group=group, cause=cause, topic=topic, older_than=older_than)
        return self._pages(dead_letters.LIST(request), "dead_letters", limit)

    def dead_letters_at(self, group: str, items: Sequence[Mapping[str, Any]]) -> Listing[DeadLetter]:
        """Return those of ``items`` (each a ``topic``, a ``queue`` and an ``offset``) that are dead letters of the
        group, at every broker."""
        wanted: list[Any] = [{name: item[name] for name in ("topic", "queue", "offset")} for item in items]
        call = dead_letters.LIST(dead_letters.List(group=group, items=wanted))
        return self._rows(
            call, lambda answer: answer["dead_letters"], Code.UNKNOWN_GROUP, Code.UNKNOWN_TOPIC, Code.BAD_QUEUE
        )

    def dead_letter_attempts(self, group: str, item: Mapping[str, Any]) -> list[Happened]:
        """Return the last five attempts at a dead letter (an item of :meth:`dead_letters`), oldest first.

        Each has ``time_us``, ``attempt``, and ``cause`` as the consumer named it, or ``expired`` if its lease ended.
        They are read from the log, as far as it reaches back.
        """
        place = standing.AskOfMessage(topic=item["topic"], queue=item["queue"], offset=item["offset"], history=True)
        number = next(number for number, link in enumerate(self._router.links) if link.address == item["broker"])
        return last_attempts(self._ask(number, standing.OF_MESSAGE(place)), group)

    def dead_letters_summary(
        self, group: str | None = None, *, causes: int = 20, samples: int = 3
    ) -> Listing[DeadLettersSummary]:
        """Return how many dead letters each consumer group has (or this one), and why: the most frequent ``causes``
        with their counts, ages and some ``samples``, what is left in one entry ``others``. Causes are distinguished by
        their first line without its numbers and ids."""
        request = given(dead_letters.Summarize, group=group, causes=causes, samples=samples)
        return self._pages(dead_letters.SUMMARY(request), "groups", None)

    def retry_dead_letters(
        self, group: str, items: Iterable[Mapping[str, Any]] | None = None, *, why: str | None = None
    ) -> Count:
        """Deliver dead letters again, attempts counted anew: all, or ``items`` of :meth:`dead_letters`. How many.

        An item as it was listed has its time of death: what died again since is left alone.
        """
        return self._settle_dead(group, items, "retry", why)

    def discard_dead_letters(
        self, group: str, items: Iterable[Mapping[str, Any]] | None = None, *, why: str | None = None
    ) -> Count:
        """Settle dead letters for good: all, or ``items`` of :meth:`dead_letters`. How many.

        An item as it was listed has its time of death: what died again since is left alone.
        """
        return self._settle_dead(group, items, "discard", why)

    def settle_dead_letters(
        self,
        group: str,
        items: Iterable[Mapping[str, Any]],
        act: Literal["retry", "discard"],
        *,
        why: str | None = None,
    ) -> list[Code]:
        """Retry or discard ``items`` of :meth:`dead_letters`, with one result for each, in their order: OK; NOT_FOUND,
        it is no dead letter, or no longer; CONFLICT, it died again since it was listed; DAMAGED, its content is lost
        and it cannot be delivered again. Items of a broker that gave no answer have the code that says why, such as
        BROKER_AWAY or TIMED_OUT."""
        chosen = list(items)
        codes = [Code.NOT_FOUND] * len(chosen)
        for number, places in self._by_broker(chosen).items():
            for start in range(0, len(places), MOST_AT_ONCE):
                part = places[start : start + MOST_AT_ONCE]
                try:
                    results = self._settle_part(number, group, act, [chosen[at] for at in part], why)
                except (Overloaded, Unknown) as problem:
                    results = [problem.code] * len(part)
                for at, code in zip(part, results, strict=True):
                    codes[at] = code
        return codes

    def edit_dead_letter(
        self,
        group: str,
        item: Mapping[str, Any],
        *,
        body: bytes | None = None,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        without: Iterable[str] = (),
        message_id: str | bytes | None = None,
        why: str | None = None,
    ) -> Edited:
        """Deliver another message to the group in place of a dead letter (``item`` of :meth:`dead_letters`), and to no
        other group. What is not given is as it was; ``without`` names ``"key"``, ``"tag"`` or properties to be left
        out.

        The new message has an id of its own and names the old one in its property ``ESCROWMQ_EDITED_FROM``. The dead
        letter is gone and the message is there in one step. With a ``message_id`` of your own the call can be repeated:
        it is done once. Raises NOT_FOUND, CONFLICT (it died again since it was listed), the limit that the message does
        not keep, or DAMAGED (give a body).
        """
        ((number, _),) = self._by_broker([item]).items()
        identity = uuid.uuid4().bytes if message_id is None else id_of(message_id)
        pieces = None
        if body is not None:
            pieces = [base64.b64encode(body[at : at + _PIECE]).decode() for at in range(0, len(body), _PIECE)]
        given_: Any = {name: item[name] for name in _SHOWN if name in item}
        request = given(
            dead_letters.Edit,
            group=group,
            **given_,
            message_id=identity.hex(),
            body_base64=pieces,
            key=key,
            tag=tag,
            properties=None if properties is None else [(name, value) for name, value in properties.items()],
            without=list(without) or None,
        )
        return self._ask(number, dead_letters.EDIT(signed(request, why)))

    def _settle_dead(
        self, group: str, items: Iterable[Mapping[str, Any]] | None, act: Literal["retry", "discard"], why: str | None
    ) -> Count:
        chosen = None if items is None else list(items)
        by_broker = self._by_broker(chosen or ())

        def settle(number: int) -> int:
            if chosen is None:
                return self._settle_all(number, group, act, why)
            mine, done = by_broker.get(number, []), 0
            for start in range(0, len(mine), MOST_AT_ONCE):
                part = [chosen[at] for at in mine[start : start + MOST_AT_ONCE]]
                done += self._settle_part(number, group, act, part, why).count(Code.OK)
            return done

        answers = self._router.every(settle, self._timeout)
        return Count(sum(answers.values), answers.missing)

    def _by_broker(self, chosen: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
        """Return which items are each broker's, by its number."""
        addresses = [link.address for link in self._router.links]
        if len(addresses) > 1 and any("broker" not in item for item in chosen):
            hint = (
                "give it as dead_letters() lists it, or connect to that broker alone: each has another message at "
                "this place"
            )
            raise Misuse(Code.BAD_ARGUMENT, "of several brokers, which one has this dead letter? It names none", hint)
        found: dict[int, list[int]] = {}
        for at, item in enumerate(chosen):
            address = item.get("broker", addresses[0])
            if address not in addresses:
                hint = f"connect to it, or to all of them; connected: {', '.join(addresses)}"
                raise Misuse(
                    Code.BAD_ARGUMENT, f"this dead letter is of the broker {address!r}, which is none of these", hint
                )
            found.setdefault(addresses.index(address), []).append(at)
        return found

    def _settle_part(
        self, number: int, group: str, act: Literal["retry", "discard"], items: list[Mapping[str, Any]], why: str | None
    ) -> list[Code]:
        wanted: Any = [{name: item[name] for name in _SHOWN if name in item} for item in items]
        request = signed(dead_letters.Settle(group=group, act=act, items=wanted), why)
        return [Code[name] for name in self._ask(number, dead_letters.SETTLE(request))["codes"]]

    def _settle_all(self, number: int, group: str, act: Literal["retry", "discard"], why: str | None) -> int:
        """Page by page, by queue and offset: each place once, even if what is retried dies again at once."""
        done, after = 0, None
        while True:
            request = signed(dead_letters.Settle(group=group, act=act, all=True, limit=MOST_AT_ONCE), why)
            if after is not None:
                request["after"] = after
            answer = self._ask(number, dead_letters.SETTLE(request))
            done += answer["codes"].count(Code.OK.name)
            after = answer.get("next")
            if after is None:
                return done
