"""Actions for a copy of a broker's log while it is in use; the bytes themselves come as reads of ``%file.NAME``."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action
from escrowmq.wire.values import PageLimit

Sequence = Annotated[int, "number of a frame of the log, from 0"]
FileName = Annotated[str, "name of a file in the data folder"]
Size = Annotated[int, "bytes of it that count; what follows is not durable yet"]


class AskFiles(TypedDict):
    """Which segments."""

    after: NotRequired[Annotated[FileName, "`next` of the page before"]]
    limit: NotRequired[PageLimit]


class File(TypedDict):
    """A file, as far as it counts."""

    name: FileName
    bytes: Size


class Acts(TypedDict):
    """The record of acts, which is the file `acts.journal`."""

    bytes: Size
    records: Annotated[int, "number of the last record; 0: there is none"]
    last: Annotated[str, "64 hex digits: the hash of the last record"]


class Files(TypedDict):
    """The files of the log as of one moment. Each page is of a moment of its own; what the first one lists stays as it
    is, or leaves."""

    shard: Annotated[int, "number of the shard"]
    sequence: Annotated[Sequence, "the frames below it are durable, and in these files"]
    segments: Annotated[list[File], "oldest first"]
    snapshots: Annotated[
        list[File], "that with which the log begins, if it does not begin with frame 0; then the newest"
    ]
    acts: Acts
    next: NotRequired[Annotated[FileName, "`after` of the next page, if there are more segments"]]


FILES = Action(
    "backup.files",
    AskFiles,
    Files,
    "The files that a copy of the log is made of, and how far each counts; read them as `%file.NAME`.",
    reads_only=True,
)
