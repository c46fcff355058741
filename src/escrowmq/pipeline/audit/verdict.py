"""The result of the audit, and its JSON form ``verdict.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from escrowmq.pipeline.coverage import Beginning

NAME = "verdict.json"


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

    @property
    def agrees(self) -> bool:
        """Return whether all sides hold the same ids with the same content."""
        return not (self.lost or self.repeated or self.altered or self.leaked)

    @property
    def settled(self) -> bool:
        """Return whether all sides agree, and no transaction is left undecided."""
        return self.agrees and not self.orphaned

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {"verdict": "agree" if self.agrees else "disagree", **asdict(self)}

    def write(self, folder: Path) -> Path:
        """Write ``verdict.json``. Returns its path."""
        path = folder / NAME
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n")
        return path
