"""Backup by folder name, for the command line and programs."""

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
    """Copy the shard of the single broker of ``bus`` into a folder, which may hold an earlier backup; return its
    manifest. Blocks. ``rate``: maximum bytes per second. Raises as :func:`escrowmq.backup.take`."""
    links = bus.router.links
    if len(links) > 1:
        raise error(Code.BAD_ARGUMENT, f"these are {len(links)} brokers", "each one is a backup of its own")
    return take(BrokerSource(links[0]), RealDisk(folder), rate=rate, damaged_too=damaged_too, progress=progress)
