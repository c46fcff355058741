"""Tokens against forged forms: a form counts only if it carries what this console wrote into it for this browser.

A browser has a random cookie; a form's token is a keyed hash of it, under a key that this process drew. Cookies of one
host are sent to all of its ports, so that another program on this machine may see the cookie: it cannot make the token
from it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from http.cookies import CookieError, SimpleCookie

_COOKIE = re.compile(r"[0-9a-f]{64}")


class Tokens:
    """The tokens of one console. ``name`` is the cookie's: two consoles of one host do not share it."""

    def __init__(self, port: int) -> None:
        self.name = f"escrowmq-console-{port}"
        self._key = secrets.token_bytes(32)

    def cookie_of(self, header: str) -> str | None:
        """Return the browser's cookie among those that it sent; None if it has none."""
        try:
            found = SimpleCookie(header).get(self.name)
        except CookieError:
            return None
        return found.value if found is not None and _COOKIE.fullmatch(found.value) else None

    def new_cookie(self) -> str:
        """Return a cookie for a browser without one."""
        return secrets.token_hex(32)

    def of(self, cookie: str) -> str:
        """Return the token that this browser's forms carry."""
        return hmac.new(self._key, cookie.encode(), hashlib.sha256).hexdigest()

    def fits(self, cookie: str | None, token: str) -> bool:
        """Return whether a form's token is the browser's."""
        return cookie is not None and hmac.compare_digest(self.of(cookie).encode(), token.encode())
