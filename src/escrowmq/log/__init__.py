"""The commit log: segment files, frames, snapshots, recovery and integrity checks."""
