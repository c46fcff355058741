"""Addresses of servers (unprotected ones are restricted to loopback), and their display without secrets."""

from __future__ import annotations

import ipaddress
import logging
import re
from contextlib import suppress
from urllib.parse import unquote, urlsplit

from escrowmq.errors import Code, Denied, Misuse
from escrowmq.platform.logs import tell

_USER = re.compile(r"(//[^/@:?\[]*):(?:[^?]*|(?!\d+(?:[/?|,]))[^@]*)@")
"""The password of a user may contain a ``?``; an ``@`` in a query after HOST:PORT ends no password."""
_SECRET = re.compile(r"passw|pwd|passphrase|secret|token|credential|api_?key", re.IGNORECASE)


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT`` or ``[V6]:PORT``. Raises Misuse(BAD_URL) otherwise."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        hint = "for example 127.0.0.1:7700; port 0 means any free one"
        raise Misuse(Code.BAD_URL, f"{text!r} is not HOST:PORT", hint)
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Decide whether only this machine can reach ``host``. Of names only ``localhost`` counts."""
    with suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def host_name(header: str) -> str:
    """Return the name in a ``Host`` header, without its port, in lower case; empty if it is invalid."""
    with suppress(ValueError):
        return (urlsplit("//" + header).hostname or "").lower()
    return ""


def accepts_host_name(name: str, listens_at: str) -> bool:
    """Return whether a request for this host name is valid for a server that listens at ``listens_at``. This prevents
    DNS rebinding: another site can point its own name to a loopback address, and let its page read the responses. So a
    server on a loopback address accepts only loopback names and addresses; other servers accept any name."""
    if not is_loopback(listens_at) or is_loopback(name) or name == listens_at.lower():
        return True
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def is_exposed(host: str, *, tls: bool, rights: bool) -> bool:
    """Return whether other machines reach ``host`` without TLS or without access rights."""
    return not (is_loopback(host) or (tls and rights))


def check_address(host: str, insecure: bool, *, tls: bool = False, rights: bool = False) -> None:
    """Raise Denied if ``host`` is exposed. With ``insecure`` this is only logged, at each start."""
    if not is_exposed(host, tls=tls, rights=rights):
        return
    missing = " and ".join(name for name, there in (("TLS", tls), ("access rights", rights)) if not there)
    sentence = f"{host} can be reached from other machines, and there is no {missing}"
    if insecure:
        tell(logging.WARNING, "insecure", f"{sentence}: --insecure permits that", address=host)
        return
    raise Denied(
        Code.DENIED,
        sentence,
        "listen on 127.0.0.1, give --tls-cert, --tls-key and --rights, or --insecure on a network that you trust",
    )


def shown(host: str) -> str:
    """Return ``host`` in URL form."""
    return f"[{host}]" if ":" in host else host


def shown_address(address: str) -> str:
    """Return a URL with ``***`` for each password: that of its user, and query values with secret names.

    >>> shown_address("postgresql://shop:x@db/orders?sslmode=require&sslpassword=y")
    'postgresql://shop:***@db/orders?sslmode=require&sslpassword=***'
    """
    head, question, query = _USER.sub(r"\1:***@", address).partition("?")
    hidden = [_hide_secret(part) for part in re.split(r"([&;])", query)]
    return head + question + "".join(hidden)


def is_secret(name: str) -> bool:
    """Return whether the value of this name in a URL's query is hidden."""
    return _SECRET.search(unquote(name)) is not None


def _hide_secret(part: str) -> str:
    name, equals, _ = part.partition("=")
    return f"{name}=***" if equals and is_secret(name) else part
