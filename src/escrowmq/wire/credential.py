"""The token of a client: given as it is, or read from a file each time it connects."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from escrowmq.errors import Code, Misuse

TOKEN, TOKEN_FILE = "ESCROWMQ_TOKEN", "ESCROWMQ_TOKEN_FILE"
"""Environment variables."""


def _variable(name: str, environment: Mapping[str, str] | None) -> str | None:
    return (os.environ if environment is None else environment).get(name) or None


class Credential:
    """Provides the token for a greeting. A file is read at each connection, so a new token needs no restart. Neither
    ``repr`` nor pickling shows a token."""

    __slots__ = ("_file", "_token")

    def __init__(self, token: str | None = None, file: Path | None = None) -> None:
        self._token = token
        self._file = file

    @classmethod
    def choose(cls, token: object, file: object, environment: Mapping[str, str] | None = None) -> Credential:
        """Return the credential of the options ``token`` and ``token_file``, or else of the environment; the token ""
        stands for none. Raises Misuse(BAD_ARGUMENT)."""
        if token is not None and not isinstance(token, str):
            raise Misuse(Code.BAD_ARGUMENT, f"token= is a {type(token).__name__}, not a text")
        if file is not None and not isinstance(file, str | Path):
            raise Misuse(Code.BAD_ARGUMENT, f"token_file= is a {type(file).__name__}, not a path")
        if token is None and file is None:
            token, file = _variable(TOKEN, environment), _variable(TOKEN_FILE, environment)
        if token and file is not None:
            token = None  # a traceback may show local variables
            raise Misuse(Code.BAD_ARGUMENT, "a token and a token file", "give one of them")
        return cls(token or None, Path(file) if file is not None else None)

    @property
    def is_set(self) -> bool:
        """Return whether there is a token or a file."""
        return self._token is not None or self._file is not None

    def read(self) -> str | None:
        """Return the token; None without one. Raises Misuse(BAD_SETTING) if the file cannot be read or is empty."""
        if self._file is None:
            return self._token
        try:
            token = self._file.read_text().strip()
        except (OSError, UnicodeDecodeError) as problem:
            raise Misuse(Code.BAD_SETTING, f"the token file {self._file} cannot be read: {problem}") from None
        if not token:
            raise Misuse(Code.BAD_SETTING, f"the token file {self._file} is empty")
        return token

    def __repr__(self) -> str:
        return f"Credential({'token=***' if self._token is not None else f'file={self._file}'})"

    def __reduce__(self) -> str | tuple[object, ...]:
        if self._token is not None:
            raise Misuse(Code.BAD_ARGUMENT, "a token is not pickled", "use token_file=, which each process reads")
        return (Credential, (None, self._file))
