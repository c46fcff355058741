"""Bounds of the console: time, requests, bytes, rows. Each holds before the memory or the time is spent."""

from __future__ import annotations

from dataclasses import dataclass

from escrowmq.message.names import MAX_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings:
    """How a console behaves. ``hosts`` are names under which it may be asked for, besides those of the loopback
    interface."""

    hosts: tuple[str, ...] = ()
    call_timeout: float = 5.0
    """Seconds that one question to the brokers may take."""
    absent_timeout: float = 1.0
    """The same while the last look at the brokers came to nothing."""
    page_timeout: float = 12.0
    """Seconds after which a page says that the broker is slow."""
    sample_seconds: float = 2.0
    """Between two looks at the brokers' numbers."""
    samples: int = 450
    """Looks that are kept: a quarter of an hour."""
    max_requests: int = 32
    """Pages that are being made. Over it: 503."""
    max_forms: int = 16
    """Forms that are being read. Over it the one that has been read for longest ends with 408."""
    max_form_bytes: int = 4 << 20
    """One form. Over it: 413."""
    max_fields: int = 512
    """Fields of one form."""
    form_timeout: float = 30.0
    """Seconds that a browser may take to send a form."""


PAGE_ROWS = 50
"""Rows of a page, of each broker."""
EDITABLE_BYTES = 1 << 20
"""The largest body that the page can edit: a form triples it, at worst."""
MAX_TYPED = MAX_NAME + 1
"""Letters of a typed confirmation."""
