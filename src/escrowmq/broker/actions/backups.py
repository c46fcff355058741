"""The files of the log, for a backup."""

from __future__ import annotations

from escrowmq.broker.actions.answering import PAGE, answers
from escrowmq.broker.reads.readable import Readable
from escrowmq.log.seam import StoredFile
from escrowmq.wire.actions import backups


@answers(backups.FILES)
def _files(engine: Readable, request: backups.AskFiles) -> backups.Files:
    found, limit = engine.log.files(), request.get("limit", PAGE)
    segments = [file for file in found.segments if file.name > request.get("after", "")]
    answer = backups.Files(
        shard=engine.log.shard,
        sequence=found.sequence,
        segments=_describe(segments[:limit]),
        snapshots=_describe(found.snapshots),
        acts={"bytes": found.acts_bytes, "records": found.acts, "last": found.acts_hash},
    )
    if len(segments) > limit:
        answer["next"] = segments[limit - 1].name
    return answer


def _describe(files: list[StoredFile] | tuple[StoredFile, ...]) -> list[backups.File]:
    return [{"name": file.name, "bytes": file.size} for file in files]
