"""From a URL to a bus.

``escrow://HOST:PORT[|HOST:PORT...][,...]`` are brokers, ``escrows://`` the same over TLS, ``escrow+unix:///PATH`` is a
broker at a Unix socket, and ``file:FOLDER`` is one inside this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from escrowmq.errors import Code, Misuse
from escrowmq.platform.listening import shown_address

if TYPE_CHECKING:
    import ssl

    from escrowmq.client.aio import AsyncBus
    from escrowmq.client.bus import Bus
    from escrowmq.log.offline import Durable
    from escrowmq.wire import Link
    from escrowmq.wire.addresses import Address
    from escrowmq.wire.credential import Credential

_OPTIONS = {"replicas": ("followed", "listed")}
_SERVED = ("escrow", "escrows", "escrow+unix")


def connect(url: str, **options: Any) -> Bus:
    """Return a bus for ``url``.

    - ``"escrow://127.0.0.1:7700"``: a served broker; ``"escrow://a:7700,b:7700"``: several shards;
      ``"escrow://a:7700|b:7700"``: the brokers of one shard, of which one leads; ``"escrow://a|b,c|d"``: both (default
      port 7700). With ``?replicas=listed`` no other addresses are used, even if the brokers name some.
    - ``escrows://``: the same over TLS. The brokers' certificates must be trusted by the system (or by the file in the
      variable SSL_CERT_FILE); ``tls=`` is a PEM file with the authorities to trust instead, or an ``ssl.SSLContext``,
      and makes ``escrow://`` the same as ``escrows://``. ``certificate=(CERTIFICATE, KEY)``, two PEM files, is
      presented to the broker.
    - ``token=`` or ``token_file=`` authenticates the client; otherwise the variables ESCROWMQ_TOKEN and
      ESCROWMQ_TOKEN_FILE do, if one is set. The file is read at each connection. A token is never sent to another
      machine without TLS.
    - ``"escrow+unix:///run/escrow.socket"``: the broker at a Unix socket of this machine.
    - ``"file:./data"``: a broker inside this process, on that folder, with ``options`` as its settings
      (``lease_seconds=5``, ...; see :class:`escrowmq.settings.BrokerSettings`).
    - ``"file:./data"`` with ``read_only=True`` reads a folder, in use or not, and changes nothing; writes raise Denied.
      A broker that serves the folder reports how far its log is durable. If it is unreachable, recently acknowledged
      messages may be missing: ``admin.health()`` and the log report that.

    No request is sent to an ``escrow:`` broker before the first call. Raises Misuse(BAD_URL), Misuse(BAD_SETTING), and
    for folders Misuse(FOLDER_IN_USE), Corrupt and similar errors.
    """
    from escrowmq.client.bus import Bus

    return Bus(links(url, dict(options)))


async def aconnect(url: str, **options: Any) -> AsyncBus:
    """Return an awaitable bus; see :func:`connect`. It belongs to the event loop that it is created on."""
    from escrowmq.client.aio import AsyncBus

    return AsyncBus(await asyncio.to_thread(links, url, dict(options)))


def links(url: str, options: dict[str, Any]) -> Sequence[Link]:
    """Return one link per broker in ``url``."""
    if not isinstance(url, str):
        raise Misuse(Code.BAD_URL, f"{type(url).__name__} is not a URL")
    scheme, colon, rest = url.partition(":")
    if colon and scheme == "file":
        return [_open_embedded(url, rest, options)]
    if colon and scheme in _SERVED and rest.startswith("//"):
        from escrowmq.wire.credential import Credential

        tls, certificate = options.pop("tls", None), options.pop("certificate", None)
        credential = Credential.choose(options.pop("token", None), options.pop("token_file", None))
        if options:
            text = f"no option {next(iter(options))!r} here"
            raise Misuse(Code.BAD_ARGUMENT, text, "a served broker has its own settings")
        if scheme == "escrow+unix":
            return _local(url, rest[2:], tls, credential)
        return _open_served(url, rest[2:], _tls_context(scheme, tls, certificate), credential)
    raise Misuse(Code.BAD_URL, f"{shown_address(url)!r} is not a broker URL")


def _local(url: str, path: str, tls: object, credential: Credential) -> Sequence[Link]:
    from escrowmq.client.links.link import ServedLink
    from escrowmq.wire.addresses import Address

    if not path.startswith("/") or "\0" in path:
        raise Misuse(Code.BAD_URL, f"{shown_address(url)!r} names no socket", "use escrow+unix:///ABSOLUTE/PATH")
    if tls is not None:
        raise Misuse(Code.BAD_ARGUMENT, "a Unix socket has no TLS", "leave tls= out")
    return [ServedLink([Address(path, 0)], follow=False, credential=credential)]


def _tls_context(scheme: str, tls: object, certificate: object) -> ssl.SSLContext | None:
    """Return the TLS settings of the connections. Raises Misuse(BAD_ARGUMENT, BAD_SETTING)."""
    import ssl

    from escrowmq.wire.channel import client_context

    if certificate is not None and not isinstance(certificate, tuple):
        raise Misuse(Code.BAD_ARGUMENT, f"certificate={certificate!r}", "give (CERTIFICATE, KEY), two PEM files")
    own = tuple(map(Path, certificate)) if certificate is not None else ()
    if tls is None or tls is True:
        if scheme == "escrow" and tls is None:
            if own:
                raise Misuse(Code.BAD_ARGUMENT, "a certificate without TLS", "write escrows:// in place of escrow://")
            return None
        return client_context(None, *own)
    if isinstance(tls, ssl.SSLContext):
        return tls
    if isinstance(tls, str | Path):
        return client_context(Path(tls), *own)
    raise Misuse(Code.BAD_ARGUMENT, f"tls={tls!r}", "give True, a PEM file with authorities, or an ssl.SSLContext")


def _open_served(url: str, rest: str, tls: ssl.SSLContext | None, credential: Credential) -> Sequence[Link]:
    from escrowmq.client.links.link import ServedLink
    from escrowmq.wire.addresses import MOST, parse_address

    shown, (rest, _, query) = repr(shown_address(url)), rest.partition("?")
    chosen = _options(shown, query)
    shards: list[list[Address]] = []
    for shard in rest.rstrip("/").split(","):
        addresses = []
        for part in shard.split("|"):
            if (address := parse_address(part)) is None:
                raise Misuse(Code.BAD_URL, f"{shown}: {shown_address('//' + part)[2:]!r} is not HOST:PORT")
            addresses.append(address)
        if len(addresses) > MOST:
            raise Misuse(Code.BAD_URL, f"{shown} names {len(addresses)} brokers of one shard", f"at most {MOST}")
        shards.append(addresses)
    all_ = [address for addresses in shards for address in addresses]
    if len(set(all_)) < len(all_):
        raise Misuse(Code.BAD_URL, f"{shown} names a broker twice")
    follow = chosen.get("replicas") != "listed"
    if credential.is_set and tls is None:
        _check_private(all_)
    several = len(shards) > 1
    return [ServedLink(each, follow=follow, stays=several, tls=tls, credential=credential) for each in shards]


def _check_private(addresses: list[Address]) -> None:
    """Raise Misuse(BAD_URL) if a token would leave this machine unprotected."""
    from escrowmq.wire.addresses import Kind, kind_of

    open_to_all = [address.url for address in addresses if kind_of(address.host) is not Kind.LOOPBACK]
    if open_to_all:
        text = f"the token would travel to {open_to_all[0]} unprotected"
        raise Misuse(Code.BAD_URL, text, "use TLS: write escrows:// in place of escrow://")


def _options(shown: str, query: str) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for option in query.split("&") if query else []:
        name, _, value = option.partition("=")
        if name == "carrier":
            text = f"{shown}: carrier= is gone, everything travels over one connection"
            raise Misuse(Code.BAD_URL, text, "leave it out")
        if value not in _OPTIONS.get(name, ()) or name in chosen:
            raise Misuse(Code.BAD_URL, f"{shown}: {option!r} is no option", "replicas=listed, or none")
        chosen[name] = value
    return chosen


def _open_embedded(url: str, rest: str, options: dict[str, Any]) -> Link:
    if rest.startswith("//"):
        rest = rest[2:]
        if not rest.startswith("/"):
            hint = "use file:FOLDER or file:///ABSOLUTE/FOLDER"
            raise Misuse(Code.BAD_URL, f"{shown_address(url)!r} names a host", hint)
    if not rest or "\0" in rest:
        raise Misuse(Code.BAD_URL, f"{shown_address(url)!r} names no folder")
    if options.pop("read_only", False):
        if options:
            raise Misuse(Code.BAD_ARGUMENT, f"no option {next(iter(options))!r} with read_only")
        from escrowmq.broker.offline import OfflineLink

        return OfflineLink(Path(rest), _query_durable)
    from escrowmq.broker.embedded import open_embedded
    from escrowmq.settings import BrokerSettings

    return open_embedded(Path(rest), BrokerSettings.load(overrides=options))


ASK_SECONDS = 5.0
"""Timeout (s) of each of the two requests for how far a broker's log is durable."""


def _query_durable(url: str) -> Durable:
    """Return how far the log of the broker at ``url`` is durable; a standby forwards the request to the leader. Raises
    EscrowError."""
    from escrowmq.log.offline import Durable
    from escrowmq.wire import HALF_VIEW_NAME, ask
    from escrowmq.wire.actions.brokers import HELLO
    from escrowmq.wire.actions.topics import OFFSETS

    if url.partition(":")[0] not in _SERVED:
        raise Misuse(Code.BAD_URL, f"{shown_address(url)!r} is not the URL of a served broker")
    [link] = links(url, {})
    try:
        offsets = ask(link, OFFSETS({"topic": HALF_VIEW_NAME}), ASK_SECONDS)
        return Durable(offsets["shard"], ask(link, HELLO({}), ASK_SECONDS)["epoch"], offsets["queues"][0]["end"])
    finally:
        link.close()
