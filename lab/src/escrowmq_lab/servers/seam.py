"""The interface of all test server modules, and :class:`Absent` for a server that is not installed. Each module has one
function, ``serving(folder: Path)``, that returns a context manager of a :class:`Server`: it starts the server on a free
loopback port with its data under ``folder``, waits until it responds, and stops it at the end, even when tests fail.
The server's ``url`` is for clients; its process can be paused, killed and restarted. :class:`Absent` means that this
machine lacks it."""

from __future__ import annotations


class Absent(Exception):
    """The server is not installed here; the message names its package."""
