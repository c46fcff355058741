"""Access keys of RocketMQ clients: ``MQv2-HMAC-SHA1`` signatures, and the token that each key stands for.

A signature can only be checked with the secret itself, so secrets are kept in a file of their own, which the gateway
alone can read (TOML, mode 0600)::

    [keys.AK_SHOP]
    secret = "..."            # the client's secret key
    token = "emq_..."         # the principal of the rights file, by its token; or token_file = "FILE"

A client signs the time of its request (header ``x-mq-date-time``). Its clock is not checked: the Python client writes
local time as UTC.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from escrowmq.errors import Code, Misuse, error

ALGORITHM = "MQv2-HMAC-SHA1"


@dataclass(frozen=True, slots=True)
class _Key:
    secret: bytes = field(repr=False)
    token: str = field(repr=False)


class AccessKeys:
    """The access keys of a file."""

    def __init__(self, keys: Mapping[str, _Key]) -> None:
        self._keys = keys

    @classmethod
    def read(cls, path: Path) -> AccessKeys:
        """Read the file. Raises Misuse(BAD_SETTING), also if others than its owner can read it."""
        try:
            with path.open("rb") as file:
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                    raise Misuse(Code.BAD_SETTING, f"others can read {path}", f"chmod 600 {path}")
                content = tomllib.load(file)
        except (OSError, ValueError) as problem:  # the text of a TOML error does not quote the file
            raise Misuse(Code.BAD_SETTING, f"{path}: {problem}") from None
        tables = content.get("keys")
        if not isinstance(tables, dict) or set(content) != {"keys"}:
            raise Misuse(Code.BAD_SETTING, f"{path}: tables are [keys.NAME], with secret and token")
        return cls({name: _read_key(path, name, table) for name, table in tables.items()})

    def bearer_of(self, headers: Mapping[str, Any]) -> str:
        """Return the ``Authorization`` header with the token of a request's key, "" if it has no signature. Raises
        Denied(UNAUTHENTICATED) for an unknown key or a wrong signature."""
        given = headers.get("authorization", "")
        scheme, _, rest = given.partition(" ")
        fields = dict(part.strip().partition("=")[::2] for part in rest.split(",") if part)
        name = fields.get("Credential", "").partition("/")[0]
        if not given or (scheme == ALGORITHM and not name):
            return ""
        key = self._keys.get(name)
        secret = key.secret if key is not None else b"\0"
        expected = hmac.new(secret, str(headers.get("x-mq-date-time", "")).encode(), hashlib.sha1).hexdigest()
        matches = hmac.compare_digest(expected.encode(), fields.get("Signature", "").lower().encode())
        if scheme != ALGORITHM or key is None or not matches:
            raise error(Code.UNAUTHENTICATED, "the access key is unknown, or its signature is wrong")
        return f"Bearer {key.token}"


def _read_key(path: Path, name: str, table: Any) -> _Key:
    where = f"{path}: [keys.{name}]"
    if not isinstance(table, dict) or not set(table) <= {"secret", "token", "token_file"}:
        raise Misuse(Code.BAD_SETTING, f"{where} has secret, and token or token_file")
    secret, token, file = (table.get(part) for part in ("secret", "token", "token_file"))
    if file is not None and token is None:
        try:
            token = (path.parent / str(file)).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeError) as problem:
            raise Misuse(Code.BAD_SETTING, f"{where} token_file: {problem}") from None
    if (
        not isinstance(secret, str)
        or not secret
        or not isinstance(token, str)
        or not token
        or (file and table.get("token"))
    ):
        raise Misuse(Code.BAD_SETTING, f"{where} needs secret, and token or token_file")
    return _Key(secret.encode(), token)
