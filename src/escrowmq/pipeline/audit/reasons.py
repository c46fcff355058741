"""Reasons why an id does not agree: what the log knows of the findings that are named.

Between what a consumer group is to have handled and what it did, an id can be wrong because a person replaced or
discarded its message, and the consumer did not follow: it had the effect of both, of neither, of the old one. Then the
finding says so, with both message ids. Of an effect without a message it says that neither the topic nor an edit has
it.

Only the ids that are named (some hundred) are looked for, so this costs a pass over the messages and a column of ids,
and nothing where all agrees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import functions as f

from escrowmq.errors import Code, EscrowError
from escrowmq.pipeline.audit import delivered, frames
from escrowmq.pipeline.audit.manifest import Comparison, Manifest, of_group
from escrowmq.pipeline.audit.readings import Readings, compared_columns
from escrowmq.pipeline.audit.rows import Role
from escrowmq.pipeline.coverage import Coverage, describe_beginnings
from escrowmq.pipeline.failures import unwrap_errors
from escrowmq.wire import HALF_VIEW_NAME

_MOST_ROWS = 10_000
"""Maximum number of rows that are read for the named ids, because an id may repeat without limit."""

Wrong = Mapping[str, Any]
"""A finding: ``kind, id, comparison, expected, found``."""


@dataclass(slots=True)
class _Effects:
    """The found side's rows of each id: how often each content occurs, by its digest."""

    of: dict[str, Counter[int]] = field(default_factory=dict)

    def count(self, id: str | None, digest: int | None) -> int:
        """Return how often an id occurs with this content."""
        return 0 if id is None or digest is None else self.of.get(id, Counter())[digest]

    def has_other(self, ids: Collection[str | None], known: Collection[int | None]) -> bool:
        """Return whether one of the ids occurs with content other than the known."""
        return any(digest not in known for id in ids if id is not None for digest in self.of.get(id, ()))


Reasons = dict[tuple[int, str, str], str]
"""Texts by comparison, id and kind."""
Explain = Callable[[Iterable[Wrong]], Reasons]


def explain_findings(manifest: Manifest, readings: Readings, covered: Coverage, wrong: Iterable[Wrong]) -> Reasons:
    """Explain findings as far as the log shows. ``covered``: what the log no longer contains. Findings without an
    explanation get ""."""
    every = list(wrong)
    known = _find_known(manifest, readings, every)
    told: Reasons = {}
    for one in every:
        number, id, kind = one["comparison"], one["id"], one["kind"]
        reason = known.get((number, id), "")
        unseen = _explain_unseen(manifest.comparisons[number], kind, covered) if number >= 0 else []
        told[number, id, kind] = "; or ".join(text for text in (reason, *unseen) if text)
    return told


def _explain_unseen(comparison: Comparison, kind: str, covered: Coverage) -> list[str]:
    """Return why the id may be missing from the log: it was removed, or it is not visible yet. Empty if the side that
    lacks it is not the log."""
    side = {"lost": comparison.found, "leaked": comparison.expected}.get(kind, "")
    where, _, name = side.partition(":")
    topic = of_group(name)[1] if where == "group" else name
    sources = {"topic": {topic}, "group": {topic}, "half": {HALF_VIEW_NAME}}.get(where, set())
    mine = [one for one in covered.beginnings if one.source in sources]
    told = [f"it may have left the log by retention or by hand: {describe_beginnings(mine)}"] if mine else []
    return told + (["it may be among what was acknowledged last"] if sources and covered.incomplete else [])


def _find_known(manifest: Manifest, readings: Readings, wrong: Iterable[Wrong]) -> dict[tuple[int, str], str]:
    """Return explanations of findings by operator actions, by comparison and id."""
    named: dict[int, dict[str, str]] = {}
    for one in wrong:
        if one["comparison"] >= 0 and manifest.comparisons[one["comparison"]].expected.startswith("group:"):
            named.setdefault(one["comparison"], {}).setdefault(one["id"], one["kind"])
    told: dict[tuple[int, str], str] = {}
    for number, kinds in named.items():
        for id, reason in _explain_group(manifest.comparisons[number], readings, kinds).items():
            told[number, id] = reason
    return told


def _explain_group(comparison: Comparison, readings: Readings, kinds: Mapping[str, str]) -> dict[str, str]:
    group, topic = of_group(comparison.expected.partition(":")[2])
    role = Role(0, True, compared_columns(comparison))
    ids = list(kinds)
    versions = readings.read_versions(group, topic, role).where(f.col("id").isin(ids) | f.col("new_id").isin(ids))
    changed = [row.asDict() for row in versions.orderBy(*delivered.PLACE).limit(_MOST_ROWS).collect()]
    of_pairs = {id for row in changed for id in (row["id"], row["new_id"]) if id is not None}
    effects = _read_effects(comparison, readings, of_pairs) if changed else _Effects()
    told: dict[str, str] = {}
    for row in changed:
        reason = (
            _explain_discarded(row, group, effects)
            if row[delivered.ACT] == "discard"
            else _explain_edited(row, group, effects)
        )
        for id in {row["id"], row["new_id"]} & kinds.keys():
            told.setdefault(id, reason)
    lost = [id for id, kind in kinds.items() if kind == "lost" and id not in told]
    dead = _find_dead_letters(readings, group, topic, lost)
    for id, kind in kinds.items():
        if id in dead:
            told.setdefault(id, f"it is a dead letter of consumer group {group} and waits for a person")
        if kind == "leaked":
            told.setdefault(id, f"neither topic {topic} nor an edit by hand for consumer group {group} has it")
        if kind == "altered":
            told.setdefault(id, f"no edit by hand for consumer group {group} explains it")
    return told


def _explain_edited(row: Wrong, group: str, effects: _Effects) -> str:
    old, new = row["message_id"], row["new_message_id"]
    if (row["id"], row["digest"]) == (row["new_id"], row["new_digest"]):
        return (
            f"{new} stands in place of {old} for consumer group {group}, and the compared columns do not tell them "
            "apart"
        )
    had_old, had_new = (
        effects.count(row["id"], row["digest"]),
        effects.count(row["new_id"], row["new_digest"]),
    )
    if had_old and had_new:
        what = "both had their effect"
    elif had_old:
        what = "the old one had its effect, and the new one did not"
    elif effects.has_other((row["id"], row["new_id"]), (row["digest"], row["new_digest"])):
        what = "there is an effect that is of neither"
    else:
        what = "neither had its effect" if not had_new else f"the new one had its effect {had_new} times"
    return f"{new} stands in place of {old} for consumer group {group}, by an edit by hand: {what}"


def _explain_discarded(row: Wrong, group: str, effects: _Effects) -> str:
    had = effects.count(row["id"], row["digest"])
    what = "it had its effect nevertheless" if had else "what is there is not its effect"
    return f"{row['message_id']} was discarded by hand for consumer group {group}: {what}"


def _read_effects(comparison: Comparison, readings: Readings, ids: Collection[str]) -> _Effects:
    """Return the rows of the found side for some ids, read as in this comparison."""
    found = _Effects()
    for rows in readings.read_rows([comparison]):
        if all(role.expected for speaker in rows.speakers for role in speaker.roles):
            continue
        few = rows.open(rows.frame.where(rows.known_id.isin(list(ids))))
        said = (
            frames.witnesses(few, rows.id, rows.map_roles(frames.make_witness)).where("expected = 0").limit(_MOST_ROWS)
        )
        for row in said.collect():
            found.of.setdefault(row["id"], Counter())[row["digest"]] += 1
    return found


def _find_dead_letters(readings: Readings, group: str, topic: str, ids: Collection[str]) -> set[str]:
    """Return which of these ids are dead letters of the group."""
    if not ids:
        return set()
    letters = readings.log.dead_letters(group, ["topic", "key", "message_id"])
    few = letters.where((f.col("topic") == topic) & readings.id.isin(list(ids)))
    try:
        with unwrap_errors():
            return {row["id"] for row in few.select(readings.id.alias("id")).distinct().collect()}
    except EscrowError as problem:
        if problem.code is not Code.UNKNOWN_GROUP:
            raise
        return set()  # an unknown group has no dead letters
