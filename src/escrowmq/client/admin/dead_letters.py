"""Dead letters: listed, redelivered, edited or discarded."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from escrowmq.client.admin.asking import Asking, given
from escrowmq.client.altering import signed
from escrowmq.client.entries import DeadLetter, DeadLettersSummary
from escrowmq.client.links.answers import Count, Listing
from escrowmq.errors import Code, Misuse, Overloaded, Unknown
from escrowmq.model import message_id as id_of
from escrowmq.wire.actions import dead_letters, standing
from escrowmq.wire.actions.dead_letters import Edited
from escrowmq.wire.actions.standing import Happened, OfMessage

T = TypeVar("T")
MOST_AT_ONCE = 4096
"""Dead letters in one request, and in one record of an operator action."""
_PIECE = 48 << 10
"""Bytes of a body in one piece of a request."""
_SHOWN = ("topic", "queue", "offset", "dead_us", "attempts")
ATTEMPTS_SHOWN = 5
Remedy = Literal["retry", "discard"]


def last_attempts(stands: OfMessage, group: str) -> list[Happened]:
    """Return the last five failed attempts at a message in a group, oldest first, from the message's history."""
    failed = [one for one in stands.get("events", []) if one["group"] == group and one["event"] in ("failed", "dead")]
    return failed[-ATTEMPTS_SHOWN:]


def _chunks(items: list[T]) -> list[list[T]]:
    return [items[start : start + MOST_AT_ONCE] for start in range(0, len(items), MOST_AT_ONCE)]


class DeadLettersAdmin(Asking):
    """Dead letters. See :class:`escrowmq.client.admin.Admin`."""

    def dead_letters(
        self,
        group: str,
        limit: int | None = None,
        *,
        cause: str | None = None,
        topic: str | None = None,
        older_than: float | None = None,
    ) -> Listing[DeadLetter]:
        """Return the dead letters of a consumer group, at most ``limit`` per broker: those with a similar ``cause``
        (without its numbers and ids, as in :meth:`dead_letters_summary`), of one ``topic``, dead for ``older_than``
        seconds."""
        request = given(dead_letters.List, group=group, cause=cause, topic=topic, older_than=older_than)
        return self._pages(dead_letters.LIST(request), "dead_letters", limit)

    def dead_letters_at(self, group: str, items: Sequence[Mapping[str, Any]]) -> Listing[DeadLetter]:
        """Return those of ``items`` (each a ``topic``, a ``queue`` and an ``offset``) that are dead letters of the
        group, at every broker."""
        wanted: list[Any] = [{name: item[name] for name in ("topic", "queue", "offset")} for item in items]
        call = dead_letters.LIST(dead_letters.List(group=group, items=wanted))
        return self._rows(call, "dead_letters", Code.UNKNOWN_GROUP, Code.UNKNOWN_TOPIC, Code.BAD_QUEUE)

    def dead_letter_attempts(self, group: str, item: Mapping[str, Any]) -> list[Happened]:
        """Return the last five attempts at a dead letter (an item of :meth:`dead_letters`), oldest first, as far as the
        log reaches back. Each has ``time_us``, ``attempt``, and the consumer's ``cause``, or ``expired``."""
        place = standing.AskOfMessage(topic=item["topic"], queue=item["queue"], offset=item["offset"], history=True)
        number = next(number for number, link in enumerate(self._router.links) if link.address == item["broker"])
        return last_attempts(self._ask(number, standing.OF_MESSAGE(place)), group)

    def dead_letters_summary(
        self, group: str | None = None, *, causes: int = 20, samples: int = 3
    ) -> Listing[DeadLettersSummary]:
        """Return the number of dead letters of each consumer group (or this one) by cause: the most frequent ``causes``
        with their counts, ages and some ``samples``, the rest in one entry ``others``. A cause is the first line of the
        text, without numbers and ids."""
        request = given(dead_letters.Summarize, group=group, causes=causes, samples=samples)
        return self._pages(dead_letters.SUMMARY(request), "groups", None)

    def retry_dead_letters(
        self, group: str, items: Iterable[Mapping[str, Any]] | None = None, *, why: str | None = None
    ) -> Count:
        """Redeliver dead letters, with attempts counted anew: all, or ``items`` of :meth:`dead_letters`, except those
        that died again since they were listed. Returns how many."""
        return self._settle_dead(group, items, "retry", why)

    def discard_dead_letters(
        self, group: str, items: Iterable[Mapping[str, Any]] | None = None, *, why: str | None = None
    ) -> Count:
        """Discard dead letters for ever: all, or ``items``, as for :meth:`retry_dead_letters`. Returns how many."""
        return self._settle_dead(group, items, "discard", why)

    def settle_dead_letters(
        self, group: str, items: Iterable[Mapping[str, Any]], act: Remedy, *, why: str | None = None
    ) -> list[Code]:
        """Retry or discard ``items`` of :meth:`dead_letters`, with one result for each, in their order: OK; NOT_FOUND,
        it is no dead letter, or no longer; CONFLICT, it died again since it was listed; DAMAGED, its content is lost
        and it cannot be redelivered; or why its broker did not answer, such as BROKER_AWAY or TIMED_OUT."""
        chosen = list(items)
        codes = [Code.NOT_FOUND] * len(chosen)
        for number, places in self._by_broker(chosen).items():
            for part in _chunks(places):
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
        """Replace a dead letter (``item`` of :meth:`dead_letters`) by another message for this group alone, in one
        step. Fields that are not given keep their values; ``without``: ``"key"``, ``"tag"`` or properties to remove.

        The new message has an id of its own and names the old one in its property ``ESCROWMQ_EDITED_FROM``. With a
        ``message_id`` of your own the call is idempotent. Raises NOT_FOUND, CONFLICT (it died again since it was
        listed), the error of a limit, or DAMAGED (give a body).
        """
        ((number, _),) = self._by_broker([item]).items()
        identity = uuid.uuid4().bytes if message_id is None else id_of(message_id)
        place: Any = {name: item[name] for name in _SHOWN if name in item}
        request = given(dead_letters.Edit, group=group, **place, message_id=identity.hex(), key=key, tag=tag)
        if body is not None:
            pieces = [body[at : at + _PIECE] for at in range(0, len(body), _PIECE)]
            request["body_base64"] = [base64.b64encode(piece).decode() for piece in pieces]
        if properties is not None:
            request["properties"] = list(properties.items())
        if names := list(without):
            request["without"] = names
        return self._ask(number, dead_letters.EDIT(signed(request, why)))

    def _settle_dead(
        self, group: str, items: Iterable[Mapping[str, Any]] | None, act: Remedy, why: str | None
    ) -> Count:
        chosen = None if items is None else list(items)
        by_broker = self._by_broker(chosen or ())

        def settle(number: int) -> int:
            if chosen is None:
                return self._settle_all(number, group, act, why)
            parts = _chunks([chosen[at] for at in by_broker.get(number, [])])
            return sum(self._settle_part(number, group, act, part, why).count(Code.OK) for part in parts)

        answers = self._router.every(settle, self._timeout)
        return Count(sum(answers.values), answers.missing)

    def _by_broker(self, chosen: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
        """Return the indices of the dead letters that each broker holds, by the broker's number. Raises
        Misuse(BAD_ARGUMENT) if one names an unknown broker, or none of several."""
        addresses = [link.address for link in self._router.links]
        if len(addresses) > 1 and any("broker" not in item for item in chosen):
            hint = "give it as dead_letters() lists it, or connect to that broker alone: each has another message at "
            text = "of several brokers, which one has this dead letter? It names none"
            raise Misuse(Code.BAD_ARGUMENT, text, f"{hint}this place")
        found: dict[int, list[int]] = {}
        for at, item in enumerate(chosen):
            address = item.get("broker", addresses[0])
            if address not in addresses:
                hint = f"connect to it, or to all of them; connected: {', '.join(addresses)}"
                text = f"this dead letter is of the broker {address!r}, which is none of these"
                raise Misuse(Code.BAD_ARGUMENT, text, hint)
            found.setdefault(addresses.index(address), []).append(at)
        return found

    def _settle_part(
        self, number: int, group: str, act: Remedy, items: list[Mapping[str, Any]], why: str | None
    ) -> list[Code]:
        wanted: Any = [{name: item[name] for name in _SHOWN if name in item} for item in items]
        request = signed(dead_letters.Settle(group=group, act=act, items=wanted), why)
        return [Code[name] for name in self._ask(number, dead_letters.SETTLE(request))["codes"]]

    def _settle_all(self, number: int, group: str, act: Remedy, why: str | None) -> int:
        """Retry or discard all dead letters of a group at broker ``number``, page by page: each once, even if a retried
        message dies again at once. Returns how many."""
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
