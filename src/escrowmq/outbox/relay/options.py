"""The options of a relay."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from dataclasses import dataclass, field
from math import inf
from typing import Any

from escrowmq.errors import Code, Misuse

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def _default_name() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40]
    return f"{host or 'relay'}-{os.getpid()}"


def _option(default: Any, least: float, most: float = inf) -> Any:
    return field(default=default, metadata={"least": least, "most": most})


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """Options of a relay; times are seconds. Raises Misuse(BAD_SETTING) that names the option."""

    name: str = field(default_factory=_default_name)
    """The name of the leases of this process; a random part is added."""
    workers: int = _option(2, 1, 64)
    """Threads; each leases lanes of its own, so that one reads while another sends."""
    batch_rows: int = _option(4000, 1, 65_536)
    """Rows of one batch, at most."""
    batch_bytes: int = _option(8 << 20, 1)
    """Bodies of one batch, about: read sizes follow the sizes seen."""
    lease: float = _option(30.0, 0.2)
    """A worker that is silent for this long loses its lanes. Keep it above the target's timeout."""
    poll_interval: float = _option(0.5, 0.001)
    """Longest poll interval of the table, without notifications."""
    redeliveries: int = _option(3, 0)
    """How often a refused message is tried again before it needs an operator."""
    redelivery_interval: float = _option(300.0, 0.001)
    """Between two tries of a refused message; with ``await_callback`` also until a missing callback is a refusal."""
    on_exhausted: str = "hold_key"
    """What a WAITING message does to later ones of its key: ``hold_key`` or (let them) ``pass``."""
    await_callback: bool = False
    """Keep sent rows until the consumer's callback; send again those without."""
    keep: float = _option(0.0, 0)
    """How long sent (with ``await_callback``: done) rows stay in the table; 0: they are deleted at once."""
    purge_interval: float = _option(5.0, 0.001)
    """Between two purges of rows that were kept."""
    backoff: float = _option(0.2, 0.001)
    """First pause after the target or the database was away; doubles each time, with jitter."""
    backoff_max: float = _option(30.0, 0.001)
    """The longest such pause."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if not f.metadata:
                continue
            least, most, value = f.metadata["least"], f.metadata["most"], getattr(self, f.name)
            kind, types = ("a whole number", int) if isinstance(f.default, int) else ("seconds", int | float)
            if isinstance(value, bool) or not isinstance(value, types) or not least <= value <= most:
                raise Misuse(Code.BAD_SETTING, f"{f.name} = {value!r:.80}", f"{kind}, {least:g} to {most:g}")
        if not isinstance(self.name, str) or _NAME.fullmatch(self.name) is None:
            raise Misuse(Code.BAD_SETTING, f"name = {self.name!r:.80}", "1 to 64 of A-Z a-z 0-9 . _ -")
        if self.on_exhausted not in ("hold_key", "pass"):
            raise Misuse(Code.BAD_SETTING, f"on_exhausted = {self.on_exhausted!r}", "hold_key or pass")
