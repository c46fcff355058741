"""Backup and restore: a copy of a shard in use, verified by digest, and a data folder made from it."""

from escrowmq.backup.manifest import CopiedFile, Manifest, read_manifest
from escrowmq.backup.restoring import Restored, restore
from escrowmq.backup.sources import BrokerSource, FolderSource, Source
from escrowmq.backup.taking import back_up, take
from escrowmq.backup.verifying import Contents, verify

__all__ = [
    "BrokerSource",
    "Contents",
    "CopiedFile",
    "FolderSource",
    "Manifest",
    "Restored",
    "Source",
    "back_up",
    "read_manifest",
    "restore",
    "take",
    "verify",
]
