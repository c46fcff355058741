"""The interface that all test server modules share, and :class:`Absent` for a server that is not installed.

Each module has one function, ``serving(folder: Path)``, that gives a context manager of a :class:`Server`: it starts
the server on a free loopback port with its data under ``folder``, waits until it answers, and stops it at the end, also
when the tests fail. The server's ``url`` is what clients take; its process can be paused, killed and restarted.
:class:`Absent` says that this machine does not have it.
"""

from __future__ import annotations


class Absent(Exception):
    """The server is not installed here; the message names the package that has it."""
