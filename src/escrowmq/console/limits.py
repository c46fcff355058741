"""Limits of the console: time, requests, bytes, rows. Each is checked before the memory or time is used."""

from __future__ import annotations

from dataclasses import dataclass

from escrowmq.message.names import MAX_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings:
    """The settings of a console. ``hosts`` are accepted host names besides those of the loopback interface."""

    hosts: tuple[str, ...] = ()
    call_timeout: float = 5.0
    """Timeout (s) of one request to the brokers."""
    absent_timeout: float = 1.0
    """The same while the last sample got no response."""
    page_timeout: float = 12.0
    """Timeout (s) of a page."""
    sample_seconds: float = 2.0
    """Interval (s) between samples of the brokers' numbers."""
    samples: int = 450
    """Number of samples kept: a quarter of an hour."""
    max_requests: int = 32
    """Concurrent pages. Above: 503."""
    max_forms: int = 16
    """Forms being read concurrently. Above: the oldest one ends with 408."""
    max_form_bytes: int = 4 << 20
    """Size of one form. Above: 413."""
    max_fields: int = 512
    """Fields of one form."""
    form_timeout: float = 30.0
    """Timeout (s) for a browser to send a form."""
    max_sessions: int = 100
    """Sessions. Above: the one that is idle longest ends."""
    session_seconds: float = 12 * 3600.0
    """Time (s) after which a session ends."""
    idle_seconds: float = 1800.0
    """Time (s) without a page after which a session ends, unless it runs a plan."""


PAGE_ROWS = 50
"""Rows per page and broker."""
EDITABLE_BYTES = 1 << 20
"""The largest body that a page can edit: a form may triple its size."""
MAX_TYPED = MAX_NAME + 1
"""Maximum length of a typed confirmation."""
