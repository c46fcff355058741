"""Reasons for findings, as far as the log shows them.

An effect of a consumer group can differ from its message because an operator edited or discarded the message and the
consumer did not follow: it applied both versions, none, or the old one. Then the finding states both message ids. For
an effect without a message it states that neither the topic nor an edit has it. Only the named ids (some hundred) are
read, in one pass over the messages and a column of ids; without findings this costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import functions as f

from escrowmq.errors import Code, EscrowError
from escrowmq.pipeline.audit import delivered, frames
from escrowmq.pipeline.audit.manifest import Comparison, Manifest, of_group
from escrowmq.pipeline.audit.readings import Readings
from escrowmq.pipeline.coverage import Coverage, describe_beginnings
from escrowmq.pipeline.failures import unwrap_errors
from escrowmq.wire import HALF_VIEW_NAME

_MOST_ROWS = 10_000
"""Maximum number of rows that are read for the named ids, because an id may repeat without limit."""

Wrong = Mapping[str, Any]
"""A finding: ``kind, id, comparison, expected, found``."""


_Effects = Counter[tuple[str, int]]
"""How often each id occurs with each content, by its digest, in the found side."""


def explain_findings(manifest: Manifest, readings: Readings, covered: Coverage, wrong: Sequence[Wrong]) -> list[str]:
    """Return for each finding a text that explains it, as far as the log shows it ("": not at all). ``covered``: what
    the log no longer contains."""
    known = _find_known(manifest, readings, wrong)
    reasons = []
    for one in wrong:
        number = one["comparison"]
        unseen = _explain_unseen(manifest.comparisons[number], one["kind"], covered) if number >= 0 else []
        reasons.append("; or ".join(text for text in (known.get((number, one["id"])), *unseen) if text))
    return reasons


def _explain_unseen(comparison: Comparison, kind: str, covered: Coverage) -> list[str]:
    """Return why the id may be missing from the log: it was removed, or it is not visible yet. Empty if the side that
    lacks it is not the log."""
    side = {"lost": comparison.found, "leaked": comparison.expected}.get(kind, "")
    where, _, name = side.partition(":")
    topic = of_group(name)[1] if where == "group" else name
    sources = {"topic": {topic}, "group": {topic}, "half": {HALF_VIEW_NAME}}.get(where, set())
    mine = [one for one in covered.beginnings if one.source in sources]
    reasons = [f"it may have left the log by retention or by hand: {describe_beginnings(mine)}"] if mine else []
    return reasons + (["it may be among what was acknowledged last"] if sources and covered.incomplete else [])


def _find_known(manifest: Manifest, readings: Readings, wrong: Iterable[Wrong]) -> dict[tuple[int, str], str]:
    """Return reasons for the findings of comparisons that expect the messages of a consumer group, by comparison number
    and id: an operator's edit or discard, a dead letter, or (leaked or altered) that no edit explains it. Other
    findings are absent."""
    named: dict[int, dict[str, str]] = {}
    for one in wrong:
        if one["comparison"] >= 0 and manifest.comparisons[one["comparison"]].expected.startswith("group:"):
            named.setdefault(one["comparison"], {}).setdefault(one["id"], one["kind"])
    return {
        (number, id): reason
        for number, kinds in named.items()
        for id, reason in _explain_group(manifest.comparisons[number], readings, kinds).items()
    }


def _explain_group(comparison: Comparison, readings: Readings, kinds: Mapping[str, str]) -> dict[str, str]:
    group, topic = of_group(comparison.expected.partition(":")[2])
    comparison = replace(comparison, tolerance={}, clock_skew=0)  # which version had its effect is a question of bytes
    role = readings.make_role(0, comparison, True)
    ids = list(kinds)
    versions = readings.read_versions(group, topic, role).where(f.col("id").isin(ids) | f.col("new_id").isin(ids))
    changed = [row.asDict() for row in versions.orderBy(*delivered.PLACE).limit(_MOST_ROWS).collect()]
    of_pairs = {id for row in changed for id in (row["id"], row["new_id"]) if id is not None}
    effects = _read_effects(comparison, readings, of_pairs) if changed else Counter()
    reasons: dict[str, str] = {}
    for row in changed:
        reason = _explain_act(row, group, effects)
        for id in {row["id"], row["new_id"]} & kinds.keys():
            reasons.setdefault(id, reason)
    lost = [id for id, kind in kinds.items() if kind == "lost" and id not in reasons]
    dead = _find_dead_letters(readings, group, topic, lost)
    for id, kind in kinds.items():
        if id in dead:
            reasons.setdefault(id, f"it is a dead letter of consumer group {group} and waits for a person")
        if kind == "leaked":
            reasons.setdefault(id, f"neither topic {topic} nor an edit by hand for consumer group {group} has it")
        if kind == "altered":
            reasons.setdefault(id, f"no edit by hand for consumer group {group} explains it")
    return reasons


def _explain_act(row: Wrong, group: str, effects: _Effects) -> str:
    if row[delivered.ACT] == "discard":
        had = effects[row["id"], row["digest"]]
        what = "it had its effect nevertheless" if had else "what is there is not its effect"
        return f"{row['message_id']} was discarded by hand for consumer group {group}: {what}"
    replaced = f"{row['new_message_id']} stands in place of {row['message_id']} for consumer group {group}"
    if (row["id"], row["digest"]) == (row["new_id"], row["new_digest"]):
        return f"{replaced}, and the compared columns do not tell them apart"
    had_old, had_new = effects[row["id"], row["digest"]], effects[row["new_id"], row["new_digest"]]
    ids, digests = {row["id"], row["new_id"]}, {row["digest"], row["new_digest"]}
    if had_old and had_new:
        what = "both had their effect"
    elif had_old:
        what = "the old one had its effect, and the new one did not"
    elif any(id in ids and digest not in digests for id, digest in effects):
        what = "there is an effect that is of neither"
    else:
        what = "neither had its effect" if not had_new else f"the new one had its effect {had_new} times"
    return f"{replaced}, by an edit by hand: {what}"


def _read_effects(comparison: Comparison, readings: Readings, ids: Collection[str]) -> _Effects:
    """Count the rows of the found side for some ids, by id and digest of their content, as this comparison computes
    it."""
    found: _Effects = Counter()
    for rows in readings.read_rows([comparison], whole=True):  # the other version may be outside a sample
        if all(role.expected for speaker in rows.speakers for role in speaker.roles):
            continue
        said = frames.find_witnesses(rows, rows.select_ids(ids)).where("expected = 0")
        found.update((row["id"], row["digest"]) for row in said.limit(_MOST_ROWS).collect())
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
