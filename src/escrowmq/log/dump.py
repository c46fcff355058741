"""The entries printed by ``escrowmq log dump``: one per frame, in log order, damaged places included.
Takes no lock and changes nothing."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from escrowmq.errors import Code, Misuse
from escrowmq.log import frames as codec
from escrowmq.log.checking import FrameRun, check, frame_runs
from escrowmq.log.frames import Encoding
from escrowmq.log.recovery import list_folder
from escrowmq.log.report import Damage, DamagedLog
from escrowmq.platform.disk import Disk
from escrowmq.schemas import Kind

Entry = dict[str, Any]


def dump(
    disk: Disk, *, start: int = 0, end: int | None = None, kinds: Sequence[Kind] | None = None, rows: bool = False
) -> Iterator[Entry]:
    """Yield frames with ``start`` <= sequence < ``end`` as JSON-ready dicts, from a folder that may be in use; ``rows``
    adds their content as ``data``, a list of dicts (bytes as in :func:`printable`). Damage: {"damage": {file, offset,
    sequence, what}}; the frames after it follow. Raises Misuse(NOT_A_DATA_FOLDER) if there is no log."""
    listing = list_folder(disk)
    if not listing.segments:
        raise Misuse(Code.NOT_A_DATA_FOLDER, "the folder holds no log")
    skipped = {first for first, following in pairwise(listing.segments) if following <= start}
    for sequence in listing.segments:
        if sequence in skipped or (end is not None and sequence >= end):
            continue
        try:
            for run in frame_runs(disk, listing, sequence):
                yield from _entries(run, start, end, kinds, rows)
        except DamagedLog as damaged:
            yield _damage_entry(damaged.damage)
        except FileNotFoundError:
            continue  # dropped by retention meanwhile


def findings(disk: Disk) -> Iterator[Entry]:
    """Yield all damage that :func:`escrowmq.log.checking.check` finds, as entries like those of :func:`dump`."""
    return map(_damage_entry, check(disk))


def _damage_entry(damage: Damage) -> Entry:
    return {"damage": {name: getattr(damage, name) for name in ("file", "offset", "sequence", "what")}}


def line(entry: Entry) -> str:
    """Format an entry of :func:`dump` as text; each of its rows is on a line of its own."""
    if "damage" in entry:
        return "DAMAGE {file}, byte {offset}, frame {sequence}: {what}".format(**entry["damage"])
    time = datetime.fromtimestamp(entry["time_us"] / 1_000_000, UTC).isoformat(timespec="microseconds")
    text = (
        f"{entry['sequence']:>10} {entry['kind']:<12} {entry['rows']:>7} rows at {entry['position']:<12} {time} "
        f"epoch {entry['epoch']} {entry['bytes']:>9} bytes {entry['encoding']:<9} {entry['segment']}:{entry['offset']}"
    )
    return "\n".join([text, *(f"{'':>11}{row}" for row in entry.get("data", ()))])


def printable(value: Any) -> Any:
    """Convert a value for JSON: bytes as text if UTF-8, else as ``base64:...``; 16-byte ids as hexadecimal."""
    if isinstance(value, bytes):
        if len(value) == 16:
            return value.hex()
        try:
            return value.decode()
        except UnicodeDecodeError:
            return "base64:" + base64.b64encode(value).decode()
    return dict(value) if isinstance(value, list) else value


def _entries(run: FrameRun, start: int, end: int | None, kinds: Sequence[Kind] | None, rows: bool) -> Iterator[Entry]:
    view = memoryview(run.data)
    for offset in run.found.offsets:
        header = codec.read_header(view, offset)
        if header.sequence < start or (end is not None and header.sequence >= end):
            continue
        if kinds is not None and header.kind not in kinds:
            continue
        entry: Entry = {name: getattr(header, name) for name in ("sequence", "position", "rows")}
        entry |= {"kind": Kind(header.kind).name, "time_us": header.time_us, "epoch": header.epoch}
        entry |= {"encoding": Encoding(header.encoding).name.lower(), "bytes": header.frame_bytes}
        entry |= {"synced": header.synced, "segment": run.name, "offset": offset}
        if rows:
            batch = codec.decode(run.data, offset, header, run.name)
            entry["data"] = [{k: printable(v) for k, v in row.items()} for row in batch.to_pylist()]
        yield entry
    if run.damage is not None:
        yield _damage_entry(run.damage)
