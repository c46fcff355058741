"""Parses listen addresses of servers and refuses unprotected ones outside the loopback interface."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from escrowmq.errors import Code, Denied, Misuse


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
    """Whether only this machine can reach ``host``. A name is not, whatever it looks like, but for ``localhost``."""
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

    A page of another site can have its own name point to a loopback address, and then read what the server answers. So a server that
    only this machine reaches is asked for by a loopback name, or by an address; one that other machines reach may have any name.
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
