"""From a URL to a bus: ``escrow://HOST:PORT[,HOST:PORT...]`` for brokers, ``file:FOLDER`` for one inside this process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from escrowmq.errors import Code, Misuse

if TYPE_CHECKING:
    from escrowmq.client.aio import AsyncBus
    from escrowmq.client.bus import Bus
    from escrowmq.wire import Link

DEFAULT_PORT = 7700
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")


def connect(url: str, **options: Any) -> Bus:
    """A bus for ``url``.

    ``"escrow://127.0.0.1:7700"``, several brokers ``"escrow://a:7700,b:7700"`` (port 7700 if none is given; with
    ``?carrier=flight`` behind it everything goes over Arrow Flight, small requests too), or ``"file:./data"``: the broker inside this process, on that folder, with ``options`` as its settings
    (``lease_seconds=5``, ...; see :class:`escrowmq.settings.BrokerSettings`). ``read_only=True`` looks at a folder as it
    lies, in use or not, and changes nothing: for reads and listings; what would write raises Denied.

    Nothing is asked of an ``escrow:`` broker before the first call. Raises Misuse(BAD_URL), Misuse(BAD_SETTING), and for
    folders Misuse(FOLDER_IN_USE), Corrupt and so on.
    """
    from escrowmq.client.bus import Bus

    return Bus(links(url, dict(options)))


async def aconnect(url: str, **options: Any) -> AsyncBus:
    """As :func:`connect`, with everything to await. Belongs to the event loop that it is called on."""
    from escrowmq.client.aio import AsyncBus

    return AsyncBus(await asyncio.to_thread(links, url, dict(options)))


def links(url: str, options: dict[str, Any]) -> Sequence[Link]:
    """One link per broker that ``url`` names."""
    if not isinstance(url, str):
        raise Misuse(Code.BAD_URL, f"{type(url).__name__} is not a URL")
    scheme, colon, rest = url.partition(":")
    if colon and scheme == "file":
        return [_embedded(url, rest, options)]
    if colon and scheme == "escrow" and rest.startswith("//"):
        if options:
            raise Misuse(
                Code.BAD_ARGUMENT, f"no option {next(iter(options))!r} here", "a served broker has its own settings"
            )
        return _served(url, rest[2:])
    raise Misuse(Code.BAD_URL, f"{url!r} is not a broker URL")


def _served(url: str, rest: str) -> Sequence[Link]:
    rest, _, query = rest.partition("?")
    if query not in ("", "carrier=flight", "carrier=lean"):
        raise Misuse(Code.BAD_URL, f"{url!r}: {query!r} is no option", "carrier=flight, or none")
    addresses = []
    for part in rest.rstrip("/").split(","):
        match = _HOST.fullmatch(part)
        port = int(match["port"] or DEFAULT_PORT) if match else 0
        if match is None or not 0 < port < 1 << 16:
            raise Misuse(Code.BAD_URL, f"{url!r}: {part!r} is not HOST:PORT")
        addresses.append((match["v6"] or match["host"], port))
    if len(set(addresses)) < len(addresses):
        raise Misuse(Code.BAD_URL, f"{url!r} names a broker twice")
    from escrowmq.client.links.flight import FlightLink
    from escrowmq.client.links.lean import LeanLink

    flights = [FlightLink(host, port, stays=len(addresses) > 1) for host, port in addresses]
    return flights if query == "carrier=flight" else [LeanLink(flight) for flight in flights]


def _embedded(url: str, rest: str, options: dict[str, Any]) -> Link:
    if rest.startswith("//"):
        rest = rest[2:]
        if not rest.startswith("/"):
            raise Misuse(Code.BAD_URL, f"{url!r} names a host", "use file:FOLDER or file:///ABSOLUTE/FOLDER")
    if not rest or "\0" in rest:
        raise Misuse(Code.BAD_URL, f"{url!r} names no folder")
    if options.pop("read_only", False):
        if options:
            raise Misuse(Code.BAD_ARGUMENT, f"no option {next(iter(options))!r} with read_only")
        from escrowmq.broker.offline import OfflineLink

        return OfflineLink(Path(rest))
    from escrowmq.broker.embedded import open_embedded
    from escrowmq.settings import BrokerSettings

    return open_embedded(Path(rest), BrokerSettings.load(overrides=options))
