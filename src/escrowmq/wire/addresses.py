"""The addresses of the brokers of one shard: how they are written, and which of those that a broker names are believed.

One shard whose log several brokers follow is written ``a:7700|b:7700``. A broker names others, too, in ``hello`` and
with NOT_LEADER. Such a name is not asked of anywhere: whoever answers at an address that the user gave could send the
client to any address, and there is nothing on an address that proves who is there. So it is followed only if

1. it is plainly ``escrow://HOST:PORT`` (of a client that speaks TLS: ``escrows://``), at most ``MOST`` of them for one
   shard;
2. it is a place of the same kind as one that the user gave: a client of loopback addresses is never led off its
   machine, and a client of other machines never to loopback, which would be *its own* machine and not the broker's;
   nobody is led to addresses that mean no particular machine (unspecified, link-local, multicast, reserved);
3. the user did not forbid it (``replicas=listed``), and who answers there is the same shard
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
"""Addresses of one shard, those that were given and those that brokers named."""
_MAX_CHARACTERS = 300
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")


class Address(NamedTuple):
    """Where a broker listens. With port 0 the host is the path of a Unix socket."""

    host: str
    port: int

    @property
    def location(self) -> str:
        """``HOST:PORT``, of IPv6 with brackets; the path of a Unix socket."""
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """``escrow://HOST:PORT``, or ``escrow+unix://PATH``."""
        return f"escrow{'' if self.port else '+unix'}://{self.location}"


class Kind(Enum):
    """Which machines an address can mean."""

    LOOPBACK = "the client's own"
    NETWORK = "some machine"
    NOWHERE = "none in particular"


def parse_address(text: str) -> Address | None:
    """``HOST[:PORT]`` as an address; None for anything else."""
    match = _HOST.fullmatch(text)
    port = int(match["port"] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 1 << 16:
        return None
    return Address(match["v6"] or match["host"], port)


def named_address(url: object, scheme: str = "escrow") -> Address | None:
    """Return the address that a broker names, ``SCHEME://HOST:PORT``; None for anything else."""
    prefix = f"{scheme}://"
    if not isinstance(url, str) or len(url) > _MAX_CHARACTERS or not url.startswith(prefix):
        return None
    return parse_address(url.removeprefix(prefix).removesuffix("/"))


def kind_of(host: str) -> Kind:
    """Return which machines a host can mean; a name that is not ``localhost`` means some machine, a path the
    client's own."""
    if host.startswith("/"):
        return Kind.LOOPBACK
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return Kind.LOOPBACK
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return Kind.NOWHERE if _is_odd_number(host) else Kind.NETWORK
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return Kind.LOOPBACK
    nowhere = address.is_unspecified or address.is_link_local or address.is_multicast or address.is_reserved
    return Kind.NOWHERE if nowhere else Kind.NETWORK


def may_follow(named: Address, given: Collection[Address]) -> bool:
    """Return whether a client that was given these addresses goes where a broker sends it."""
    kind = kind_of(named.host)
    return kind is not Kind.NOWHERE and kind in {kind_of(address.host) for address in given}


def _is_odd_number(host: str) -> bool:
    """Return whether a resolver may read it as an address that is written in another way: ``127.1``, ``2130706433``,
    ``0x7f.1``."""
    return bool(re.fullmatch(r"(?:0[xX][0-9A-Fa-f]*|[0-9]+)(?:\.(?:0[xX][0-9A-Fa-f]*|[0-9]+))*\.?", host))
