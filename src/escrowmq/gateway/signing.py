"""Signatures of check-backs, following Standard Webhooks: HMAC-SHA256 over ``id.timestamp.body``.

A request carries ``webhook-id``, ``webhook-timestamp`` (seconds since 1970) and ``webhook-signature`` (``v1,`` and
base64; several, separated by spaces, while a secret is being changed). The response is signed too, over
``id.answer.timestamp.body``, because it *decides*: it must come from a holder of the secret and belong to this request,
even where TLS ends at a proxy or is absent. Uses only the standard library, so that any receiver can import it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from escrowmq.errors import Code, Denied, Misuse

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
TOLERANCE = 300.0
"""Allowed deviation (s) of a timestamp, in either direction."""
LEAST_SECRET_BYTES = 16
_PREFIX = "whsec_"
_ANSWER = ".answer"

Secret = str | bytes
Secrets = Secret | Sequence[Secret]


def secret_keys(secret: Secrets) -> list[bytes]:
    """Return the HMAC keys of ``secret``; the first one signs. Bytes are used as they are. A text is one or several
    secrets separated by blanks: ``whsec_`` and base64 as in Standard Webhooks, else its UTF-8 bytes. Raises
    Misuse(BAD_SETTING) for a key of fewer than 16 bytes."""
    if isinstance(secret, bytes):
        keys = [secret]
    elif isinstance(secret, str):
        keys = [_key(word) for word in secret.split()]
    else:
        keys = [key for one in secret for key in secret_keys(one)]
    if not keys or any(len(key) < LEAST_SECRET_BYTES for key in keys):
        raise Misuse(
            Code.BAD_SETTING,
            f"a secret of check-backs has fewer than {LEAST_SECRET_BYTES} bytes",
            "python -c 'import base64, os; print(\"whsec_\" + base64.b64encode(os.urandom(32)).decode())'",
        )
    return keys


def _key(word: str) -> bytes:
    if not word.startswith(_PREFIX):
        return word.encode()
    try:
        return base64.b64decode(word.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        raise Misuse(Code.BAD_SETTING, "a secret of check-backs begins with whsec_ and is not base64") from None


def sign(secret: Secrets, identity: str, body: bytes, now: float | None = None) -> dict[str, str]:
    """Return the three headers for a request ``body`` (the bytes sent), signed with every key of ``secret``."""
    stamp = str(int(time.time() if now is None else now))
    made = " ".join(f"v1,{_mac(key, identity, stamp, body)}" for key in secret_keys(secret))
    return {ID: identity, TIMESTAMP: stamp, SIGNATURE: made}


def sign_answer(secret: Secrets, question: Mapping[str, str], body: bytes, now: float | None = None) -> dict[str, str]:
    """Return the headers for a response ``body`` to the request whose headers are ``question``."""
    identity = _header(question, ID)
    return {**sign(secret, identity + _ANSWER, body, now), ID: identity}


class ReplayGuard:
    """A memory of the ids of verified requests for as long as their timestamps are accepted. Thread-safe, bounded."""

    def __init__(self, most: int = 100_000) -> None:
        self._most = most
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def first_time(self, identity: str, now: float, keep: float) -> bool:
        """Store an id until ``now + keep``. Returns False if it is stored already."""
        with self._lock:
            while self._seen and (len(self._seen) > self._most or next(iter(self._seen.values())) <= now):
                self._seen.popitem(last=False)
            if identity in self._seen:
                return False
            self._seen[identity] = now + keep
            return True


def verify(
    secret: Secrets,
    headers: Mapping[str, str],
    body: bytes,
    *,
    tolerance: float = TOLERANCE,
    now: float | None = None,
    guard: ReplayGuard | None = None,
) -> str:
    """Verify that ``body`` is a request from a holder of ``secret``. Returns its id. ``headers`` are the request's
    (names in any case), ``body`` its bytes as received, before any parsing. ``tolerance`` is the allowed deviation of
    the timestamp in seconds; with ``guard`` an id is accepted once. Raises Denied: respond with 401 and do nothing."""
    moment = time.time() if now is None else now
    identity = _verify(secret, headers, body, "", tolerance, moment)
    if guard is not None and not guard.first_time(identity, moment, 2 * tolerance):
        raise Denied(Code.DENIED, "this question came before", "")
    return identity


def verify_answer(
    secret: Secrets, identity: str, headers: Mapping[str, str], body: bytes, now: float | None = None
) -> None:
    """Verify that ``body`` is the response of a holder of ``secret`` to the request ``identity``. Raises Denied."""
    if _header(headers, ID) != identity:
        raise Denied(Code.DENIED, "the answer is to another question", "")
    _verify(secret, headers, body, _ANSWER, TOLERANCE, time.time() if now is None else now)


def _verify(
    secret: Secrets, headers: Mapping[str, str], body: bytes, purpose: str, tolerance: float, moment: float
) -> str:
    identity, stamp, given = (_header(headers, name) for name in (ID, TIMESTAMP, SIGNATURE))
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) < 16) or abs(moment - int(stamp)) > tolerance:
        raise Denied(Code.DENIED, f"the timestamp is more than {tolerance:g} s off, or none", "are the clocks right?")
    offered = [word[3:].encode() for word in given.split()[:8] if word.startswith("v1,")]
    wanted = [_mac(key, identity + purpose, stamp, body).encode() for key in secret_keys(secret)]
    if not any(hmac.compare_digest(one, other) for one in offered for other in wanted):
        raise Denied(Code.DENIED, "the signature is wrong", "do both sides have the same secret?")
    return identity


def _mac(key: bytes, identity: str, stamp: str, body: bytes) -> str:
    content = f"{identity}.{stamp}.".encode() + body
    return base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()


def _header(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name)
    if value is None:
        value = next((text for given, text in headers.items() if given.lower() == name), None)
    if not value or len(value) > 2000:
        raise Denied(Code.DENIED, f"there is no header {name}", "")
    return value
