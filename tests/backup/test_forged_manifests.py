"""A manifest whose digest was computed anew after it was changed: what the log says of itself decides, and nothing is
written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import escrowmq as mq
from escrowmq.backup import FolderSource, restore, take, verify
from escrowmq.errors import Corrupt, EscrowError
from escrowmq.platform.disk import LOCK_NAME, RealDisk


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    with mq.connect(f"file:{tmp_path / 'data'}", segment_bytes=1 << 16) as bus:
        for _ in range(6):
            bus.producer("shop").send_batch([mq.Message("orders", bytes(2000)) for _ in range(20)]).check()
    take(FolderSource(tmp_path / "data"), RealDisk(tmp_path / "copy"))
    return tmp_path / "copy"


def reseal(backup: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, and compute its digest anew."""
    path = backup / "backup.json"
    fields = json.loads(path.read_text())
    del fields["digest"]
    change(fields)
    packed = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({**fields, "digest": hashlib.sha256(packed).hexdigest()}))


def first_file(fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = fields["files"][0]
    return found


def without_the_last_segment(fields: dict[str, Any]) -> None:
    last = max(file["name"] for file in fields["files"] if file["name"].endswith(".segment"))
    fields["files"] = [file for file in fields["files"] if file["name"] != last]


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "bytes as text": lambda fields: first_file(fields).update(bytes="12"),
    "negative bytes": lambda fields: first_file(fields).update(bytes=-1),
    "no files": lambda fields: fields.update(files=[]),
    "files that are no list": lambda fields: fields.update(files="all"),
    "a file twice": lambda fields: fields["files"].append(dict(fields["files"][0])),
    "a path as a name": lambda fields: first_file(fields).update(name="../data/00000000000000000000.segment"),
    "no SHA-256": lambda fields: first_file(fields).update(sha256="x"),
    "a time of never": lambda fields: fields.update(time_us=1 << 62),
    "a negative position": lambda fields: fields.update(position=-1),
    "a fraction": lambda fields: fields.update(sequence=1.5),
    "another shard": lambda fields: fields.update(shard=fields["shard"] ^ 1),
    "no shard": lambda fields: fields.update(shard=0),
    "another epoch": lambda fields: fields.update(epoch=fields["epoch"] + 1),
    "another position": lambda fields: fields.update(position=fields["position"] - 1),
    "another end": lambda fields: fields.update(sequence=fields["sequence"] + 1),
    "fewer files": without_the_last_segment,
    "an unknown field": lambda fields: fields.update(surprise=1),
    "a missing field": lambda fields: fields.pop("acts"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_forged_manifest_is_refused_and_nothing_is_written(backup: Path, tmp_path: Path, name: str) -> None:
    verify(RealDisk(backup))
    reseal(backup, CHANGES[name])
    with pytest.raises(Corrupt):
        verify(RealDisk(backup))
    target = tmp_path / "restored"
    with pytest.raises(Corrupt):
        restore(RealDisk(backup), RealDisk(target))
    assert {entry.name for entry in target.iterdir()} <= {LOCK_NAME}


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_file_is_refused_and_nothing_waits(backup: Path, tmp_path: Path, kind: str) -> None:
    victim = next(path for path in backup.iterdir() if path.name != "backup.json")
    victim.rename(tmp_path / "aside")
    if kind == "pipe":
        os.mkfifo(victim)
    elif kind == "link":
        victim.symlink_to(tmp_path / "aside")
    else:
        victim.mkdir()
    with pytest.raises(EscrowError):
        verify(RealDisk(backup))
    with pytest.raises(EscrowError):
        restore(RealDisk(backup), RealDisk(tmp_path / "restored"))
