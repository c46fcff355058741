"""What all servers share.

Each module has one context manager, ``running(folder: Path) -> Iterator[URL]``: it starts the server on a free loopback port
with its data under ``folder``, waits until it answers, yields the URL that clients take, and stops it (also when the tests fail).
:class:`Absent` says that this machine does not have it.
"""

from __future__ import annotations


class Absent(Exception):
    """The server is not installed here; the message names the package that has it."""
