"""Routes each message to one of several brokers.

A key always goes to the same broker; messages without a key go to the brokers in rotation, a batch whole. A transaction stays on the
broker that took its first message (the shard in its id says which), and nothing is ever sent again to another broker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from escrowmq.client.links.patience import patient_action
from escrowmq.errors import Code, EscrowError, Rejected
from escrowmq.wire import Link, ask
from escrowmq.wire.actions.brokers import HELLO


def broker_of(key: str, brokers: int) -> int:
    """The broker (0 .. ``brokers``-1) that takes a key: XXH64 of its UTF-8 bytes, modulo the number of brokers."""
    return int(xxhash.xxh64_intdigest(key.encode("utf-8", "surrogatepass"), seed=0x657363726F77) % brokers)


class Router:
    """The links of one client, by number, and their shards."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)
        self._last = 0
        self._shards: dict[int, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.links)

    def next_in_rotation(self, usable: Callable[[int], bool]) -> int:
        """The number of the next broker; those not ``usable`` are passed over while there are others."""
        with self._lock:
            for _ in self.links:
                self._last = (self._last + 1) % len(self.links)
                if usable(self._last):
                    break
            return self._last

    def known_shard(self, shard: int) -> int | None:
        """The number of the broker that holds ``shard``, if that is known yet."""
        return self._shards.get(shard)

    def learn_shard(self, shard: int, number: int) -> None:
        """Note which broker holds a shard."""
        self._shards[shard] = number

    def of_shard(self, shard: int, timeout: float) -> int:
        """The number of the broker that holds ``shard``; asks all brokers if need be.

        Raises Rejected(WRONG_SHARD) if none of them holds it, or the error of a broker that could not be asked.
        """
        if (known := self._shards.get(shard)) is not None:
            return known
        addresses = ", ".join(link.address for link in self.links)
        problem: EscrowError = Rejected(Code.WRONG_SHARD, f"shard {shard:08x} is at none of {addresses}")
        for number in range(len(self.links)):
            try:
                self._ask_shard(number, timeout, False)
            except EscrowError as unreachable:
                problem = unreachable
        if (known := self._shards.get(shard)) is None:
            raise problem
        return known

    def shard_of(self, number: int, timeout: float, *, patient: bool = False) -> int:
        """The shard at broker ``number``; asks it once. Raises Unknown if it is away; if ``patient``, after ``timeout``."""
        for shard, known in list(self._shards.items()):
            if known == number:
                return shard
        return self._ask_shard(number, timeout, patient)

    def _ask_shard(self, number: int, timeout: float, patient: bool) -> int:
        link = self.links[number]
        deadline = time.monotonic() + timeout
        hello = patient_action(link, HELLO({}), deadline) if patient else ask(link, HELLO({}), timeout)
        shard = hello["shard"]
        self._shards[shard] = number
        return shard

    def spread(self, keys: pa.Array, keyless: Callable[[], int]) -> npt.NDArray[np.int64]:
        """The broker of each row of a batch: by key; all rows without one go to the broker that ``keyless`` names."""
        if len(self.links) == 1:
            return np.zeros(len(keys), np.int64)
        encoded = pc.dictionary_encode(keys)
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        table = [broker_of(key, len(self.links)) for key in encoded.dictionary.to_pylist()]
        without = keyless() if encoded.null_count else 0
        codes = pc.fill_null(encoded.indices, len(table)).to_numpy(zero_copy_only=False)
        return np.asarray(np.array([*table, without], np.int64)[codes])

    def every(self, ask: Callable[[Link], Any]) -> list[Any]:
        """What each broker answers to ``ask``, in order of the URL."""
        return [ask(link) for link in self.links]
