"""The addresses that clients are given in routes.

The Python client opens its telemetry stream again only if a route names an address that is new to it. So the server
listens at two ports, and routes name one of them, which changes with every start of the server: after a restart each
client connects again with its next route query, and can answer check-backs.
"""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from escrowmq.gateway.rocketmq.protocol import definition

FALLBACK_HOST = "127.0.0.1"


class Endpoints:
    """The port that routes name. ``state``: a file that holds which of ``ports`` the last start used."""

    def __init__(self, ports: tuple[int, int], state: Path | None = None, host: str | None = None) -> None:
        self.ports = ports
        self.host = host
        self.port = ports[_next(ports, state)] if state is not None else ports[0]

    def choose(self, configured: Any) -> Any:
        """Return the endpoints for a client: ``host`` if the operator set one, else the host by which the client
        reaches this server."""
        addresses = configured.addresses
        host = self.host or (addresses[0].host if addresses else FALLBACK_HOST)
        address = definition.Address(host=host, port=self.port)
        return definition.Endpoints(scheme=_scheme(host), addresses=[address])


def _scheme(host: str) -> Any:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return definition.DOMAIN_NAME
    return definition.IPv4 if version == 4 else definition.IPv6


def _next(ports: tuple[int, int], state: Path) -> int:
    """Return which port this start uses, the one that the last start did not, and record it."""
    last = ""
    with suppress(OSError):
        last = state.read_text(encoding="utf-8").strip()
    number = 1 if last == str(ports[0]) else 0
    with suppress(OSError):  # without the file the ports do not change: the Python client answers after up to 5 minutes
        state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = state.with_suffix(f".{os.getpid()}")
        temporary.write_text(f"{ports[number]}\n", encoding="utf-8")
        temporary.replace(state)
    return number
