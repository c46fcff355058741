"""Requests to all brokers, or to the one that holds something, for all parts of the admin API."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar, cast

from escrowmq.client.entries import AtBroker
from escrowmq.client.links.answers import Listing
from escrowmq.client.links.presence import Missing
from escrowmq.client.links.router import Router
from escrowmq.client.producing.own_ids import AnyTransactionId, is_transaction_id, transaction_of_message
from escrowmq.client.reading.viewing import call_each
from escrowmq.errors import DONE, Code, error
from escrowmq.message.ids import id_bytes
from escrowmq.model import TransactionId
from escrowmq.platform.times import datetime_us
from escrowmq.wire import Call
from escrowmq.wire.actions.action import Answer, Request, Results

_PAGE = 1000
T = TypeVar("T")


class Asking:
    """Calls of one program. ``timeout`` is seconds per call."""

    def __init__(self, router: Router, timeout: float = 30.0) -> None:
        self._router = router
        self._timeout = timeout

    def _ask(self, number: int, call: Call[Answer]) -> Answer:
        return self._router.ask(number, call, time.monotonic() + self._timeout, longest=self._timeout)

    def _each(self, call: Call[Answer], *unknown: Code) -> tuple[list[tuple[AtBroker, Answer]], list[Missing]]:
        """Send a call to all brokers. Returns the answers of the reachable ones, each with its broker's address, and
        the missing brokers. A broker that rejects the call with a code of ``unknown`` is left out; if all do, that is
        raised."""
        return self._act_each(lambda number: self._ask(number, call), *unknown)

    def _act_each(self, act: Callable[[int], T], *unknown: Code) -> tuple[list[tuple[AtBroker, T]], list[Missing]]:
        """As :meth:`_each`, with the results of ``act(number)``."""
        found, missing = call_each(self._router, act, self._timeout, *unknown)
        links = self._router.links
        return [({"broker": links[number].address}, one) for number, one in found.items() if one is not None], missing

    def _rows(self, call: Call[Any], rows: str | None, *unknown: Code) -> Listing[Any]:
        """Send a call to all brokers. Returns the entries under the name ``rows`` in each answer, or (None) the
        answers, each with its ``broker``. ``unknown``: see :meth:`_each`."""
        found, missing = self._each(call, *unknown)
        entries = ((at, row) for at, answer in found for row in ([answer] if rows is None else answer[rows]))
        return Listing(({**row, **at} for at, row in entries), missing)

    def _pages(self, call: Call[Any], what: str, limit: int | None) -> Listing[Any]:
        """Request a listing from all brokers, page after page. Returns the entries under the name ``what``, each with
        its ``broker``: at most ``limit`` per broker (None: all)."""

        def ask(number: int) -> list[Any]:
            found: list[Any] = []
            after: Any = call.request.get("after")
            while limit is None or len(found) < limit:
                page = _PAGE if limit is None else min(_PAGE, limit - len(found))
                request = {**call.request, **given(dict, limit=page, after=after)}
                answer: Any = self._ask(number, replace(call, request=request))
                found.extend({**item, "broker": self._router.links[number].address} for item in answer[what])
                after = answer.get("next")
                if after is None:
                    break
            return found

        answers = self._router.every(ask, self._timeout)
        return Listing((item for found in answers.values for item in found), answers.missing)

    def _find(self, transaction_id: AnyTransactionId, group: str | None = None) -> tuple[TransactionId, int]:
        """Return a transaction's id, and the number of the broker that holds it. A text that is no transaction id is
        the id of one of its messages, in this producer group or in any."""
        if isinstance(transaction_id, str) and not is_transaction_id(transaction_id):
            transaction_id = transaction_of_message(self._router, transaction_id, group, self._timeout)
        identity = TransactionId.from_bytes(id_bytes(transaction_id))
        return identity, self._router.of_shard(identity.shard, self._timeout)


def given(shape: type[Request], **values: Any) -> Request:
    """Return a request of these fields, without those that are None. ``shape`` is only its type."""
    return cast(Request, {name: value for name, value in values.items() if value is not None})


def microseconds(time: datetime | None) -> int | None:
    """Convert a time to whole microseconds since 1970; None stays None."""
    return None if time is None else datetime_us(time)


def with_body(message: Any) -> Any:
    """Replace the base64 text of a message's body by ``body`` (bytes, or None), in place. Returns the message."""
    body = message.pop("body_base64")
    message["body"] = None if body is None else base64.b64decode(body)
    return message


def single(answer: Results) -> Code:
    """Return the code in an answer about one id; raise it as an error unless it is a success."""
    code = Code[answer["codes"][0]]
    if code not in DONE:
        raise error(code)
    return code
