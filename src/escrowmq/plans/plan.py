"""A plan: an act on a frozen set of rows, and the progress of its runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from escrowmq.client.links.presence import Missing
from escrowmq.errors import Code, Corrupt
from escrowmq.platform.disk import Disk, disk_error, read_file, replace_file

NAME = "plan.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """A frozen set and an act. ``id`` is also the name of its folder; ``state`` is made, running, stopped, failed,
    interrupted (a run was killed) or finished; ``outcomes`` counts the processed rows."""

    id: str
    act: str
    settings: Mapping[str, Any]
    """Arguments of the act, such as the consumer group."""
    selection: Mapping[str, Any]
    source: str
    """Addresses of the rows, without passwords."""
    missing: tuple[Missing, ...]
    """Brokers that were unavailable when the plan was made: it has none of their rows."""
    by: str
    why: str | None
    made_us: int
    rows: int
    digest: str
    """SHA-256 over the act and the identifying and guarding columns of each row, in order."""
    file_hash: str
    """SHA-256 of the file of the set."""
    identity: tuple[str, ...]
    samples: tuple[Mapping[str, Any], ...]
    counts: Mapping[str, Mapping[str, int]]
    """Rows per value of some columns; ``""`` is no value, ``…`` stands for further values."""
    not_found: int = 0
    """Number of ids in the selection without a row."""

    state: str = "made"
    reason: str = ""
    """Reason why the last run ended."""
    next: int = 0
    """Number of processed rows."""
    outcomes: Mapping[str, int] | None = None
    again: int = 0
    """Rows that were done, and then failed again."""
    in_doubt: int = 0
    """Rows of a batch with unknown result: the next run resolves them."""
    runs: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "outcomes": dict(self.outcomes or {})}


_MADE = (
    "id", "act", "settings", "selection", "source", "missing", "by", "why", "made_us", "rows", "digest", "file_hash",
    "identity", "samples", "counts", "not_found",
)  # fmt: skip


def write(disk: Disk, plan: Plan) -> None:
    """Store the plan; it exists once this file does."""
    values = plan.to_json()
    content = {"format": FORMAT, **{name: values[name] for name in _MADE}}
    try:
        replace_file(disk, NAME, [[json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n"]])
    except OSError as problem:
        raise disk_error(problem) from problem


def read(disk: Disk, name: str) -> Plan:
    """Read the stored plan. Raises FileNotFoundError, Corrupt(DAMAGED, NEWER_FORMAT)."""
    try:
        content = json.loads(read_file(disk, NAME))
        if content["format"] > FORMAT:
            raise Corrupt(Code.NEWER_FORMAT, f"the plan {name} is of a newer version")
        values = {field: content[field] for field in _MADE}
        lists = {field: tuple(values[field]) for field in ("missing", "identity", "samples")}
        plan = Plan(**{**values, **lists})
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise disk_error(problem) from problem
    except (ValueError, KeyError, TypeError) as problem:
        text = f"{NAME} of plan {name} cannot be read: {problem!r:.200}"
        raise Corrupt(Code.DAMAGED, text, "make a new plan") from None
    if plan.id != name:
        text = f"the folder {name} holds the plan {plan.id!r:.100}"
        raise Corrupt(Code.DAMAGED, text, "a plan's folder keeps its name")
    return plan
