"""The result of the audit, its JSON form ``verdict.json``, and its form for continuous integration."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from escrowmq.pipeline.coverage import Beginning

NAME = "verdict.json"
_BAD = {n: "\ufffd" for n in (*range(0x20), 0xFFFE, 0xFFFF, *range(0xD800, 0xE000)) if n not in (9, 10, 13)}
"""Characters that XML cannot contain."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One id that differs between two sides. ``expected`` and ``found`` count rows on either side; ``reason`` explains
    the difference, if the log shows it."""

    kind: str
    id: str
    between: str
    expected: int
    found: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """An altered id with the values of one column on both sides, at most 200 letters of each; None is NULL, or a field
    that is missing."""

    id: str
    expected: str | None
    found: str | None


@dataclass(frozen=True, slots=True)
class Differing:
    """The column of a comparison that differs in most altered ids. ``ids`` counts them among the first ``examined``
    altered ids, ``pairs`` has the first three."""

    between: str
    column: str
    ids: int
    examined: int
    pairs: tuple[Pair, ...]

    def __str__(self) -> str:
        values = "; ".join(f"{pair.id}: {pair.expected} → {pair.found}" for pair in self.pairs)
        return f"{self.column} differs in {self.ids:,} of {self.examined:,} altered ids ({values})"


@dataclass(frozen=True, slots=True)
class Side:
    """One comparison in numbers: the names of both sides, the number of ids, and rows on either side."""

    expected: str
    found: str
    ids: int
    expected_rows: int
    found_rows: int
    wrong_ids: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of an audit. ``lost`` … ``orphaned`` count distinct ids; ``findings`` names the first of them."""

    ids: int  # distinct ids among the half messages of the topics
    transactions: int  # with a message of the topics
    committed: int  # transactions
    rolled_back: int  # transactions
    consumed: int  # ids with an effect in every consumer's database
    lost: int
    repeated: int
    altered: int
    leaked: int
    orphaned: int  # still undecided
    kills: int
    checks: int  # questions the broker asked
    consumers: dict[str, int]  # consumer → effects in its database
    comparisons: tuple[Side, ...]
    findings: tuple[Finding, ...]
    findings_in_all: int
    beginnings: tuple[Beginning, ...] = ()  # queues whose first messages were removed and cannot be compared
    title: str = ""
    incomplete: str = ""  # what may be missing at the end of the log, and why; "" if nothing
    differing: tuple[Differing, ...] = ()  # the column that differs most, of each comparison with altered ids
    sample: str = ""  # the share of ids that was compared, as "1%"; all numbers are those of the sample; "" if all

    @property
    def agrees(self) -> bool:
        """Return whether all sides hold the same ids with the same content. Undecided transactions (``orphaned``) do
        not count."""
        return not (self.lost or self.repeated or self.altered or self.leaked)

    @property
    def settled(self) -> bool:
        """Return whether all sides agree, and no transaction is left undecided."""
        return self.agrees and not self.orphaned

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {"verdict": "agree" if self.agrees else "disagree", **asdict(self)}

    def write(self, folder: Path) -> Path:
        """Write ``verdict.json`` into ``folder``. Returns its path."""
        path = folder / NAME
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n")
        return path


def write_junit(path: Path, verdict: Verdict) -> None:
    """Write a JUnit file with a test case per comparison. A comparison fails if it has findings, which are named as far
    as the verdict names them."""
    cases = {f"{side.expected} → {side.found}": side.wrong_ids for side in verdict.comparisons}
    cases["still in escrow"] = verdict.orphaned
    failed = sum(bool(wrong) for wrong in cases.values())
    suite = ElementTree.Element("testsuite", name=(verdict.title or "escrowmq audit").translate(_BAD))
    suite.attrib |= {"tests": str(len(cases)), "failures": str(failed)}
    for name, wrong in cases.items():
        case = ElementTree.SubElement(suite, "testcase", classname="audit", name=name.translate(_BAD))
        if wrong:
            lines = [
                f"{one.kind} {one.id}: expected {one.expected}, found {one.found}{one.reason and f' ({one.reason})'}"
                for one in verdict.findings
                if one.between == name
            ]
            lines += [str(one) for one in verdict.differing if one.between == name]
            sample = f" in a sample of {verdict.sample} of the ids" if verdict.sample else ""
            failure = ElementTree.SubElement(case, "failure", message=f"{wrong:,} ids differ{sample}")
            failure.text = "\n".join(lines).translate(_BAD)
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)
