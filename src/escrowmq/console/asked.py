"""The parameters of a page request, and its four kinds of response: a page, a redirect, a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from escrowmq.errors import Code, error

MAX_TEXT = 4096
"""Maximum length of one value in an address."""


@dataclass(frozen=True, slots=True)
class Params:
    """Parameters of one request: the values of its address (``places`` in its path, ``query``) and of its form."""

    path: str
    places: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def text(self, name: str) -> str | None:
        """Return a query value without surrounding blanks; None if empty. Raises Misuse(BAD_ARGUMENT) if too long."""
        value = self.query.get(name, "").strip()
        if len(value) > MAX_TEXT:
            raise error(Code.BAD_ARGUMENT, f"{name} has more than {MAX_TEXT:,} letters")
        return value or None

    def number(self, name: str, default: int) -> int:
        """Return a query value as a number, 0 or more. Raises Misuse(BAD_ARGUMENT)."""
        return _parse_number(name, self.text(name), default)

    def form_value(self, name: str) -> str:
        """Return a form value; empty if absent."""
        return (self.form.get(name) or ("",))[0]

    def form_text(self, name: str) -> str | None:
        """Return a form value without surrounding blanks; None if it is empty."""
        return self.form_value(name).strip() or None

    def form_number(self, name: str, default: int) -> int:
        """Return a form value as a number, 0 or more. Raises Misuse(BAD_ARGUMENT)."""
        return _parse_number(name, self.form_text(name), default)


def _parse_number(name: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise error(Code.BAD_ARGUMENT, f"{name} is {text!r:.60}, and has to be a whole number")
    return int(text)


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its template and values. ``live``: refresh interval in seconds; 0: never."""

    template: str
    title: str
    values: Mapping[str, Any]
    room: str = ""
    """Its entry in the menu."""
    live: int = 0
    status: int = 200


@dataclass(frozen=True, slots=True)
class Redirect:
    """A redirect after a form, to a path of this console."""

    to: str


@dataclass(frozen=True, slots=True)
class Download:
    """A file to download; the browser never displays it."""

    name: str
    content: bytes


Answer = Page | Redirect | Download
