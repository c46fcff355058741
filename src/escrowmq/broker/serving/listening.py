"""The sockets on which a broker listens: TCP, and one in the file system."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from escrowmq.errors import Code, Misuse

BACKLOG = 4096
"""Connections that wait to be accepted. The system drops further ones, and their clients try again after a second."""


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that listens on a TCP port of ``host``; port 0: any free one. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def listen_unix(path: Path) -> socket.socket:
    """Return a non-blocking socket that listens at ``path``, which this user alone may connect to. One that a broker
    left behind is replaced.

    Raises OSError, Misuse(BAD_URL) if something else is there or somebody listens.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise Misuse(Code.BAD_URL, f"{path} is there, and is no socket", "give another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()
            else:
                raise Misuse(Code.BAD_URL, f"somebody listens at {path}", "give another path, or stop that broker")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)  # nobody is let in before it listens
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
