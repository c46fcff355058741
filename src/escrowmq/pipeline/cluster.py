"""Checks a Spark master URL: whether it is valid, whether it answers, and whether it is this machine."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

from escrowmq.errors import Code, Misuse, Unknown
from escrowmq.platform.listening import is_loopback

PATIENCE = 5.0
"""Seconds that a master has to answer. Spark itself would try for a minute, and then print a page of Java."""

_MASTER = re.compile(r"spark://(?P<hosts>[^/]+)")
_LOCAL = re.compile(r"local(\[[^]]+\])?")
_OTHERS = re.compile(r"yarn|k8s://.+")


def check_master(master: str) -> None:
    """Raise Misuse(BAD_URL) for an invalid master URL, Unknown(DISCONNECTED) if no standalone master accepts a
    connection within PATIENCE seconds. ``local``, ``yarn`` and ``k8s`` masters are only checked for their form."""
    if _LOCAL.fullmatch(master) or _OTHERS.fullmatch(master):
        return
    problems = []
    for host, port in list(_parse_addresses(master)):  # all of them, before any is tried
        try:
            socket.create_connection((host, port), PATIENCE).close()
            return
        except OSError as problem:
            problems.append(f"{host}:{port}: {problem.strerror or problem}")
    hint = "is it running, and the address right? The port is the master's own, not that of its pages"
    raise Unknown(Code.DISCONNECTED, f"no Spark master at {'; '.join(problems)}", hint)


def is_here(master: str) -> bool:
    """Return whether the whole cluster runs on this machine, so that the loopback is enough for it."""
    if _LOCAL.fullmatch(master):
        return True
    return bool(_MASTER.fullmatch(master)) and all(is_loopback(host) for host, _ in _parse_addresses(master))


def _parse_addresses(master: str) -> Iterator[tuple[str, int]]:
    found = _MASTER.fullmatch(master)
    for address in found["hosts"].split(",") if found else [""]:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            hint = "spark://HOST:PORT, or local[2] for this machine"
            raise Misuse(Code.BAD_URL, f"{master!r} is no Spark master", hint)
        yield host.strip("[]"), int(port)
