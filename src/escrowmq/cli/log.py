"""``escrowmq log``: print the frames of a stored log, check it for damage, create the topics of a log in Kafka."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.text import Text
from typer import Argument, Option

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import App, JsonLines
from escrowmq.cli.printing import console, notice, print_json_line
from escrowmq.errors import Code, error
from escrowmq.settings import nearest

KAFKA = "kafka://"

app = App("The commit log of a data folder.")


@app.callback()
def _group() -> None:
    """Inspect or copy the commit log of a data folder."""


@dataclass
class _Frames:
    """The frames to print."""

    start: int = Option(0, min=0, help="From this frame on.")
    end: int | None = Option(None, min=0, help="Up to before this frame.")
    kinds: list[str] | None = Option(None, "--kind", "-k", help="Only frames of this kind, such as half; repeatable.")
    rows: bool = Option(False, "--rows", "-r", help="Print the rows of each frame too.")


@app.command("dump")
def dump(
    frames: _Frames,
    folder: Path = Argument(..., help="The data folder; it may be in use."),
    check: bool = Option(False, "--check", help="Print no frames; check everything, and print damage."),
    json: JsonLines = False,
) -> None:
    """Print the frames of a log, with damage in its place. Takes no lock and changes nothing.

    Exit code 6 if any damage is found.
    """
    from escrowmq.log.dump import dump as entries
    from escrowmq.log.dump import findings, line
    from escrowmq.platform.disk import RealDisk
    from escrowmq.schemas import Kind

    if not folder.is_dir():
        raise error(Code.NOT_A_DATA_FOLDER, f"{folder} is not a folder")
    names = [kind.name for kind in Kind]
    for name in frames.kinds or ():
        if name.upper() not in names:
            known = [one.lower() for one in names]
            hint = nearest(name.lower(), known) or ", ".join(known)
            raise error(Code.BAD_ARGUMENT, f"there is no kind of frame {name!r}", hint)
    given = vars(frames) | {"kinds": [Kind[name.upper()] for name in frames.kinds or ()] or None}
    damaged = 0
    with closing(RealDisk(folder, read_only=True)) as disk:
        for entry in findings(disk) if check else entries(disk, **given):
            damaged += "damage" in entry
            _print_line(entry, line(entry), json, "red" if "damage" in entry else "")
    if damaged:
        notice(f"{damaged} findings; nothing was changed")
        raise typer.Exit(Exit.CORRUPT)
    if check and not json:
        notice(f"{folder}: no damage was found")


def _print_line(value: Mapping[str, Any], text: str, json: bool, style: str = "") -> None:
    if json:
        print_json_line(value)
    else:
        console().print(Text(text, style), soft_wrap=True)


@app.command("create")
def create(
    address: str = Argument(
        ...,
        help="kafka://HOST:PORT,HOST:PORT/TOPIC/PARTITION?SETTING=VALUE; port (9092), partition (0) and settings may "
        "be left out.",
    ),
    partitions: int | None = Option(None, min=1, help="Of each topic, one per shard; by default those needed."),
    json: JsonLines = False,
) -> None:
    """Create the topics of a log in Kafka, TOPIC and TOPIC.base, with the settings that a log requires.

    Existing topics are only checked: exit code 2 names the setting that would lose data, and its required value. Topics
    get three replicas; a cluster with fewer nodes needs ?replication=N.
    """
    from escrowmq.log.kafka.cluster.address import KafkaAddress
    from escrowmq.log.kafka.cluster.opening import create_topics

    parsed = KafkaAddress.parse(address)
    made = create_topics(parsed, partitions=partitions)
    for topic in (parsed.topic, parsed.base_topic):
        result = "created" if topic in made else "exists, with the settings that a log requires"
        entry = {"topic": topic, "made": topic in made, "replicas": parsed.replicas}
        _print_line(entry, f"{topic}: {result}", json)


@app.command("copy")
def copy(
    source: str = Argument(..., help="A data folder whose broker is stopped, or kafka://..."),
    target: str = Argument(..., help="kafka://... with new topics, or an empty folder."),
    json: JsonLines = False,
) -> None:
    """Copy a whole log from a folder to Kafka, or from Kafka to a folder, and verify the copy by its digest.

    The source is not changed. Do not run both afterwards: they are the same shard.
    """
    from importlib.metadata import version

    from escrowmq.log.kafka.cluster.opening import open_partitions
    from escrowmq.log.kafka.copying import to_folder, to_partition
    from escrowmq.platform.disk import RealDisk

    if source.startswith(KAFKA) == target.startswith(KAFKA):
        raise error(Code.BAD_ARGUMENT, "one of the two must be a folder, the other kafka://HOST,HOST/TOPIC")
    if source.startswith(KAFKA):
        copied = to_folder(open_partitions(source), RealDisk(target))
    else:
        if not Path(source).is_dir():
            raise error(Code.NOT_A_DATA_FOLDER, f"{source} is not a folder")
        copied = to_partition(RealDisk(source), open_partitions(target), version=version("escrowmq"))
    frames = f"frames {copied.first} to {copied.end - 1}, {copied.bytes} bytes, and {copied.acts} records of acts"
    _print_line(copied._asdict(), f"copied: {frames}; SHA-256 of the frames: {copied.sha256}", json)
