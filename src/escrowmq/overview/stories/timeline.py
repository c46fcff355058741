"""Looks for anything, and tells of each message that is found what became of it and why it waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from escrowmq.client.bus import Bus
from escrowmq.model import TransactionId
from escrowmq.overview.asking import Asking
from escrowmq.overview.stories import reasons
from escrowmq.overview.stories.broker_events import broker_events
from escrowmq.overview.stories.brokers import AtBroker, Looked
from escrowmq.overview.stories.known import Databases, InDatabase
from escrowmq.overview.stories.sought import sought
from escrowmq.overview.values import Event, Story, Timeline

if TYPE_CHECKING:
    import sqlalchemy as sa

MOST_STORIES = 20
"""The most messages of one answer; of more it only says that there are."""
MOST_BODY = 2_000
"""Characters of a body that are shown."""
_PLACE = ("written", "driven", "prepared", "stored", "replaced", "local", "checked", "parked", "reopened")
"""What comes first of what happened at the same time."""


def timeline(bus: Bus, wanted: str, engines: Sequence[sa.Engine] = (), *, limit: int = MOST_STORIES) -> Timeline:
    """Return the history of the messages that ``wanted`` may mean: a message id (or the text that it was made of), a
    key, a transaction id, ``TOPIC/QUEUE/OFFSET``, at most ``limit`` of them; over all brokers of ``bus`` and all
    databases of ``engines``.

    Who is away is named in ``missing``; what cannot be known any more is said in ``notes``. Raises
    Misuse(BAD_ARGUMENT).
    """
    meaning = sought(wanted)
    asking = Asking(bus, engines)
    now_us = asking.now_us()
    looked = Looked(asking)
    found, more = looked.find(meaning, limit)
    ids = dict.fromkeys([meaning.message_id, *_ids(found)])
    transactions = [
        bytes(TransactionId.parse(one.message["transaction"])) for one in found if one.message["transaction"]
    ]
    known = _in_databases(asking, wanted, ids, dict.fromkeys(transactions), limit + 1)
    others = [row.message_id for row in known.rows if row.message_id not in ids]
    found += looked.by_ids(dict.fromkeys(others), max(limit - len(found), 0))
    stories = [_story(one, known, now_us) for one in found]
    seen = {(one.message["message_id"], one.message["topic"]) for one in found}
    alone: dict[bytes, list[InDatabase]] = {}
    for row in known.rows:
        if not any(_belongs(row, *one) for one in seen):
            alone.setdefault(row.message_id, []).append(row)
    stories += [_story_of_rows(rows, now_us) for rows in alone.values()]
    notes = list(dict.fromkeys(known.notes))
    if known.rows and found:
        notes.append("Times of a database are by its clock, those of a broker by its own.")
    return Timeline(wanted, tuple(stories[:limit]), more or len(stories) > limit, now_us, asking.missing, tuple(notes))


def _ids(found: Iterable[AtBroker]) -> list[bytes]:
    return [bytes.fromhex(one.message["message_id"]) for one in found if one.message["message_id"] is not None]


def _belongs(row: InDatabase, message_id: str | None, topic: str | None) -> bool:
    """Return whether what a database knows may be of this message: the same id, and no other topic."""
    if row.message_id.hex() != message_id:
        return False
    named = [one["topic"] for one in (row.outbox, row.driven) if one is not None]
    return not named or topic is None or topic in named


def _story(of: AtBroker, known: Databases, now_us: int) -> Story:
    message = of.message
    rows = [row for row in known.rows if _belongs(row, message["message_id"], message["topic"])]
    events = broker_events(of, now_us)
    events += _events(rows, known.barriers, message["transaction"])
    causes = [*reasons.at_broker(of, now_us), *_reasons(rows, True, now_us)]
    reason = reasons.the_reason(causes)
    notes = list(of.notes)
    if of.stands is not None and "until_us" in of.stands:
        notes.append(
            "What consumers did with it was read from the log up to a bound; what came later is not told here."
        )
    if of.stands is not None and of.stands.get("more"):
        notes.append(f"{of.stands['more']:,} more consumer groups are left out.")
    body = message["body"]
    if message.get("withheld"):
        notes.append(
            "Its body is withheld; this shows it, and is recorded: escrowmq transactions show "
            f"{message['transaction']} --body"
        )
    return Story(
        title=_title(message["topic"], message["message_id"]),
        message_id=message["message_id"],
        topic=message["topic"],
        key=message["key"],
        tag=message["tag"],
        transaction=message["transaction"],
        state=reason.state,
        waits=reason.rank < reasons.Rank.DONE,
        why=reason.sentence,
        events=_sort(events),
        notes=tuple(notes),
        offers=reason.offers,
        properties=message["properties"],
        body=None if body is None else body[: 4 * MOST_BODY].decode("utf-8", "backslashreplace")[:MOST_BODY],
        body_bytes=None if body is None else len(body),
    )


def _story_of_rows(rows: list[InDatabase], now_us: int) -> Story:
    """Of what only databases know."""
    content: dict[str, Any] = next((one for row in rows for one in (row.outbox, row.driven, *row.prepared) if one), {})
    reason = reasons.the_reason(_reasons(rows, False, now_us))
    transaction = next((row.driven["transaction_id"] for row in rows if row.driven), None)
    identity = rows[0].message_id.hex()
    return Story(
        title=_title(content.get("topic"), identity),
        message_id=identity,
        topic=content.get("topic"),
        key=content.get("key"),
        tag=content.get("tag"),
        transaction=None if transaction is None else str(TransactionId.from_bytes(bytes(transaction))),
        state=reason.state,
        waits=reason.rank < reasons.Rank.DONE,
        why=reason.sentence,
        events=_sort(_events(rows)),
        notes=("None of the brokers that answered has it.",),
        offers=reason.offers,
        body_bytes=content.get("body_bytes"),
    )


# What databases know is read by modules that need SQLAlchemy: they are imported where a database is


def _in_databases(
    asking: Asking, key: str, ids: Iterable[bytes], transactions: Iterable[bytes], limit: int
) -> Databases:
    if not asking.engines:
        return Databases()
    from escrowmq.overview.stories import databases

    return databases.read(asking, key, ids, transactions, limit)


def _events(
    rows: list[InDatabase], barriers: list[dict[str, Any]] | None = None, transaction: str | None = None
) -> list[Event]:
    if not rows and not barriers:
        return []
    from escrowmq.overview.stories.database_events import barrier_events, database_events

    events = barrier_events(barriers or [], bytes(TransactionId.parse(transaction))) if transaction else []
    return events + [event for row in rows for event in database_events(row)]


def _reasons(rows: list[InDatabase], at_brokers: bool, now_us: int) -> list[reasons.Reason]:
    if not rows:
        return []
    from escrowmq.overview.stories.database_reasons import in_database

    return [one for row in rows for one in in_database(row, at_brokers, now_us)]


def _title(topic: str | None, message_id: str | None) -> str:
    return f"message {message_id or '(damaged)'}" + (f" of {topic}" if topic else "")


def _sort(events: list[Event]) -> tuple[Event, ...]:
    """Sort by time; an event without a time stays behind the one before it."""
    keyed: list[tuple[int, int, int, Event]] = []
    last: dict[str, int] = {}
    for number, event in enumerate(events):
        time_us = event.time_us if event.time_us is not None else last.get(event.where, 0)
        last[event.where] = time_us
        rank = _PLACE.index(event.event) if event.event in _PLACE else len(_PLACE)
        keyed.append((time_us, rank, number, event))
    return tuple(event for *_, event in sorted(keyed, key=lambda one: one[:3]))
