"""Addresses: those at which servers listen, of which unprotected ones outside the loopback interface are refused, and
those that are shown.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from escrowmq.errors import Code, Denied, Misuse

_USER = re.compile(r"(//[^/@:?]*):[^?]*@")
_SECRET = re.compile(r"passw|pwd|passphrase|secret|token|credential|api_?key", re.IGNORECASE)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[V6]:PORT``; Misuse(BAD_URL) otherwise."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise Misuse(
            Code.BAD_URL, f"{text!r} is not HOST:PORT", "for example 127.0.0.1:7700; port 0 means any free one"
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``. A name is not, whatever it looks like, but for
    ``localhost``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(asked: str) -> str:
    """Return the name in a ``Host`` header, without its port, in small letters; empty if it is no name."""
    try:
        return (urlsplit("//" + asked).hostname or "").lower()
    except ValueError:
        return ""


def may_be_asked_as(name: str, listens_at: str) -> bool:
    """Return whether a request for this host name is meant for a server that listens at ``listens_at``.

    A page of another site can have its own name point to a loopback address, and then read what the server answers. So
    a server that only this machine reaches is asked for by a loopback name, or by an address; one that other machines
    reach may have any name.
    """
    if not is_loopback(listens_at) or is_loopback(name) or name == listens_at.lower():
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_address(host: str, insecure: bool) -> None:
    """Denied unless ``host`` is loopback, or ``insecure`` is spelled out."""
    if not insecure and not is_loopback(host):
        raise Denied(
            Code.DENIED,
            f"{host} can be reached from other machines, and there is neither TLS nor a password",
            "listen on 127.0.0.1, or give --insecure on a network that you trust",
        )


def shown(host: str) -> str:
    """``host`` as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def shown_address(address: str) -> str:
    """Return a URL with ``***`` in place of each password: that of its user, and each value of its query whose name
    means a secret.

    >>> shown_address("postgresql://shop:x@db/orders?sslmode=require&sslpassword=y")
    'postgresql://shop:***@db/orders?sslmode=require&sslpassword=***'
    """
    head, question, query = address.partition("?")
    hidden = [_hide(part) for part in re.split(r"([&;])", query)]
    return _USER.sub(r"\1:***@", head) + question + "".join(hidden)


def _hide(part: str) -> str:
    name, equals, _ = part.partition("=")
    return f"{name}=***" if equals and _SECRET.search(name) else part
