"""Tokens against forged forms: a form is accepted only with the token that this console wrote into it for this browser.
A browser has a random cookie, which a session renews; a form's token is a keyed hash of it, with a key drawn by this
process. Cookies of a host are sent to all its ports, so another program on this machine may see the cookie, but cannot
compute the token."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from http.cookies import CookieError, SimpleCookie

_COOKIE = re.compile(r"[0-9a-f]{64}")


class Tokens:
    """The tokens of one console. ``name`` is the cookie's: two consoles on one host do not share it. ``secure``: it is
    sent over TLS only, and no other host of the domain can set it."""

    def __init__(self, port: int, *, secure: bool = False) -> None:
        self.name = f"{'__Host-' * secure}escrowmq-console-{port}"
        self.attributes = "Path=/; HttpOnly; SameSite=Strict" + "; Secure" * secure
        self._key = secrets.token_bytes(32)

    def cookie_of(self, header: str) -> str | None:
        """Return the browser's cookie from the header; None if it has none."""
        try:
            found = SimpleCookie(header).get(self.name)
        except CookieError:
            return None
        return found.value if found is not None and _COOKIE.fullmatch(found.value) else None

    def new_cookie(self) -> str:
        """Return a cookie for a browser without one."""
        return secrets.token_hex(32)

    def of(self, cookie: str) -> str:
        """Return the token for this browser's forms."""
        return hmac.new(self._key, cookie.encode(), hashlib.sha256).hexdigest()

    def fits(self, cookie: str | None, token: str) -> bool:
        """Decide whether a form's token belongs to the browser's cookie."""
        return cookie is not None and hmac.compare_digest(self.of(cookie).encode(), token.encode())
