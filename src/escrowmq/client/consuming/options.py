"""The options of a consumer and their validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from escrowmq.client.links.answers import patient_action
from escrowmq.client.links.presence import Attendance
from escrowmq.errors import Code, Misuse, Rejected
from escrowmq.message.limits import MAX_CAUSE
from escrowmq.message.names import check_name
from escrowmq.model import FOREVER, REDELIVERY
from escrowmq.platform.times import datetime_us, to_us
from escrowmq.settings import SECONDS, parse_quantity
from escrowmq.wire import Link
from escrowmq.wire.actions import groups

DEFAULT_BATCH = 1000
"""Messages per receive, and per batch that is handed out."""


def subscription(
    group: str,
    topics: str | Sequence[str],
    tags: str | Sequence[str] | None,
    ordered: bool,
    start: str | datetime | None,
    max_attempts: int | None,
    retry_backoff: float | None,
    retry_backoff_max: float | None,
    in_doubt: str = "redeliver",
    redelivery: str | Sequence[float] | None = None,
) -> groups.Subscribe:
    """Return the request ``groups.subscribe``; raises Misuse(BAD_ARGUMENT), BAD_GROUP_NAME, BAD_TOPIC_NAME.

    ``start`` None: the caller has no opinion; then the request does not name it.
    """
    check_name(group, Code.BAD_GROUP_NAME)
    names = [topics] if isinstance(topics, str) else list(topics)
    if not names:
        raise Misuse(Code.BAD_ARGUMENT, "a consumer needs a topic")
    for name in names:
        check_name(name, Code.BAD_TOPIC_NAME)
    if redelivery == "forever" and max_attempts is not None:
        raise Misuse(
            Code.BAD_ARGUMENT, f'redelivery="forever" with max_attempts = {max_attempts!r}', "give one of them"
        )
    request = {"group": group, "topics": names, "ordered": bool(ordered)}
    optional = {
        "tags": tag_list(tags) or None,
        "start": None if start is None else start_text(start),
        "max_attempts": max_attempts,
        **redelivery_request(redelivery),
        "retry_backoff": retry_backoff,
        "retry_backoff_max": retry_backoff_max,
        "in_doubt": "hold" if in_doubt == "hold" else None,
    }
    return cast(groups.Subscribe, request | {name: value for name, value in optional.items() if value is not None})


def tag_list(tags: str | Sequence[str] | None) -> list[str]:
    """Convert ``"a || b"`` and ``["a", "b"]`` to a list; ``"*"`` and None mean all."""
    if tags is None or tags == "*":
        return []
    parts = [part.strip() for part in tags.split("||")] if isinstance(tags, str) else list(tags)
    if not all(isinstance(part, str) and part for part in parts):
        raise Misuse(Code.BAD_ARGUMENT, f"tags = {tags!r}", 'give "a||b" or ["a", "b"]')
    return parts


def redelivery_request(redelivery: str | Sequence[float] | None) -> dict[str, Any]:
    """Return what a redelivery adds to a request. Raises Misuse(BAD_ARGUMENT)."""
    if redelivery is None:
        return {}
    delays = retry_delays(redelivery)
    return {"retry_delays": delays} if delays else {"max_attempts": FOREVER}


def retry_delays(redelivery: str | Sequence[float]) -> list[float]:
    """Return the seconds before the second, third, ... delivery; empty: the group's back-off, for ever.

    ``redelivery`` is the name of one of :data:`~escrowmq.model.REDELIVERY`, durations as text (``"10s, 1min"``), or
    numbers. Raises Misuse(BAD_ARGUMENT).
    """
    hint = f"{', '.join(map(repr, REDELIVERY))}, or the seconds before each redelivery, such as [10, 60]"
    if isinstance(redelivery, str) and redelivery in REDELIVERY:
        return list(REDELIVERY[redelivery])
    try:
        parts = redelivery.split(",") if isinstance(redelivery, str) else list(redelivery)
        delays = [
            float(parse_quantity(part.strip(), SECONDS)) if isinstance(part, str) else float(part) for part in parts
        ]
    except (TypeError, ValueError):
        raise Misuse(Code.BAD_ARGUMENT, f"redelivery = {redelivery!r}", hint) from None
    if not delays or not all(0 <= delay < 1e9 for delay in delays):
        raise Misuse(Code.BAD_ARGUMENT, f"redelivery = {redelivery!r}", hint)
    return delays


def subscribe(
    link: Link, request: groups.Subscribe, deadline: float, attendance: Attendance | None = None
) -> groups.Subscribed:
    """Make or join a group at one broker. Raises SUBSCRIPTION_MISMATCH, also if the caller named a start and the group,
    which exists, began elsewhere; Unknown(TIMED_OUT), BROKER_AWAY and so on.

    About the start the broker says no more than where the group began: clients of 0.1.0 name ``earliest`` when their
    caller named nothing.
    """
    answer = patient_action(link, groups.SUBSCRIBE(request), deadline, attendance)
    if "start" in request and request["start"] != (
        began := answer.get("start", request["start"])
    ):  # 0.1.0 does not say it
        raise Rejected(
            Code.SUBSCRIPTION_MISMATCH,
            f"the consumer group {request['group']!r} exists and began at {start_words(began)}, "
            f"not {start_words(request['start'])}",
            "start= says where a new group begins: leave it out to go on where this group stands, or name another "
            "group",
        )
    return answer


def start_words(start: str) -> str:
    """Return a start as people write it: a time as ISO 8601."""
    return datetime.fromtimestamp(int(start) / 1e6, UTC).isoformat() if start.isdigit() else start


def start_text(start: str | datetime) -> str:
    """Return a start as it travels. Raises Misuse(BAD_ARGUMENT)."""
    if isinstance(start, datetime):
        return str(datetime_us(start))
    if start not in ("earliest", "latest"):
        raise Misuse(Code.BAD_ARGUMENT, f"start = {start!r}", '"earliest", "latest" or a datetime')
    return start


def check_options(
    qos: int,
    seen: Callable[[Any], bool] | None,
    prefetch: int,
    lease: float | None,
    instance: str | None,
    in_doubt: str,
) -> None:
    """Raise Misuse for options that make no sense."""
    if in_doubt not in ("redeliver", "hold"):
        raise Misuse(Code.BAD_ARGUMENT, f"in_doubt = {in_doubt!r}", '"redeliver" or "hold"')
    if (in_doubt == "hold") != (instance is not None):
        hint = "name this consumer: what is in doubt waits for the next process of that name"
        raise Misuse(Code.BAD_ARGUMENT, 'in_doubt="hold" and instance= go together', hint)
    if in_doubt == "hold" and lease is not None:
        raise Misuse(Code.BAD_ARGUMENT, 'with in_doubt="hold" leases do not end by time', "leave lease= out")
    if qos not in (0, 1, 2) or isinstance(qos, bool):
        raise Misuse(Code.BAD_ARGUMENT, f"qos = {qos!r}", "0 at most once, 1 at least once, 2 with seen=")
    if (qos == 2) != (seen is not None):
        hint = "give seen=FUNCTION: it looks the message's id up in the database that holds the effect"
        raise Misuse(Code.BAD_ARGUMENT, "qos=2 and seen= go together", hint)
    if not isinstance(prefetch, int) or not 1 <= prefetch <= 64:
        raise Misuse(Code.BAD_ARGUMENT, f"prefetch = {prefetch!r}", "receives ahead, 1 to 64")
    if lease is not None and not 0.001 <= lease < 1e6:
        raise Misuse(Code.BAD_ARGUMENT, f"lease = {lease!r}", "seconds, at least 0.001")


def delay_us(delay: float | None) -> int:
    """Return a NACK's delay in microseconds; None: the group's back-off (-1)."""
    if delay is None:
        return -1
    if isinstance(delay, bool) or not isinstance(delay, int | float) or not 0 <= delay < 1e9:
        raise Misuse(Code.BAD_ARGUMENT, f"delay = {delay!r}: seconds, 0 or more")
    return to_us(delay)


def cause_text(cause: str | None) -> str | None:
    """Return a NACK's cause as it can travel: Unicode, no longer than what is kept of it."""
    if cause is None:
        return None
    if not isinstance(cause, str):
        raise Misuse(Code.BAD_ARGUMENT, f"cause = {cause!r:.100}: a text", "of an exception: cause=str(problem)")
    return cause[:MAX_CAUSE].encode(errors="replace").decode()
