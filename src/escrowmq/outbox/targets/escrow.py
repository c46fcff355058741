"""EscrowMQ as a target.

1. The broker of a message follows from its key, or without one from its id: a retry never moves to another broker,
   where it would be a second message (given the same list of brokers, in the same order).
2. The broker answers row by row, and a later row of a key may be fine where an earlier one is refused. So rows known to
   be refused are not sent, nor rows behind them; and rows of a topic that was never accepted before go one per key at
   a time, until it was.
3. A request that failed as a whole failed for all its rows. Requests of one call to one broker are sequential, so that
   a key's rows are never in two at once.
4. A broker that is away gets a pause; its rows are answered DISCONNECTED at once, and the others' continue.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.client.bus import Bus
from escrowmq.client.links.router import broker_of
from escrowmq.client.producing.outgoing import split
from escrowmq.connecting import connect
from escrowmq.errors import Code, EscrowError, Misuse, Rejected, error
from escrowmq.message.ids import records
from escrowmq.message.limits import Limits, refusals
from escrowmq.message.names import is_name
from escrowmq.outbox.targets.rows import check_schema, hold_back, number_keys
from escrowmq.outbox.targets.seam import Codes, Promise
from escrowmq.platform.backoff import Backoff
from escrowmq.schemas import MESSAGE_ID_DTYPE
from escrowmq.wire import ask
from escrowmq.wire.actions.brokers import HELLO

_log = logging.getLogger(__name__)
GROUP = "outbox"
FIRST_PAUSE, LAST_PAUSE = 0.2, 10.0
"""Back-off (s) of a broker that is away."""
SILENCE = 1.0
"""Timeout (s) of a probe of a broker that was away; the others' rows wait that long."""

Places = npt.NDArray[np.int64]


class EscrowTarget:
    """One or several EscrowMQ brokers: ``escrow://HOST:PORT[,HOST:PORT...]`` (or ``file:FOLDER``).

    ``group`` is the producer group, ``timeout`` the seconds of a request until it is Unknown. Raises Misuse(BAD_URL).
    """

    def __init__(self, url: str, *, group: str = GROUP, timeout: float = 5.0) -> None:
        self._over([_Broker(connect(each), each, group, timeout) for each in _single_urls(url)])

    @classmethod
    def over(cls, buses: Sequence[Bus], *, group: str = GROUP, timeout: float = 5.0) -> EscrowTarget:
        """Build a target over one bus to each broker, in the order of the list. :meth:`close` closes them."""
        target = cls.__new__(cls)
        target._over([_Broker(bus, bus.router.links[0].address, group, timeout) for bus in buses])
        return target

    def _over(self, brokers: list[_Broker]) -> None:
        self._brokers = brokers
        self._pool = ThreadPoolExecutor(len(brokers), "escrowmq-target") if len(brokers) > 1 else None

    @property
    def promise(self) -> Promise:
        durable = (
            "written and synced in the broker's log; the same id sent again within dedup_window (1 h) makes no copy"
        )
        smallest = min(broker.limits.max_body_bytes for broker in self._brokers)
        return Promise("EscrowMQ", durable, deduplicates=True, delays=True, max_body_bytes=smallest)

    def send(self, batch: pa.RecordBatch) -> Codes:
        check_schema(batch)
        if self._pool is None:
            return self._brokers[0].send(batch)
        where = self._where(batch)
        codes = np.full(batch.num_rows, Code.DISCONNECTED, np.uint8)
        parts = [(self._brokers[number], where == number) for number in np.unique(where).tolist()]
        sends = [(rows, self._pool.submit(broker.send, batch.filter(pa.array(rows)))) for broker, rows in parts]
        for rows, sent in sends:
            codes[rows] = sent.result()
        return codes

    def partly_there(self) -> bool:
        """Probe the brokers; return whether one answers. Always False with a single broker. If True, the rows of the
        others must not block its rows."""
        return len(self._brokers) > 1 and any(not broker.meet(anew=True) for broker in self._brokers)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        for broker in self._brokers:
            broker.close()

    def _where(self, batch: pa.RecordBatch) -> Places:
        """Return the number of the broker that each row belongs to: by its key, without one by its id."""
        count = len(self._brokers)
        keys = pc.dictionary_encode(batch.column("key"))
        by_key = np.array([*(broker_of(key, count) for key in keys.dictionary.to_pylist()), 0], np.int64)
        codes = pc.fill_null(keys.indices, len(by_key) - 1).to_numpy(zero_copy_only=False)
        ids = batch.column("message_id")
        by_id = records(ids, MESSAGE_ID_DTYPE)["sequence"] % np.uint64(count)
        keyless = batch.column("key").is_null().to_numpy(zero_copy_only=False)
        return np.asarray(np.where(keyless, by_id.astype(np.int64), by_key[codes]))


class _Broker:
    """One broker. Used by one thread at a time."""

    def __init__(self, bus: Bus, url: str, group: str, timeout: float) -> None:
        self._bus, self._url, self._timeout = bus, url, timeout
        self._producer = bus.producer(group, timeout=timeout)
        self.limits = Limits()
        self._met = False
        self._good: set[str] = set()
        self._backoff = Backoff(FIRST_PAUSE, LAST_PAUSE)

    def send(self, batch: pa.RecordBatch) -> Codes:
        if problem := self.meet():
            return np.full(batch.num_rows, problem, np.uint8)
        codes = _find_refused(batch, self.limits)
        if codes.any() or not self._all_proven(batch):
            return self._carefully(batch, codes)
        return self._send(batch)

    def meet(self, *, anew: bool = False) -> Code:
        """Request the broker's limits, unless they are known; ``anew``: always. Returns OK, or why it does not answer
        (DISCONNECTED without a request during the pause after a failure). Raises Misuse if it rejects the request."""
        if self._backoff.left():
            return Code.DISCONNECTED
        if anew or not self._met:
            try:
                patience = min(self._timeout, SILENCE) if self._backoff.failing else self._timeout
                answer = ask(self._bus.router.links[0], HELLO({}), patience)
            except EscrowError as problem:
                return self._on_failure(problem)
            self.limits, self._met = Limits.of(answer["limits"]), True
        return Code.OK

    def close(self) -> None:
        self._bus.close()

    def _all_proven(self, batch: pa.RecordBatch) -> bool:
        return self._good.issuperset(pc.unique(batch.column("topic")).to_pylist())

    def _carefully(self, batch: pa.RecordBatch, codes: Codes) -> Codes:
        """Send a batch, but nothing behind a refused row of its key, and rows of unproven topics one per key at a time.
        Returns one code per row; those not OK in ``codes`` are refused already."""
        keys = number_keys(batch.column("key"))
        hold_back(codes, keys)
        left = codes == Code.OK
        while left.any():
            rest = np.flatnonzero(left)
            some = batch.take(pa.array(rest))
            if self._all_proven(some):
                codes[rest] = self._send(some)
                break
            _, firsts = np.unique(keys[rest], return_index=True)
            now = rest[np.sort(firsts)]
            codes[now] = self._send(batch.take(pa.array(now)))
            left[now] = False
            hold_back(codes, keys)
            left &= codes == Code.OK
        return codes

    def _send(self, batch: pa.RecordBatch) -> Codes:
        codes = np.full(batch.num_rows, Code.QUEUE_FULL, np.uint8)
        start = 0
        for piece in split(batch, self.limits):
            try:
                found = self._producer.send_batch(piece).codes
                if (found == Code.GROUP_KIND).any():
                    raise error(Code.GROUP_KIND)  # of the whole session, whatever the row
                codes[start : start + piece.num_rows] = found
            except EscrowError as problem:
                codes[start:] = self._on_failure(problem)
                return codes
            start += piece.num_rows
        if self._backoff.worked():
            _log.info("%s is back", self._url)
        taken = batch.column("topic").filter(pa.array(codes == Code.OK))
        self._good.update(pc.unique(taken).to_pylist())
        return codes

    def _on_failure(self, problem: EscrowError) -> Code:
        if isinstance(problem, Misuse):
            raise problem
        if isinstance(problem, Rejected):
            text = f"the broker refuses everything from this relay: {problem.message}"
            raise Misuse(Code.BAD_ARGUMENT, text, problem.hint) from problem
        self._met = False  # the next try begins with a small request
        log = _log.debug if self._backoff.failing else _log.warning
        pause = self._backoff.failed()
        log("%s: %s; its rows wait, it is tried again in %.1f s", self._url, problem, pause)
        return problem.code


def _single_urls(url: str) -> Sequence[str]:
    scheme, separator, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    if not separator or scheme not in ("escrow", "escrows"):
        return [url]
    addresses, mark, options = rest.partition("?")
    return [f"{scheme}://{address}{mark}{options}" for address in addresses.rstrip("/").split(",")]


def _find_refused(batch: pa.RecordBatch, limits: Limits) -> Codes:
    """Return one code per row of a batch: that of a row which the broker would surely refuse, by ``limits`` and names;
    else OK."""
    codes = refusals(batch, limits)
    wrong = [topic for topic in pc.unique(batch.column("topic")).to_pylist() if not is_name(topic)]
    if wrong:
        named = pc.is_in(batch.column("topic"), pa.array(wrong)).to_numpy(zero_copy_only=False)
        codes[named & (codes == 0)] = Code.BAD_TOPIC_NAME
    return codes
