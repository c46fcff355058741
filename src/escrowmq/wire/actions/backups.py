"""Actions for copying a broker's log while it is in use; the bytes are read as ``%file.NAME``."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action
from escrowmq.wire.values import PageLimit

Sequence = Annotated[int, "number of a frame of the log, from 0"]
FileName = Annotated[str, "name of a file in the data folder"]
Size = Annotated[int, "valid bytes; later ones are not durable yet"]


class AskFiles(TypedDict):
    """Page of segments."""

    after: NotRequired[Annotated[FileName, "`next` of the previous page"]]
    limit: NotRequired[PageLimit]


class File(TypedDict):
    """A file and its valid size."""

    name: FileName
    bytes: Size


class Acts(TypedDict):
    """The record of acts, stored in the file `acts.journal`."""

    bytes: Size
    records: Annotated[int, "number of the last record; 0: none"]
    last: Annotated[str, "64 hex digits: the hash of the last record"]


class Files(TypedDict):
    """Files of the log at one moment. Each page has its own moment; files of the first one stay unchanged, or are
    removed."""

    shard: Annotated[int, "number of the shard"]
    sequence: Annotated[Sequence, "frames below it are durable, and in these files"]
    segments: Annotated[list[File], "oldest first"]
    snapshots: Annotated[list[File], "the one at the start of the log, unless it starts with frame 0; then the newest"]
    acts: Acts
    next: NotRequired[Annotated[FileName, "`after` of the next page, if there are more segments"]]


FILES = Action(
    "backup.files",
    AskFiles,
    Files,
    "The files of a log copy, with their valid sizes; read them as `%file.NAME`.",
    reads_only=True,
)
