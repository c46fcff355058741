"""``escrowmq log``: print the frames of a stored log, check it for damage, create the topics of a log in Kafka."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import JsonLines
from escrowmq.cli.printing import console, notice, print_json_line
from escrowmq.errors import Code, error
from escrowmq.settings import nearest

KAFKA = "kafka://"

app = typer.Typer(no_args_is_help=True, help="The commit log of a data folder.")


@app.callback()
def _group() -> None:
    """Inspect or copy the commit log of a data folder."""


@app.command("dump")
def dump(
    folder: Annotated[Path, typer.Argument(help="The data folder; it may be in use.")],
    start: Annotated[int, typer.Option(min=0, help="From this frame on.")] = 0,
    end: Annotated[int | None, typer.Option(min=0, help="Up to before this frame.")] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", "-k", help="Only frames of this kind (half, decided, ...); may be given again."),
    ] = None,
    rows: Annotated[bool, typer.Option("--rows", "-r", help="Print the rows of each frame too.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Print no frames, check everything: what is damaged.")] = False,
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
    wanted = [_kind(name, [k.name.lower() for k in Kind]) for name in kinds or []]
    damaged = 0
    disk = RealDisk(folder, read_only=True)
    try:
        chosen = [Kind[name.upper()] for name in wanted] or None
        for entry in findings(disk) if check else entries(disk, start=start, end=end, kinds=chosen, rows=rows):
            damaged += "damage" in entry
            if json:
                print_json_line(entry)
            else:
                console().print(Text(line(entry), "red" if "damage" in entry else ""), soft_wrap=True)
    finally:
        disk.close()
    if damaged:
        notice(f"{damaged} findings; nothing was changed")
        raise typer.Exit(Exit.CORRUPT)
    if check and not json:
        notice(f"{folder}: everything checks")


@app.command("create")
def create(
    address: Annotated[
        str,
        typer.Argument(
            help="kafka://HOST:PORT,HOST:PORT/TOPIC/PARTITION?SETTING=VALUE; port (9092), partition (0) and settings "
            "may be left out."
        ),
    ],
    partitions: Annotated[
        int | None,
        typer.Option(min=1, help="Of each topic, one for each shard; as many as the address needs by default."),
    ] = None,
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
        if json:
            print_json_line({"topic": topic, "made": topic in made, "replicas": parsed.replicas})
        else:
            result = "made" if topic in made else "is there, and kept as a log must be"
            console().print(Text(f"{topic}: {result}"), soft_wrap=True)


@app.command("copy")
def copy(
    source: Annotated[str, typer.Argument(help="A data folder whose broker is stopped, or kafka://...")],
    target: Annotated[str, typer.Argument(help="kafka://... with new topics, or an empty folder.")],
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
    if json:
        print_json_line(copied._asdict())
    else:
        frames = f"frames {copied.first} to {copied.end - 1}, {copied.bytes} bytes, and {copied.acts} records of acts"
        console().print(Text(f"copied: {frames}; SHA-256 of the frames: {copied.sha256}"), soft_wrap=True)


def _kind(name: str, known: list[str]) -> str:
    if name.lower() not in known:
        raise error(
            Code.BAD_ARGUMENT, f"there is no kind of frame {name!r}", nearest(name.lower(), known) or ", ".join(known)
        )
    return name.lower()
