"""The bytes of records of version 1, kept: today's reader reads them equal, today's writer writes them equal
(log/kafka/FORMAT.md).

`python tests/log/partitions/test_partition_golden.py` makes them anew, for a new version of the format in a folder of
its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from partition_scripts import Sender, frame

from escrowmq.log.kafka.fold import Fold
from escrowmq.log.kafka.records import RecordType

GOLDEN = Path(__file__).parent / "golden" / "v1"


def partition() -> dict[str, bytes]:
    """Records of every type and every verdict, by the names of their files."""
    a, b = Sender(0x0102030405060708), Sender(2, epoch=2, sequence=3, position=8)
    made = [("claim", a.claim()), ("frames", a.frames(2, rows=2)), ("beat", a.beat())]
    large = frame(2, 4, rows=4, body=300, epoch=0)
    made += [(f"cut-{n}", raw) for n, raw in enumerate(a.cut(large, [500, 400]))]
    a.sequence, a.position = 3, 8
    made += [("act", a.act()), ("other", Sender(3, shard=99).claim(salt=5)), ("claim-2", b.claim())]
    made += [("void", a.frames()), ("frames-2", b.frames()), ("release", b.record(RecordType.RELEASE, b""))]
    return {f"{n:02d}-{name}.record": raw for n, (name, raw) in enumerate(made)}


def read(records: list[bytes]) -> list[dict[str, Any]]:
    """What a fold makes of them."""
    fold, found = Fold(), []
    for offset, raw in enumerate(records):
        taken = fold.take(offset, raw)
        header = {k: v for k, v in taken.header._asdict().items() if k != "magic"}
        numbers = [[at, header.sequence, header.position, header.rows] for at, header in taken.frames]
        standing = msgspec.to_builtins(fold.standing)
        found.append({"verdict": taken.verdict.value, **header, "frames": numbers, "standing": standing})
    return found


def test_the_kept_bytes_are_read_as_they_were() -> None:
    names = sorted(path.name for path in GOLDEN.glob("*.record"))
    found = read([(GOLDEN / name).read_bytes() for name in names])
    assert found == json.loads((GOLDEN / "read.json").read_text())


def test_the_same_bytes_are_written() -> None:
    assert {path.name: path.read_bytes() for path in sorted(GOLDEN.glob("*.record"))} == partition()


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, raw in partition().items():
        (GOLDEN / name).write_bytes(raw)
    (GOLDEN / "read.json").write_text(json.dumps(read(list(partition().values())), indent=1) + "\n")
