"""The options of a consumer and their validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """The options of a consumer; see :meth:`escrowmq.Bus.consumer`."""

    tags: str | Sequence[str] | None = None
    ordered: bool = False
    start: str | datetime | None = None
    lease: float | None = None
    max_attempts: int | None = None
    retry_backoff: float | None = None
    retry_backoff_max: float | None = None
    redelivery: str | Sequence[float] | None = None
    prefetch: int = 2
    max_bytes: int = 16 << 20
    qos: int = 1
    seen: Callable[[Any], bool] | None = None
    timeout: float = 30.0
    instance: str | None = None
    in_doubt: str = "redeliver"

    def check(self) -> None:
        qos, lease, prefetch, hold = self.qos, self.lease, self.prefetch, self.in_doubt == "hold"
        known = qos in (0, 1, 2) and not isinstance(qos, bool)
        counts = isinstance(prefetch, int) and 1 <= prefetch <= 64
        named = "name this consumer: what is in doubt waits for the next process of that name"
        looked_up = "give seen=FUNCTION: it looks the message's id up in the database that holds the effect"
        for wrong, text, hint in (
            (self.in_doubt not in ("redeliver", "hold"), f"in_doubt = {self.in_doubt!r}", '"redeliver" or "hold"'),
            (hold != (self.instance is not None), 'in_doubt="hold" and instance= go together', named),
            (hold and lease is not None, 'with in_doubt="hold" leases do not end by time', "leave lease= out"),
            (not known, f"qos = {qos!r}", "0 at most once, 1 at least once, 2 with seen="),
            ((qos == 2) != (self.seen is not None), "qos=2 and seen= go together", looked_up),
            (not counts, f"prefetch = {prefetch!r}", "receives ahead, 1 to 64"),
            (lease is not None and not 0.001 <= lease < 1e6, f"lease = {lease!r}", "seconds, at least 0.001"),
        ):
            if wrong:
                raise Misuse(Code.BAD_ARGUMENT, text, hint)


def subscription(group: str, topics: str | Sequence[str], options: ConsumerOptions) -> groups.Subscribe:
    """Build the request ``groups.subscribe`` from a consumer's options. Raises Misuse(BAD_ARGUMENT), BAD_GROUP_NAME,
    BAD_TOPIC_NAME."""
    check_name(group, Code.BAD_GROUP_NAME)
    names = [topics] if isinstance(topics, str) else list(topics)
    if not names:
        raise Misuse(Code.BAD_ARGUMENT, "a consumer needs a topic")
    for name in names:
        check_name(name, Code.BAD_TOPIC_NAME)
    if options.redelivery == "forever" and options.max_attempts is not None:
        text = f'redelivery="forever" with max_attempts = {options.max_attempts!r}'
        raise Misuse(Code.BAD_ARGUMENT, text, "give one of them")
    request = {
        "group": group,
        "topics": names,
        "ordered": bool(options.ordered),
        "tags": tag_list(options.tags) or None,
        "start": None if options.start is None else start_text(options.start),
        "max_attempts": options.max_attempts,
        **redelivery_request(options.redelivery),
        "retry_backoff": options.retry_backoff,
        "retry_backoff_max": options.retry_backoff_max,
        "in_doubt": "hold" if options.in_doubt == "hold" else None,
    }
    return cast(groups.Subscribe, {name: value for name, value in request.items() if value is not None})


def tag_list(tags: str | Sequence[str] | None) -> list[str]:
    """Convert ``"a || b"`` or ``["a", "b"]`` to a list; empty for ``"*"`` and None, which mean all. Raises
    Misuse(BAD_ARGUMENT)."""
    if tags is None or tags == "*":
        return []
    parts = [part.strip() for part in tags.split("||")] if isinstance(tags, str) else list(tags)
    if not all(isinstance(part, str) and part for part in parts):
        raise Misuse(Code.BAD_ARGUMENT, f"tags = {tags!r}", 'give "a||b" or ["a", "b"]')
    return parts


def redelivery_request(redelivery: str | Sequence[float] | None) -> dict[str, Any]:
    """Convert ``redelivery`` (see :func:`retry_delays`) to the fields of a request: the delays or, without an end,
    ``max_attempts``. Raises Misuse(BAD_ARGUMENT)."""
    if redelivery is None:
        return {}
    delays = retry_delays(redelivery)
    return {"retry_delays": delays} if delays else {"max_attempts": FOREVER}


def retry_delays(redelivery: str | Sequence[float]) -> list[float]:
    """Return the seconds before the second, third, ... delivery; empty: the group's back-off, without an end.

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
    """Create a consumer group at one broker, or join it. Raises SUBSCRIPTION_MISMATCH, Unknown(TIMED_OUT), BROKER_AWAY
    and so on.

    The start is compared here, because a broker cannot: clients of 0.1.0 always send one, ``earliest`` by default.
    """
    answer = patient_action(link, groups.SUBSCRIBE(request), deadline, attendance)
    start = request.get("start")
    began = answer.get("start", start)  # brokers of 0.1.0 do not return it
    if start is not None and began is not None and start != began:
        text = f"the consumer group {request['group']!r} exists and began at {start_words(began)}, "
        hint = "start= says where a new group begins: leave it out to go on where this group stands, or name another "
        raise Rejected(Code.SUBSCRIPTION_MISMATCH, f"{text}not {start_words(start)}", f"{hint}group")
    return answer


def start_words(start: str) -> str:
    """Return the start of a group in a request as text for people: a time (microseconds) as ISO 8601."""
    return datetime.fromtimestamp(int(start) / 1e6, UTC).isoformat() if start.isdigit() else start


def start_text(start: str | datetime) -> str:
    """Convert the start of a group to its form in a request: "earliest", "latest", or microseconds in digits for a
    datetime. Raises Misuse(BAD_ARGUMENT)."""
    if isinstance(start, datetime):
        return str(datetime_us(start))
    if start not in ("earliest", "latest"):
        raise Misuse(Code.BAD_ARGUMENT, f"start = {start!r}", '"earliest", "latest" or a datetime')
    return start


def delay_us(delay: float | None) -> int:
    """Convert a NACK's delay to microseconds; None: -1, the group's back-off. Raises Misuse(BAD_ARGUMENT)."""
    if delay is None:
        return -1
    if isinstance(delay, bool) or not isinstance(delay, int | float) or not 0 <= delay < 1e9:
        raise Misuse(Code.BAD_ARGUMENT, f"delay = {delay!r}: seconds, 0 or more")
    return to_us(delay)


def cause_text(cause: str | None) -> str | None:
    """Return a NACK's cause as it is sent: valid Unicode, cut to ``MAX_CAUSE`` characters; None stays None. Raises
    Misuse(BAD_ARGUMENT) if it is no text."""
    if cause is None:
        return None
    if not isinstance(cause, str):
        raise Misuse(Code.BAD_ARGUMENT, f"cause = {cause!r:.100}: a text", "of an exception: cause=str(problem)")
    return cause[:MAX_CAUSE].encode(errors="replace").decode()
