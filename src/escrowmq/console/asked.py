"""The request for a page, and its four kinds of answer: a page, a part of it, a way elsewhere, a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from escrowmq.errors import Code, error

MAX_TEXT = 4096
"""Letters of one value in an address."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: the values of its address (``places`` of its path, ``query`` behind it) and of its form."""

    path: str
    places: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def text(self, name: str) -> str | None:
        """Return a value of the address, without the blanks around it; None for none. Raises Misuse(BAD_ARGUMENT)
        if it is too long."""
        value = self.query.get(name, "").strip()
        if len(value) > MAX_TEXT:
            raise error(Code.BAD_ARGUMENT, f"{name} has more than {MAX_TEXT:,} letters")
        return value or None

    def number(self, name: str, default: int) -> int:
        """Return a whole number of the address, not negative. Raises Misuse(BAD_ARGUMENT)."""
        return _number(name, self.text(name), default)

    def one(self, name: str) -> str:
        """Return a value of the form; empty for none."""
        return (self.form.get(name) or ("",))[0]

    def said(self, name: str) -> str | None:
        """Return a value of the form without the blanks around it; None for none."""
        return self.one(name).strip() or None

    def counted(self, name: str, default: int) -> int:
        """Return a whole number of the form, not negative. Raises Misuse(BAD_ARGUMENT)."""
        return _number(name, self.said(name), default)


def _number(name: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise error(Code.BAD_ARGUMENT, f"{name} is {text!r:.60}, and has to be a whole number")
    return int(text)


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its template and what stands in it. ``live``: seconds after which it looks again; 0: never."""

    template: str
    title: str
    values: Mapping[str, Any]
    room: str = ""
    """Which entry of the menu it belongs to."""
    live: int = 0
    status: int = 200


@dataclass(frozen=True, slots=True)
class Redirect:
    """After a form: the page to look at (a path of this console)."""

    to: str


@dataclass(frozen=True, slots=True)
class Download:
    """A file for the person's disk; it is never shown by the browser."""

    name: str
    content: bytes


Answer = Page | Redirect | Download
