"""Search for messages, with the history of each and the reason why it waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from escrowmq.client.bus import Bus
from escrowmq.model import TransactionId
from escrowmq.overview.sources import Sources
from escrowmq.overview.stories import reasons
from escrowmq.overview.stories.broker_events import list_broker_events
from escrowmq.overview.stories.brokers import AtBroker, BrokerLookup, parse_wanted
from escrowmq.overview.stories.known import Databases, InDatabase
from escrowmq.overview.values import Event, Story, Timeline

if TYPE_CHECKING:
    import sqlalchemy as sa

MOST_STORIES = 20
"""Maximum number of messages in one answer; ``more`` is set if there are others."""
MOST_BODY = 2_000
"""Maximum number of characters of a body that are shown."""
_PLACE = ("written", "driven", "prepared", "stored", "replaced", "local", "checked", "parked", "reopened")
"""Order of events that happened at the same time."""


def timeline(bus: Bus, wanted: str, engines: Sequence[sa.Engine] = (), *, limit: int = MOST_STORIES) -> Timeline:
    """Return the history of the messages that ``wanted`` may mean.

    ``wanted`` is a message id (or the text that it was derived from), a key, a transaction id, or
    ``TOPIC/QUEUE/OFFSET``. All brokers of ``bus`` and all databases of ``engines`` are searched; at most ``limit``
    messages are returned. Brokers and databases that did not answer are named in ``missing``; facts that are no longer
    stored are listed in ``notes``. Raises Misuse(BAD_ARGUMENT).
    """
    meaning = parse_wanted(wanted)
    sources = Sources(bus, engines)
    now_us = sources.now_us()
    lookup = BrokerLookup(sources)
    found, more = lookup.find(meaning, limit)
    ids = dict.fromkeys([meaning.message_id, *_list_ids(found)])
    transactions = [
        bytes(TransactionId.parse(one.message["transaction"])) for one in found if one.message["transaction"]
    ]
    known = _read_databases(sources, wanted, ids, dict.fromkeys(transactions), limit + 1)
    others = [row.message_id for row in known.rows if row.message_id not in ids]
    found += lookup.find_ids(dict.fromkeys(others), max(limit - len(found), 0))
    stories = [_make_story(one, known, now_us) for one in found]
    seen = {(one.message["message_id"], one.message["topic"]) for one in found}
    alone: dict[bytes, list[InDatabase]] = {}
    for row in known.rows:
        if not any(_can_belong(row, *one) for one in seen):
            alone.setdefault(row.message_id, []).append(row)
    stories += [_make_database_story(rows, now_us) for rows in alone.values()]
    notes = list(dict.fromkeys(known.notes))
    if known.rows and found:
        notes.append("Times of a database are by its clock, those of a broker by its own.")
    return Timeline(wanted, tuple(stories[:limit]), more or len(stories) > limit, now_us, sources.missing, tuple(notes))


def _list_ids(found: Iterable[AtBroker]) -> list[bytes]:
    return [bytes.fromhex(one.message["message_id"]) for one in found if one.message["message_id"] is not None]


def _can_belong(row: InDatabase, message_id: str | None, topic: str | None) -> bool:
    """Return whether the rows of a database may concern this message: they have the same id and no other topic."""
    if row.message_id.hex() != message_id:
        return False
    named = [one["topic"] for one in (row.outbox, row.driven) if one is not None]
    return not named or topic is None or topic in named


def _make_story(of: AtBroker, known: Databases, now_us: int) -> Story:
    message, stands, body = of.message, of.stands or {}, of.message["body"]
    rows = [row for row in known.rows if _can_belong(row, message["message_id"], message["topic"])]
    events = list_broker_events(of, now_us) + _list_events(rows, known.barriers, message["transaction"])
    causes = [*reasons.explain_at_broker(of, now_us), *_list_reasons(rows, True, now_us)]
    notes = list(of.notes)
    if "until_us" in stands:
        notes.append("The log was read up to a limit; later events of consumer groups are not included.")
    if stands.get("more"):
        notes.append(f"{stands['more']:,} more consumer groups are not included.")
    if message.get("withheld"):
        command = f"escrowmq transactions show {message['transaction']} --body"
        notes.append(f"Its body is withheld; this shows it, and is recorded: {command}")
    facts: dict[str, Any] = {"transaction": message["transaction"], "properties": message["properties"]}
    if body is not None:
        text = body[: 4 * MOST_BODY].decode("utf-8", "backslashreplace")[:MOST_BODY]
        facts |= {"body": text, "body_bytes": len(body)}
    return _fill_story(message, message["message_id"], causes, events, notes=tuple(notes), **facts)


def _make_database_story(rows: list[InDatabase], now_us: int) -> Story:
    """Return the history of a message that only databases have."""
    content: dict[str, Any] = next((one for row in rows for one in (row.outbox, row.driven, *row.prepared) if one), {})
    raw = next((row.driven["transaction_id"] for row in rows if row.driven), None)
    transaction = None if raw is None else str(TransactionId.from_bytes(bytes(raw)))
    facts: dict[str, Any] = {"transaction": transaction, "body_bytes": content.get("body_bytes")}
    causes, notes = _list_reasons(rows, False, now_us), ("None of the brokers that answered has it.",)
    return _fill_story(content, rows[0].message_id.hex(), causes, _list_events(rows), notes=notes, **facts)


def _fill_story(
    content: Mapping[str, Any],
    message_id: str | None,
    causes: Sequence[reasons.Reason],
    events: list[Event],
    **facts: Any,
) -> Story:
    reason, topic = reasons.choose_reason(causes), content.get("topic")
    return Story(
        title=f"message {message_id or '(damaged)'}" + (f" of {topic}" if topic else ""), message_id=message_id,
        topic=topic, key=content.get("key"), tag=content.get("tag"), state=reason.state,
        waits=reason.rank < reasons.Rank.DONE, why=reason.sentence, events=_sort(events), offers=reason.offers, **facts,
    )  # fmt: skip


# These modules need SQLAlchemy, so they are imported only if there is a database


def _read_databases(
    sources: Sources, key: str, ids: Iterable[bytes], transactions: Iterable[bytes], limit: int
) -> Databases:
    if not sources.engines:
        return Databases()
    from escrowmq.overview.stories import databases

    return databases.read_databases(sources, key, ids, transactions, limit)


def _list_events(
    rows: list[InDatabase], barriers: list[dict[str, Any]] | None = None, transaction: str | None = None
) -> list[Event]:
    if not rows and not barriers:
        return []
    from escrowmq.overview.stories.database_events import list_barrier_events, list_database_events

    events = list_barrier_events(barriers or [], bytes(TransactionId.parse(transaction))) if transaction else []
    return events + [event for row in rows for event in list_database_events(row)]


def _list_reasons(rows: list[InDatabase], at_brokers: bool, now_us: int) -> list[reasons.Reason]:
    if not rows:
        return []
    from escrowmq.overview.stories.database_reasons import explain_in_database

    return [one for row in rows for one in explain_in_database(row, at_brokers, now_us)]


def _sort(events: list[Event]) -> tuple[Event, ...]:
    """Sort by time. An event without a time stays behind the event before it."""
    keyed: list[tuple[int, int, Event]] = []
    last: dict[str, int] = {}
    for event in events:
        time_us = event.time_us if event.time_us is not None else last.get(event.where, 0)
        last[event.where] = time_us
        rank = _PLACE.index(event.event) if event.event in _PLACE else len(_PLACE)
        keyed.append((time_us, rank, event))
    return tuple(event for *_, event in sorted(keyed, key=lambda one: one[:2]))
