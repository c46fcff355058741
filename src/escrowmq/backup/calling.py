"""Backup and restore by the names of folders: what the command line and programs call."""

from __future__ import annotations

from pathlib import Path

from escrowmq.backup.manifest import Manifest
from escrowmq.backup.sources import BrokerSource
from escrowmq.backup.taking import Progress, take
from escrowmq.client.bus import Bus
from escrowmq.errors import Code, error
from escrowmq.platform.disk import RealDisk


def back_up(
    bus: Bus,
    folder: str | Path,
    *,
    rate: float | None = None,
    damaged_too: bool = False,
    progress: Progress = lambda done, all_: None,
) -> Manifest:
    """Copy the shard of the one broker of ``bus`` into a folder, which may hold a backup of it already; what it holds
    then. Blocks.

    ``rate``: bytes a second at most. Raises as :func:`escrowmq.backup.take`.
    """
    links = bus.router.links
    if len(links) > 1:
        raise error(Code.BAD_ARGUMENT, f"these are {len(links)} brokers", "each one is a backup of its own")
    return take(BrokerSource(links[0]), RealDisk(folder), rate=rate, damaged_too=damaged_too, progress=progress)
