"""Pages of long listings over several brokers: one cursor holds the position at each, so pages read only their rows."""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from escrowmq.client.links.presence import Missing
from escrowmq.client.links.router import Router
from escrowmq.console.limits import PAGE_ROWS
from escrowmq.errors import Code, error
from escrowmq.wire import Call

_END = "end"


@dataclass(frozen=True, slots=True)
class Rows:
    """One page: its rows (each with its ``broker``), the next page's cursor (None: the last), unreachable brokers."""

    rows: list[dict[str, Any]]
    next: str | None
    missing: list[Missing]


def page(
    router: Router, call: Call[Any], what: str, cursor: str | None, timeout: float, limit: int = PAGE_ROWS
) -> Rows:
    """Return the page after ``cursor``: at most ``limit`` entries ``what`` per broker. Raises Misuse(BAD_ARGUMENT)."""
    places = _decode(cursor)

    def ask(number: int) -> tuple[list[dict[str, Any]], Any]:
        after = places.get(str(number))
        if after == _END:
            return [], _END
        request = {**call.request, "limit": limit, **({} if after is None else {"after": after})}
        deadline = time.monotonic() + timeout
        answer: Any = router.ask(number, replace(call, request=request), deadline, longest=timeout)
        address = router.links[number].address
        return [{**item, "broker": address} for item in answer[what]], answer.get("next", _END)

    answers = router.every(ask, timeout + 1.0)
    rows = [row for found, _ in answers.values for row in found]
    nexts = {str(number): after for number, (_, after) in answers.found}
    more = any(after != _END for after in nexts.values())
    return Rows(rows, _encode({**places, **nexts}) if more else None, answers.missing)


def _encode(places: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(places, separators=(",", ":")).encode()).decode().rstrip("=")


def _decode(cursor: str | None) -> dict[str, Any]:
    if cursor is None:
        return {}
    try:
        places = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if not isinstance(places, dict) or not all(_is_position(after) for after in places.values()):
            raise ValueError
    except (ValueError, binascii.Error, RecursionError):
        raise error(Code.BAD_ARGUMENT, "this address names no page of the listing", "begin at its first page") from None
    return places


def _is_position(after: Any) -> bool:
    """Decide whether a value can be a position in a listing: a number, a text, or a few of them."""
    if isinstance(after, list):
        return len(after) <= 8 and all(isinstance(one, int | str) for one in after)
    return isinstance(after, int | str)
