"""Addresses of the brokers of one shard: their syntax, and the rules for following an address that a broker names.

A shard whose log several brokers follow is written ``a:7700|b:7700``. A broker names others, too, in ``hello`` and with
NOT_LEADER. Nothing proves the identity of the responder at an address, so it could redirect the client to any address.
Therefore a named address is followed only if

1. it is plainly ``escrow://HOST:PORT`` (with TLS: ``escrows://``), at most ``MOST`` of them per shard;
2. it is of the same kind as an address from the user: a client of loopback addresses is never sent off its machine, and
   a client of other machines never to loopback, which would be *its own* machine; no client is sent to addresses
   without a particular machine (unspecified, link-local, multicast, reserved);
3. the user did not forbid it (``replicas=listed``), and the broker there has the same shard
   (:mod:`escrowmq.client.links.seeking`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

DEFAULT_PORT = 7700
MOST = 16
"""Maximum addresses of one shard, from the user and from brokers."""
_MAX_CHARACTERS = 300
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")


class Address(NamedTuple):
    """Listening address of a broker. With port 0 the host is the path of a Unix socket."""

    host: str
    port: int

    @property
    def location(self) -> str:
        """``HOST:PORT``, with brackets for IPv6; the path of a Unix socket."""
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """``escrow://HOST:PORT``, or ``escrow+unix://PATH``."""
        return f"escrow{'' if self.port else '+unix'}://{self.location}"


class Kind(Enum):
    """Machines that an address can denote."""

    LOOPBACK = "the client's own"
    NETWORK = "some machine"
    NOWHERE = "none in particular"


def parse_address(text: str) -> Address | None:
    """Parse ``HOST[:PORT]``. Returns None for anything else."""
    match = _HOST.fullmatch(text)
    port = int(match["port"] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 1 << 16:
        return None
    return Address(match["v6"] or match["host"], port)


def named_address(url: object, scheme: str = "escrow") -> Address | None:
    """Parse an address from a broker, ``SCHEME://HOST:PORT``. Returns None for anything else."""
    prefix = f"{scheme}://"
    if not isinstance(url, str) or len(url) > _MAX_CHARACTERS or not url.startswith(prefix):
        return None
    return parse_address(url.removeprefix(prefix).removesuffix("/"))


def kind_of(host: str) -> Kind:
    """Return the machines that a host can denote: for a name other than ``localhost`` the network, for a path the
    client's own."""
    if host.startswith("/"):
        return Kind.LOOPBACK
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return Kind.LOOPBACK
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return Kind.NOWHERE if _is_unusual_number(host) else Kind.NETWORK
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return Kind.LOOPBACK
    nowhere = address.is_unspecified or address.is_link_local or address.is_multicast or address.is_reserved
    return Kind.NOWHERE if nowhere else Kind.NETWORK


def may_follow(named: Address, given: Collection[Address]) -> bool:
    """Return whether a client with these given addresses may follow an address from a broker."""
    kind = kind_of(named.host)
    return kind is not Kind.NOWHERE and kind in {kind_of(address.host) for address in given}


def _is_unusual_number(host: str) -> bool:
    """Return whether a resolver may interpret it as an unusual address: ``127.1``, ``2130706433``, ``0x7f.1``."""
    return bool(re.fullmatch(r"(?:0[xX][0-9A-Fa-f]*|[0-9]+)(?:\.(?:0[xX][0-9A-Fa-f]*|[0-9]+))*\.?", host))
