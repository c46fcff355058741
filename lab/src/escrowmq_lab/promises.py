"""Promises beyond those of :mod:`escrowmq_lab.checker`, each as a pure function from a history to its violations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from escrowmq_lab.checker import Resets, Violation
from escrowmq_lab.history import Act, Event, Kind


def disordered(events: Sequence[Event], ordered: Iterable[str] = ()) -> list[Violation]:
    """Check I19, I20: plain messages of one key that a process sent one after the other, each *ok* before the next, are
    in that order in their queue; and the groups ``ordered`` first received the messages of each key in queue order."""
    found: list[Violation] = []
    stands = {e.value: e for e in events if e.act is Act.STANDS}
    sent: dict[tuple[str, str | None, str | None], list[Event]] = defaultdict(list)
    for event in events:
        if event.act is Act.SEND and event.kind is Kind.OK and event.key is not None and event.value in stands:
            sent[event.process, event.topic, event.key].append(event)
    for (_, topic, key), calls in sent.items():
        for earlier, later in pairwise(calls):
            one, two = stands[earlier.value], stands[later.value]
            if one.broker == two.broker and one.queue == two.queue and (one.offset or 0) > (two.offset or 0):
                detail = f"{earlier.value} was sent before it, with the key {key} to {topic}, and stands behind it"
                found.append(Violation("disordered", str(later.value), detail, (earlier, later, one, two)))
    found += _delivered_in_order(events, set(ordered), stands)
    return found


def _delivered_in_order(events: Sequence[Event], ordered: set[str], stands: dict[str | None, Event]) -> list[Violation]:
    found: list[Violation] = []
    first: set[tuple[str | None, str | None]] = set()
    last: dict[tuple[str | None, ...], Event] = {}
    for event in events:
        if event.act is not Act.RECEIVE or event.group not in ordered or (event.group, event.value) in first:
            continue
        first.add((event.group, event.value))
        there = stands.get(event.value, event)  # a consumer may not know the broker
        key = (event.group, there.broker, event.topic, str(event.queue), event.key)
        before = last.get(key)
        if before is not None and (before.offset or 0) > (event.offset or 0):
            detail = f"first delivered after {before.value}, which stands behind it"
            found.append(Violation("disordered", str(event.value), detail, (before, event)))
        last[key] = event
    return found


def early(events: Sequence[Event]) -> list[Violation]:
    """Check I21: no message is delivered before its time, by the broker's clock."""
    due = {e.value: e.due_us for e in events if e.due_us is not None}
    return [
        Violation("early", str(e.value), f"delivered {(due[e.value] or 0) - e.at_us} us before its time", (e,))
        for e in events
        if e.act is Act.RECEIVE and e.at_us < (due.get(e.value) or 0)
    ]


def scattered(events: Sequence[Event]) -> list[Violation]:
    """Check I4: the messages of one transaction are contiguous in a queue."""
    owner = {e.value: e.transaction for e in events if e.act is Act.PREPARE}
    queues: dict[tuple[str | None, ...], list[tuple[int, str | None]]] = defaultdict(list)
    place: tuple[str | None, ...]
    for event in events:
        if event.act is Act.STANDS:
            place = (event.broker, event.topic, str(event.queue))
            queues[place].append((event.offset or 0, owner.get(event.value) or event.value))
    found: list[Violation] = []
    for place, entries in queues.items():
        seen: set[str | None] = set()
        before: str | None = None
        for offset, name in sorted(entries, key=lambda entry: entry[0]):
            if name != before and name in seen:
                found.append(
                    Violation("scattered", str(name), f"stands in {place} in several parts, again at {offset}")
                )
            seen.add(name)
            before = name
    return found


def uncopied(events: Sequence[Event], source: str, target: str) -> list[Violation]:
    """Check I1, I9: messages in ``source`` are in ``target``, as "copy of" their values."""
    stands: dict[str | None, set[str]] = defaultdict(set)
    for event in events:
        if event.act is Act.STANDS:
            stands[event.topic].add(str(event.value))
    wanted = {f"copy of {value}" for value in stands[source]}
    return [
        *(Violation("lost", value, "it was not copied") for value in sorted(wanted - stands[target])),
        *(Violation("unexpected", value, "a copy of nothing") for value in sorted(stands[target] - wanted)),
    ]


def fenced_alone(events: Sequence[Event], named: Iterable[str] = ()) -> list[Violation]:
    """Check I7: a process that was never restarted, with a unique name (except for ``named``), is not fenced."""
    shared, again = set(named), set[str]()
    found: list[Violation] = []
    for event in events:
        if event.act is Act.KILL:  # a request of the dead process may be served after those of its successor
            again.add(event.process)
        elif event.process not in again | shared and "newer session" in (event.note or ""):
            detail = f"{event.process} was fenced, and there is no newer process of its name"
            found.append(Violation("fenced", event.transaction or str(event.value), detail, (event,)))
            again.add(event.process)
    return found


def undead(events: Sequence[Event]) -> list[Violation]:
    """Check I7: after a FENCED rejection no call of that process on its transactions is *ok*."""
    fenced: dict[str, Event] = {}
    found: list[Violation] = []
    for event in events:
        if event.act is Act.KILL:  # a process with its name is then a newer one
            fenced.pop(event.process, None)
        if event.act not in (Act.PREPARE, Act.COMMIT, Act.ROLLBACK):
            continue
        if event.kind is Kind.FAIL and "newer session" in (event.note or ""):
            fenced.setdefault(event.process, event)
        elif event.kind is Kind.OK and event.process in fenced:
            detail = f"{event.process} was fenced before, and its {event.act} took effect"
            found.append(Violation("undead", str(event.transaction), detail, (fenced[event.process], event)))
    return found


def unaccounted(events: Sequence[Event]) -> list[Violation]:
    """Check I22, I25, I26: for every group whose members record acknowledgements, each message in its topics is
    acknowledged, a dead letter, discarded by an operator, or skipped by an operator's reset; a message acknowledged
    with *ok*, without a later reset, is no dead letter."""
    resets, moved, unsure = Resets(), dict[tuple[str, str | None, int | None], int](), set[str]()
    acked: dict[str, dict[str, Kind]] = defaultdict(dict)
    topics: dict[str, set[str | None]] = defaultdict(set)
    fates: dict[tuple[str, str], str] = {}
    discarded: dict[str, set[tuple[str | None, int | None, int | None]]] = defaultdict(set)
    for event in events:
        group, value = event.group or "", str(event.value)
        holds = resets.see(event)
        if event.act is Act.RECEIVE:
            topics[group].add(event.topic)
        elif event.act is Act.ACK and acked[group].get(value) is not Kind.OK:
            acked[group][value] = Kind.UNKNOWN if event.kind is Kind.OK and not holds else event.kind
        elif event.act is Act.RESET:
            acked[group] = {value: Kind.UNKNOWN if kind is Kind.OK else kind for value, kind in acked[group].items()}
            if event.kind is Kind.INVOKE and value != "back":
                unsure.add(group)
            elif event.kind in (Kind.OK, Kind.FAIL):
                unsure.discard(group)
        elif event.act is Act.MOVED:
            place = (group, event.topic, event.queue)
            moved[place] = max(moved.get(place, 0), event.offset or 0)
        elif event.act is Act.DISCARD:
            discarded[group].add((event.topic, event.queue, event.offset))
        elif event.act is Act.FATE:
            fates[group, value] = event.note or ""
    found: list[Violation] = []
    for event in (event for event in events if event.act is Act.STANDS):
        value = str(event.value)
        for group in sorted(acked):
            if event.topic not in topics[group]:
                continue
            fate, ack = fates.get((group, value)), acked[group].get(value)
            if fate is None and ack is None:
                found.append(
                    Violation("unaccounted", value, f"{group} is done with it, and nobody acknowledged it", (event,))
                )
            elif fate is not None and ack is Kind.OK:
                found.append(Violation("unacked", value, f"{group} acknowledged it, and it is {fate}", (event,)))
            elif fate == "discarded" and (event.topic, event.queue, event.offset) not in discarded[group]:
                found.append(Violation("unaccounted", value, f"nobody let it go, and for {group} it is", (event,)))
            elif fate == "skipped":
                if group not in unsure and (event.offset or 0) >= moved.get((group, event.topic, event.queue), 0):
                    found.append(Violation("unaccounted", value, f"{group} passed it over, and no reset did", (event,)))
            elif fate not in (None, "dead", "discarded"):
                found.append(Violation("unaccounted", value, f"at the end it is {fate} for {group}", (event,)))
    return found


def handed_out_while_paused(events: Sequence[Event]) -> list[Violation]:
    """Check that a paused group, until its resume begins, gets no delivery under a lease from after the pause."""
    since: dict[str | None, int] = {}
    found: list[Violation] = []
    for event in events:
        if event.act is Act.PAUSED and event.value == "no":
            since.pop(event.group, None)
        elif event.act is Act.PAUSED and event.kind is Kind.OK and event.position is not None:
            since[event.group] = event.position
        elif event.act is Act.RECEIVE and (event.lease or 0) >= since.get(event.group, 1 << 62):
            detail = f"{event.group} is paused since position {since[event.group]}, and this is of lease {event.lease}"
            found.append(Violation("paused", str(event.value), detail, (event,)))
    return found


def overattempted(events: Sequence[Event], group: str, most: int) -> list[Violation]:
    """Check I25: a message delivered to a group as attempt ``most``, the highest limit in these events, or a later one,
    is not delivered as the next attempt. A message that failed before the limit was set may come once more."""
    found: list[Violation] = []
    delivered: dict[tuple[str | None, int], Event] = {}
    for event in events:
        if event.act is Act.RECEIVE and event.group == group:
            attempt = event.attempt or 0
            if attempt > most and (before := delivered.get((event.value, attempt - 1))) is not None:
                found.append(
                    Violation("overattempted", str(event.value), f"attempt {attempt} of {most}", (before, event))
                )
            delivered[event.value, attempt] = event
    return found


def unpaired(events: Sequence[Event]) -> list[Violation]:
    """Check I24, I37 to I40: a committed row had exactly one effect, under the row's id; a rolled back one had none."""
    sent: dict[str, Event] = {e.value or "": e for e in events if e.act is Act.SEND}
    effects: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.act is Act.EFFECT:
            effects[event.value or ""].append(event)
    found: list[Violation] = []
    for value, row in sent.items():
        mine = effects[value]
        if row.kind is Kind.OK and not mine:
            found.append(Violation("lost", value, "its row was committed, and it had no effect", (row,)))
        elif row.kind is Kind.FAIL and mine:
            found.append(Violation("resurrected", value, "its row was rolled back, and it had an effect", (row, *mine)))
        if len(mine) > 1:
            found.append(Violation("repeated", value, f"it had {len(mine)} effects", (row, *mine)))
        if row.kind is Kind.OK and any(effect.message_id != row.message_id for effect in mine):
            found.append(Violation("moved", value, "its effect has another id than its row", (row, *mine)))
    for value in sorted(set(effects) - set(sent)):
        found.append(Violation("unexpected", value, "an effect of what nobody wrote", tuple(effects[value])))
    return found
