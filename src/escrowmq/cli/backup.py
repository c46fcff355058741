"""``escrowmq backup`` and ``escrowmq restore``: copy a shard that is in use, and create a data folder from the copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from escrowmq.cli.options import DEFAULT_URL, Json, Url, Why, check_reachable
from escrowmq.cli.printing import moment, notice, print_facts, print_json, print_table, size
from escrowmq.errors import Code, error
from escrowmq.settings import BYTES, parse_quantity

if TYPE_CHECKING:
    from escrowmq.backup import Contents, Manifest

_EVERY = 0.2
"""Interval (s) between progress updates on a terminal."""


def backup(
    to: Annotated[
        Path, typer.Option("--to", help="The folder for the backup; one that holds a backup is brought up to date.")
    ],
    url: Url = DEFAULT_URL,
    rate: Annotated[
        str,
        typer.Option(
            "--rate", metavar="SIZE", help="Bytes a second that are copied at most; the broker has other work."
        ),
    ] = "50MiB",
    damaged_too: Annotated[
        bool, typer.Option("--damaged-too", help="Copy damaged places of the log as they are, instead of refusing.")
    ] = False,
    json: Json = False,
) -> None:
    """Back up a running broker: every acknowledged write up to some moment, verified frame by frame.

    An interrupted backup resumes when the command is repeated; a folder without a manifest is not a backup.
    """
    from escrowmq.backup import FolderSource, back_up, take
    from escrowmq.connecting import connect
    from escrowmq.platform.disk import RealDisk

    try:
        most = parse_quantity(rate, BYTES)
    except ValueError as problem:
        raise error(Code.BAD_ARGUMENT, f"--rate: {problem}") from None
    if most <= 0:
        raise error(Code.BAD_ARGUMENT, "--rate must be more than nothing")
    check_reachable(url)
    began = time.monotonic()
    with _progress("copied") as on_progress:
        if url.startswith("file:"):
            source = FolderSource(Path(url.removeprefix("file:").removeprefix("//")))
            manifest = take(source, RealDisk(to), rate=most, damaged_too=damaged_too, progress=on_progress)
        else:
            with connect(url) as bus:
                manifest = back_up(bus, to, rate=most, damaged_too=damaged_too, progress=on_progress)
    seconds = time.monotonic() - began
    if json:
        return print_json(_manifest_to_json(manifest) | {"seconds": round(seconds, 3)})
    print_facts(_manifest_facts(manifest) | {"in": str(to), "took": f"{seconds:.1f} s"})
    _print_damage(manifest)


def restore(
    folder: Annotated[Path, typer.Argument(metavar="BACKUP", help="The folder of a backup.")],
    to: Annotated[Path | None, typer.Option("--to", help="The data folder to make: empty, or not there yet.")] = None,
    verify_only: Annotated[bool, typer.Option("--verify", help="Check the backup, and restore nothing.")] = False,
    as_new_shard: Annotated[
        bool,
        typer.Option(
            "--as-new-shard",
            help="Give it a number of its own, so that it can stand beside the broker that it is a copy of.",
        ),
    ] = False,
    why: Why = None,
    json: Json = False,
) -> None:
    """Restore a data folder from a backup, or verify a backup. Everything is checked before anything is visible.

    Without --as-new-shard it is the same shard: the original broker must not run any more.
    """
    from escrowmq.acts.telling import acting_user
    from escrowmq.backup import restore as restore_
    from escrowmq.backup import verify
    from escrowmq.platform.disk import RealDisk

    if verify_only == (to is not None):
        raise error(Code.BAD_ARGUMENT, "give either --to FOLDER or --verify")
    source = RealDisk(folder, read_only=True)
    if to is None:
        manifest, found = verify(source)
        facts, more = _manifest_facts(manifest), {}
    else:
        with _progress("restored") as on_progress:
            made = restore_(
                source, RealDisk(to), as_new_shard=as_new_shard, by=acting_user(), why=why, progress=on_progress
            )
        manifest, found = made.manifest, made.contents
        more = {"restored": {"folder": str(to), "shard": made.shard, "epoch": made.epoch}}
        facts = _manifest_facts(manifest) | {"made": str(to), "its shard": f"{made.shard:08x}"}
    if json:
        return print_json(_manifest_to_json(manifest) | {"contents": found.to_json(), **more})
    print_facts(facts)
    _print_contents(found)
    _print_damage(manifest)
    notice(
        "everything checks"
        if to is None
        else "everything checks; start a broker on it: escrowmq serve --folder " + str(to)
    )


def _manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    import dataclasses

    fields = dataclasses.asdict(manifest)
    return {**fields, "files": len(manifest.files), "bytes": manifest.size}


def _manifest_facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "shard": f"{manifest.shard:08x}",
        "from": manifest.source,
        "holds": f"frames {manifest.first:,} to {manifest.sequence - 1:,}, up to before position {manifest.position:,}",
        "last frame": moment(manifest.time_us),
        "begun": moment(manifest.begun_us),
        "acts": manifest.acts,
        "size": f"{size(manifest.size)} in {len(manifest.files)} files",
    }


def _print_contents(found: Contents) -> None:
    print_table(
        ("topic", ">messages", "queues end at"),
        [(one.topic, one.messages, " ".join(map(str, one.ends))) for one in found.topics],
        "no topics",
    )
    print_table(
        ("consumer group", ">lag", ">dead letters"),
        [(one.group, one.lag, one.dead) for one in found.groups],
        "no groups",
    )
    print_facts({"undecided transactions": found.undecided + found.parked, "of them parked": found.parked})


def _print_damage(manifest: Manifest) -> None:
    for place in manifest.damaged:
        notice(f"damaged, copied as it is: {place}")


class _progress:
    """A progress display on standard error, if that is a terminal."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._console = Console(stderr=True)
        self._next = 0.0

    def __enter__(self) -> Callable[[int, int], None]:
        return self._show_progress

    def _show_progress(self, done: int, all_: int) -> None:
        if self._console.is_terminal and (now := time.monotonic()) >= self._next:
            self._next = now + _EVERY
            self._console.print(f"{self._verb} {size(done)} of {size(all_)}   ", end="\r", highlight=False)

    def __exit__(self, *_: object) -> None:
        if self._next:
            self._console.print(" " * 60, end="\r")
