"""The bytes of format version 1, kept: today's reader reads them equal, today's writer writes them equal (FORMAT.md).

`python tests/log/test_log_golden.py` makes them anew, for a new version of the format in a folder of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from log_scripts import START_US, checked, content, group, messages, opened

from escrowmq.log.checking import check
from escrowmq.log.dump import dump, line
from escrowmq.platform.disk import RealDisk
from escrowmq.schemas import STORED, Kind
from escrowmq.testing.disks import MemoryDisk

GOLDEN = Path(__file__).parent / "golden"
SMALL = 2048

ROWS = {
    Kind.SESSION: {"epoch": 1, "group": "orders", "instance": "a", "transactional": True},
    Kind.DECIDED: {"transaction": 3, "state": 1, "decided_by": 0, "epoch": 1},
    Kind.LEASED: {
        "lease": 9,
        "group": 1,
        "queue_id": 2,
        "start": 0,
        "count": 5,
        "attempt": 1,
        "member": -7,
        "deadline_us": START_US + 60,
    },
    Kind.DEAD: {"lease": 9, "start": 0, "count": 1, "cause": "naïve"},
}


NEWER = {
    Kind.BATCH_DECIDED: {"transaction": 3, "state": 1, "decided_by": 0, "epoch": 1, "writer": b"q" * 16, "batch": 7},
    Kind.JOINED: {"epoch": 9, "group": 1, "member": -7, "process": 77, "instance": "a"},
    Kind.KEPT: {"lease": 9, "end": 4},
    Kind.HANDED: {"lease": 11, "old": 9, "start": 4, "count": 1, "attempt": 2},
    Kind.FENCED: {"epoch": 12, "group": 1, "member": -7},
    Kind.FORGOTTEN: {"epoch": 1},
    Kind.KEYED: {"group": 1, "queue_id": 2, "offset": 4, "key": 77},
    Kind.PRODUCERS: {"group": "orders", "rules": '{"check_max":3,"kind":"transactional"}'},
    Kind.ALTERED: {"group": 1, "subscription": '{"topics":["orders"]}'},
    Kind.BURIED: {"lease": 11, "start": 4, "count": 1, "cause": "naïve"},
    Kind.OWNED: {"epoch": 1, "process": 77, "transactional": True},
}
"""Kinds that came later: a folder of their own, "v1-newer"."""
OPERATED = {
    Kind.GROUP_RESET: {"group": 1, "queue_id": 2, "offset": 1 << 40},
    Kind.GROUP_PAUSED: {"group": 1, "topic": "", "paused": True},
    Kind.GROUP_DELETED: {"position": 3, "group": 1},
}
"""Those of operators' acts on consumer groups, "v1-operated"."""
EDITED = {
    Kind.EDITED: {
        "topic": "orders",
        "key": "naïve",
        "tag": None,
        "properties": [("ESCROWMQ_EDITED_FROM", "00" * 16)],
        "body": b"another",
        "message_id": b"e" * 16,
        "queue": 0,
        "queue_id": 2,
        "born_us": START_US,
        "visible_us": 0,
        "due_us": 0,
        "transaction": -1,
        "epoch": 0,
        "group": 1,
        "offset": 4,
        "position": 1,
    }
}
"""What one group gets in place of a dead letter, "v1-edited"."""
TOPICS = {
    Kind.TOPIC_ALTERED: {"name": "orders", "retention_us": 7_000_000, "retention_bytes": -1},
    Kind.TOPIC_DELETED: {"name": "orders"},
    Kind.CUT: {"queue_id": 2, "head": 41},
}
"""Those of topics, "v1-topics"."""
FAILURES = {Kind.FAILED: {"lease": 9, "start": 0, "count": 1, "cause": "naïve"}}
"""Why attempts failed, "v1-failed"."""
LIMITED = {Kind.GROUP_LIMITED: {"group": 1, "limits": '{"in_flight":50,"rate":100.0}'}}
"""Limits of a consumer group, "v1-limited"."""
RECALLED = {Kind.RECALLED: {"position": 3, "delayed": 1}}
"""A delayed message that never becomes visible, "v1-recalled"."""
LATER = {
    "v1-recalled": RECALLED,
    "v1-limited": LIMITED,
    "v1-failed": FAILURES,
    "v1-newer": NEWER,
    "v1-operated": OPERATED,
    "v1-topics": TOPICS,
    "v1-edited": EDITED,
}


def write_newer(disk: MemoryDisk, rows: dict[Kind, dict[str, Any]]) -> None:
    log = opened(disk)
    for kind, row in rows.items():
        log.append(kind, pa.RecordBatch.from_pylist([row], STORED[kind]), START_US)
    log.sync()
    log.close()


def write(disk: MemoryDisk, compression: str) -> None:
    """A log with every kind of file in it, and frames of every encoding."""
    log = opened(disk, segment_bytes=SMALL, compression=compression)
    for n in range(4):
        log.append(Kind.HALF if n % 2 else Kind.PLAIN, messages(2, 2 * n, body=300), START_US + n)
        log.append(Kind.CHECKED, checked([n]), START_US + n)
        log.sync()
    for kind, row in ROWS.items():
        log.append(kind, pa.RecordBatch.from_pylist([row], STORED[kind]), START_US + 10)
    log.sync()
    log.save_snapshot({"t": pa.table({"n": [1, 2]})}, 5, 7, START_US + 2)
    log.drop_before(7)
    log.save_snapshot({"t": pa.table({"n": [3]}), "names": pa.table({"x": ["a"]})}, 9, 13, START_US + 4)
    log.append(Kind.GROUP, group("cart"), START_US + 11)
    log.close()


def golden_files(name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((GOLDEN / name).iterdir()) if path.suffix != ".json"}


@pytest.mark.invariant("I32")
@pytest.mark.parametrize("name", ["v1-none", "v1-lz4", "v1-bodies"])
def test_todays_reader_reads_it_equal(name: str) -> None:
    """ "v1-none" was written before bodies had checksums of their own, "v1-bodies" since."""
    disk = MemoryDisk(golden_files(name))
    assert list(dump(disk, rows=True)) == json.loads((GOLDEN / name / "dump.json").read_text())
    assert list(check(disk)) == []
    again = MemoryDisk()
    write(again, "lz4" if name == "v1-lz4" else "none")
    log, expected = opened(disk, segment_bytes=SMALL), opened(again, segment_bytes=SMALL)
    assert [content(frame) for frame in log.frames()] == [content(frame) for frame in expected.frames()]
    snapshot = log.load_snapshot()
    assert snapshot is not None
    assert {name: table.to_pylist() for name, table in snapshot.tables.items()} == {
        "t": [{"n": 3}],
        "names": [{"x": "a"}],
    }
    log.close()


def test_todays_writer_writes_it_equal() -> None:
    """Not asked of LZ4, whose compressor may change from version to version."""
    disk = MemoryDisk()
    write(disk, "none")
    files = disk.files()
    golden = golden_files("v1-bodies")
    assert sorted(files) == sorted(golden)
    for name, data in golden.items():
        assert files[name] == data, name
    endings = {name.rpartition(".")[2] for name in golden}
    assert {"segment", "index", "snapshot", "closed"} <= endings


@pytest.mark.parametrize("name", LATER)
def test_newer_kinds_are_read_and_written_equal(name: str) -> None:
    disk, golden = MemoryDisk(), golden_files(name)
    write_newer(disk, LATER[name])
    assert disk.files() == golden
    assert list(dump(MemoryDisk(golden), rows=True)) == json.loads((GOLDEN / name / "dump.json").read_text())


def test_dump_prints_a_line_a_frame_from_a_folder_in_use(tmp_path: Path) -> None:
    log = opened(RealDisk(tmp_path / "d"))
    log.append(Kind.PLAIN, messages(3), START_US + 1_500_000)
    log.append(Kind.CHECKED, checked([1]), START_US + 1_500_000)
    log.sync()
    looking = RealDisk(tmp_path / "d", read_only=True)
    entries = list(dump(looking))
    assert [(e["sequence"], e["kind"], e["rows"]) for e in entries] == [
        (0, "OPENED", 1),
        (1, "PLAIN", 3),
        (2, "CHECKED", 1),
    ]
    assert "         1 PLAIN              3 rows at 1            2033-05-18T03:33:21.500000+00:00 epoch 1" in line(
        entries[1]
    )
    assert [e["sequence"] for e in dump(looking, start=1, end=2)] == [1]
    assert [e["sequence"] for e in dump(looking, kinds=[Kind.CHECKED])] == [2]
    (entry,) = dump(looking, kinds=[Kind.PLAIN], rows=True)
    assert entry["data"][1]["key"] == "k-1"
    assert entry["data"][1]["properties"] == {"n": "1"}
    assert entry["data"][1]["message_id"] == f"{1:032x}"
    json.dumps(entry)
    assert len(line(entry).splitlines()) == 4
    assert list(check(looking)) == []
    log.close()


def test_dump_goes_on_behind_damage() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    for n in range(4):
        log.append(Kind.CHECKED, checked([n]), START_US)
        log.sync()
    log.close()
    (name,) = [n for n in disk.list() if n.endswith(".segment")]
    start = disk.files()[name].index(b"EMQF", 65)
    disk.flip(name, 8 * start + 8 * 60)
    entries = list(dump(disk))
    assert [e.get("sequence", "damage") for e in entries] == [0, "damage", 2, 3, 4]
    assert entries[1]["damage"]["file"] == name
    assert (entries[1]["damage"]["offset"], entries[1]["damage"]["sequence"]) == (start, 1)
    assert line(entries[1]).startswith(f"DAMAGE {name}, byte {start}, frame 1: the checksum is wrong")


if __name__ == "__main__":
    for name in ("bodies", "lz4", "newer"):  # "none" cannot be made any more
        folder = GOLDEN / f"v1-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        made = MemoryDisk()
        write_newer(made) if name == "newer" else write(made, "none" if name == "bodies" else name)
        for file, data in made.files().items():
            (folder / file).write_bytes(data)
        (folder / "dump.json").write_text(json.dumps(list(dump(made, rows=True)), indent=1))
