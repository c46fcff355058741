"""Tokens: random secrets, of which the rights file has the SHA-256 only."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import NamedTuple

PATTERN = re.compile(r"emq_[A-Za-z0-9]{8}_[A-Za-z0-9_-]{43}")
"""``emq_``, 8 characters that name the token, and 32 random bytes in base64url. Scanners for leaked secrets can search
for it."""
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


class NewToken(NamedTuple):
    """A token that was created just now."""

    text: str
    identity: str
    """Its 8 characters, which are no secret."""
    sha256: str


def new_token() -> NewToken:
    """Create a token from the system's random numbers."""
    identity = "".join(secrets.choice(_LETTERS) for _ in range(8))
    text = f"emq_{identity}_{secrets.token_urlsafe(32)}"
    return NewToken(text, identity, digest(text))


def digest(token: str) -> str:
    """Return the SHA-256 of a token in hexadecimal. No slow hash: a token is random."""
    return hashlib.sha256(token.encode()).hexdigest()
