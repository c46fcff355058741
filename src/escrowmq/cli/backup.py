"""``escrowmq backup`` and ``escrowmq restore``: copy a shard that is in use, and create a data folder from the copy."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from typer import Argument, Option

from escrowmq.cli.options import Brokers, Json, Why, check_reachable, size_option
from escrowmq.cli.printing import moment, notice, print_facts, print_json, print_table, size
from escrowmq.errors import Code, error

if TYPE_CHECKING:
    from escrowmq.backup import Contents, Manifest

_EVERY = 0.2
"""Interval (s) between progress updates on a terminal."""


def backup(
    brokers: Brokers,
    to: Path = Option(..., help="The folder for the backup; an existing backup in it is updated."),
    rate: float = size_option("50MiB", "--rate", "Bytes a second that are copied at most; the broker has other work."),
    damaged_too: bool = Option(False, "--damaged-too", help="Copy damaged places of the log as they are."),
) -> None:
    """Back up a running broker: every acknowledged write up to some moment, verified frame by frame.

    An interrupted backup resumes when the command is repeated; a folder without a manifest is not a backup.
    """
    from escrowmq.backup import FolderSource, back_up, take
    from escrowmq.connecting import connect
    from escrowmq.platform.disk import RealDisk

    if rate <= 0:
        raise error(Code.BAD_ARGUMENT, "--rate must be more than nothing")
    url = brokers.url
    check_reachable(url)
    began = time.monotonic()
    with _progress("copied") as on_progress:
        if url.startswith("file:"):
            source = FolderSource(Path(url.removeprefix("file:").removeprefix("//")))
            manifest = take(source, RealDisk(to), rate=rate, damaged_too=damaged_too, progress=on_progress)
        else:
            with connect(url) as bus:
                manifest = back_up(bus, to, rate=rate, damaged_too=damaged_too, progress=on_progress)
    seconds = time.monotonic() - began
    if brokers.json:
        return print_json(_manifest_to_json(manifest) | {"seconds": round(seconds, 3)})
    print_facts(_manifest_facts(manifest) | {"in": str(to), "took": f"{seconds:.1f} s"})
    _print_damage(manifest)


def restore(
    folder: Path = Argument(..., metavar="BACKUP", help="The folder of a backup."),
    to: Path | None = Option(None, help="The data folder to create: empty, or not there yet."),
    verify_only: bool = Option(False, "--verify", help="Check the backup, and restore nothing."),
    as_new_shard: bool = Option(False, "--as-new-shard", help="Give it its own shard number: both brokers can run."),
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
    facts, more, hint = {}, {}, ""
    if to is None:
        manifest, found = verify(source)
    else:
        options: dict[str, Any] = {"as_new_shard": as_new_shard, "by": acting_user(), "why": why}
        with _progress("restored") as on_progress:
            made = restore_(source, RealDisk(to), **options, progress=on_progress)
        manifest, found = made.manifest, made.contents
        more = {"restored": {"folder": str(to), "shard": made.shard, "epoch": made.epoch}}
        facts = {"made": str(to), "its shard": f"{made.shard:08x}"}
        hint = f"; start a broker on it: escrowmq serve --folder {to}"
    if json:
        return print_json(_manifest_to_json(manifest) | {"contents": found.to_json(), **more})
    print_facts(_manifest_facts(manifest) | facts)
    _print_contents(found)
    _print_damage(manifest)
    notice("no damage was found" + hint)


def _manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    return {**dataclasses.asdict(manifest), "files": len(manifest.files), "bytes": manifest.size}


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
    topics = [(one.topic, one.messages, " ".join(map(str, one.ends))) for one in found.topics]
    print_table(("topic", ">messages", "queues end at"), topics, "no topics")
    groups = [(one.group, one.lag, one.dead) for one in found.groups]
    print_table(("consumer group", ">lag", ">dead letters"), groups, "no groups")
    print_facts({"undecided transactions": found.undecided + found.parked, "of them parked": found.parked})


def _print_damage(manifest: Manifest) -> None:
    for place in manifest.damaged:
        notice(f"damaged, copied as it is: {place}")


@contextmanager
def _progress(verb: str) -> Iterator[Callable[[int, int], None]]:
    """Provide a callback that shows the progress on standard error, if that is a terminal."""
    console, next_at = Console(stderr=True), 0.0

    def show(done: int, all_: int) -> None:
        nonlocal next_at
        if console.is_terminal and (now := time.monotonic()) >= next_at:
            next_at = now + _EVERY
            console.print(f"{verb} {size(done)} of {size(all_)}   ", end="\r", highlight=False)

    try:
        yield show
    finally:
        if next_at:
            console.print(" " * 60, end="\r")
