"""A link on which a share of the confirms is lost, as a datagram can be: the broker never sees them, and nobody is
told.
"""

import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import pyarrow as pa

from escrowmq.errors import Code, Unknown
from escrowmq.wire import BatchStream, CheckStream, Exchange, ExchangeOptions, Json, Link, Parcel, ReadRequest


class LossyLink:
    """``link``, but that it loses ``share`` of the requests that end transactions. Each transaction whose end was lost
    is a line of ``lost``."""

    def __init__(self, link: Link, share: float, lost: Path) -> None:
        self._link = link
        self._share = share
        self._lost = lost
        self._random = random.Random()

    @property
    def address(self) -> str:
        return self._link.address

    def parcel(self, parcel: Parcel, done: Callable[[object], None]) -> None:
        if parcel.kind is not Exchange.END or self._random.random() >= self._share:
            return self._link.parcel(parcel, done)
        with self._lost.open("a") as file:
            file.writelines(f"{transaction.hex()}\n" for transaction, _ in parcel.rows)
        done(Unknown(Code.TIMED_OUT, "lost on the way"))

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        return self._link.exchange(kind, batch, options)

    def action(self, name: str, request: Mapping[str, object], timeout: float) -> Json:
        return self._link.action(name, request, timeout)

    def read(self, request: ReadRequest) -> BatchStream:
        return self._link.read(request)

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> CheckStream:
        return self._link.watch(session, on_checks)

    def close(self) -> None:
        self._link.close()
