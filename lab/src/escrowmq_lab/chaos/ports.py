"""Addresses of nodes, and ports kept through restarts: never from the system's range for outgoing connections."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Sequence
from pathlib import Path

from escrowmq.errors import Code, Unknown

_FIRST = 10_000
_TRIES = 2_000


def address_of(place: int) -> str:
    """Return a loopback address (of Linux) for the node at this index, from 0."""
    return f"127.0.{1 + place // 250}.{1 + place % 250}"


def free_ports(hosts: Sequence[str], count: int) -> list[int]:
    """Find ``count`` ports that are free on all of these addresses, below the system's range for outgoing connections.
    Raises Unknown(TIMED_OUT) if none are found."""
    chance, found = random.Random(), set[int]()
    end = _first_ephemeral_port()
    for _ in range(_TRIES):
        if len(found) == count:
            return sorted(found)
        port = chance.randrange(_FIRST, end)
        if port not in found and all(_is_free(host, port) for host in hosts):
            found.add(port)
    raise Unknown(Code.TIMED_OUT, f"no {count} free ports between {_FIRST} and {end} were found")


def _is_free(host: str, port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _first_ephemeral_port() -> int:
    """Return the first port that the system uses for outgoing connections."""
    try:
        return max(int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]), _FIRST + 1_000)
    except (OSError, ValueError):
        return 32_768
