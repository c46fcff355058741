"""Which of two carriers a request takes, so that requests of one kind keep their order.

Requests of one kind are never under way on both carriers at once: two carriers have no common order. One that must take the
other carrier is held, and with it everything of its kind that comes later, until those before it were answered. When one of
them is lost with its carrier, those held fail too, as surely not sent: who sends again sends all of them, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from typing import Any

import pyarrow as pa

from escrowmq.errors import EscrowError
from escrowmq.wire import Exchange, ExchangeOptions, Parcel

SWITCH_AFTER = 4
"""So many small requests ride along with a large one over Flight before the next waits until it can go lean again."""


class Carrier(Enum):
    """What a request may travel over."""

    LEAN = "lean"
    FLIGHT = "flight"


class Request:
    """One request, a parcel or a batch, on its way over either carrier. ``done`` takes what came of it."""

    __slots__ = (
        "batch",
        "carrier",
        "connection",
        "done",
        "expiry",
        "fits",
        "flown",
        "frame",
        "key",
        "kind",
        "number",
        "options",
        "over",
        "parcel",
        "withdrawn",
    )

    def __init__(
        self,
        kind: Exchange,
        parcel: Parcel | None,
        batch: pa.RecordBatch | None,
        options: ExchangeOptions,
        done: Callable[[Any], None],
    ) -> None:
        self.kind = kind
        self.key = (kind, options.get("member") if kind is Exchange.RECEIVE else None)
        """What keeps its order: its kind, and of receives their member."""
        self.parcel = parcel
        self.batch = batch
        self.options = options
        self.done = done
        self.fits = True  # whether the lean carrier may take it
        self.frame: bytearray | None = None  # for the lean carrier
        self.carrier = Carrier.FLIGHT
        self.connection: Any = None  # the lean connection that takes it
        self.number = 0  # by which that knows it
        self.expiry = 0.0  # when its answer is overdue there, in monotonic seconds
        self.flown: Future[pa.RecordBatch] | None = None  # a receive over Flight
        self.withdrawn = False
        self.over = False


class Way:
    """The requests of one kind; of receives, those of one member. Its link's lock guards it."""

    __slots__ = ("connection", "flight", "held", "lean", "pumping", "small")

    def __init__(self) -> None:
        self.held: deque[Request] = deque()
        self.lean = self.flight = 0  # under way on that carrier
        self.connection: object = None  # the lean connection that was taken last
        self.small = SWITCH_AFTER  # small requests since the last that was too large for the lean carrier
        self.pumping = False  # somebody is sending what was held

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, or waits."""
        return not (self.held or self.lean or self.flight or self.pumping)

    def choose(self, request: Request, lean: object | None) -> Carrier | None:
        """The carrier of the next request, with this lean connection or none; None: it has to wait."""
        if self.lean and not (request.fits and lean is self.connection):
            return None
        if not request.fits:
            self.small = 0
            return Carrier.FLIGHT
        if lean is None:
            return Carrier.FLIGHT
        if not self.flight:
            return Carrier.LEAN
        if self.small < SWITCH_AFTER:
            self.small += 1
            return Carrier.FLIGHT
        return None

    def took(self, carrier: Carrier, lean: object | None) -> None:
        """A request takes this carrier."""
        if carrier is Carrier.LEAN:
            self.lean += 1
            self.connection = lean
        else:
            self.flight += 1

    def ended(self, carrier: Carrier) -> None:
        """A request that had taken this carrier was answered."""
        if carrier is Carrier.LEAN:
            self.lean -= 1
        else:
            self.flight -= 1

    def dropped(self) -> list[Request]:
        """What was held, which fails with a request before it."""
        dropped = list(self.held)
        self.held.clear()
        return dropped


class Pending(Future[pa.RecordBatch]):
    """The future of an exchange. Cancelling withdraws a receive, which is then answered, or fails; nothing else can be taken back."""

    withdraw: Callable[[], None] | None = None

    def cancel(self) -> bool:
        """Withdraw; False, because what the broker gave meanwhile must still arrive."""
        if self.withdraw is not None and not self.done():
            self.withdraw()
        return False

    def finish(self, answer: pa.RecordBatch | EscrowError) -> None:
        """The answer came."""
        if isinstance(answer, EscrowError):
            self.set_exception(answer)
        else:
            self.set_result(answer)
