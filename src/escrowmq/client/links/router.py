"""Routes each message to one of several brokers, and asks all of them what only all can answer.

A key always goes to the same broker, whether that is there or not; messages without a key go to those that are there
in rotation, a batch whole. A transaction stays on the broker that took its first message (the shard in its id says
which). What may have left for one broker is never sent to another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from escrowmq.client.links.answers import TRY_SECONDS, Answers, away, patient_action
from escrowmq.client.links.presence import AWAY_SECONDS, Attendance, Missing, Presence
from escrowmq.errors import AWAY, Code, EscrowError, Misuse, Rejected, error
from escrowmq.wire import Call, Link, ask
from escrowmq.wire.actions.action import Answer
from escrowmq.wire.actions.brokers import HELLO

T = TypeVar("T")

_BY_NUMBER = -2
"""What stands for broker 0 where its shard is not known yet, -3 for broker 1, and so on."""


def broker_of(key: str, brokers: int) -> int:
    """Return the number of the broker (0 .. ``brokers``-1) that takes a key: XXH64 of its UTF-8 bytes, modulo the
    number of brokers."""
    return int(xxhash.xxh64_intdigest(key.encode("utf-8", "surrogatepass"), seed=0x657363726F77) % brokers)


class Router:
    """The links of one client, by number, their shards, and which of them are there."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)
        self.presence = Presence(self.links, self.learn_shard)
        several = len(self.links) > 1
        self.attendances = [Attendance(self.presence, number) if several else None for number in range(len(self.links))]
        """One per broker; None where there is only one, which everything waits for."""
        self._last = 0
        self._shards: dict[int, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.links)

    def close(self) -> None:
        """Stop probing brokers."""
        self.presence.close()

    def next_in_rotation(self, usable: Callable[[int], bool]) -> int:
        """Return the number of the next broker in rotation, for a message without a key. Brokers that are away or not
        ``usable`` are passed over while there are others."""
        with self._lock:
            best: int | None = None
            for step in range(1, len(self.links) + 1):
                number = (self._last + step) % len(self.links)
                if not self.presence.there(number):
                    continue
                if usable(number):
                    best = number
                    break
                best = number if best is None else best
            self._last = (self._last + 1) % len(self.links) if best is None else best
            return self._last

    def known_shard(self, shard: int) -> int | None:
        """Return the number of the broker that holds ``shard``; None if that is not known yet."""
        return self._shards.get(shard)

    def learn_shard(self, number: int, shard: int) -> None:
        """Record that broker ``number`` holds ``shard``. Raises Misuse(BAD_URL) if two addresses turn out to be one
        broker."""
        known = self._shards.setdefault(shard, number)
        if known != number:
            one, other = self.links[known].address, self.links[number].address
            raise Misuse(
                Code.BAD_URL,
                f"{one} and {other} are the same broker: both have shard {shard:08x}",
                "name each broker once",
            )

    def of_shard(self, shard: int, timeout: float) -> int:
        """Return the number of the broker that holds ``shard`` (or that a number of :meth:`name_of` stands for);
        requests it from the brokers if it is not known.

        Raises Rejected(WRONG_SHARD) if none of them holds it, Overloaded(BROKER_AWAY) while those that answer do not
        and others are away, or have not answered yet, or the error of the only broker.
        """
        if (known := self._shards.get(shard)) is not None:
            return known
        if _BY_NUMBER - len(self.links) < shard <= _BY_NUMBER:
            return _BY_NUMBER - shard
        addresses = ", ".join(link.address for link in self.links)
        if len(self.links) == 1:
            self._ask_shard(0, timeout, False)
        else:
            self.presence.meet(timeout)
        if (known := self._shards.get(shard)) is not None:
            return known
        if missing := self.presence.missing() or self._unmet():
            raise away(missing, f"shard {shard & 0xFFFFFFFF:08x} is at none of the brokers that answer")
        raise Rejected(Code.WRONG_SHARD, f"shard {shard & 0xFFFFFFFF:08x} is at none of {addresses}")

    def _unmet(self) -> list[Missing]:
        """Return the brokers whose shard is not known yet: one that has not been silent for long enough to be away may
        hold any shard."""
        known = set(self._shards.values())
        return [
            {"broker": link.address, "reason": "it has not answered yet"}
            for number, link in enumerate(self.links)
            if number not in known
        ]

    def name_of(self, number: int, timeout: float) -> int:
        """Return a stable name of broker ``number`` while the list of brokers stays the same: its shard or, if it was
        never reached, a negative number for :meth:`of_shard`. Raises Misuse(BAD_URL) if two addresses are one
        broker."""
        if (shard := self._shard_at(number)) is None:
            try:
                if len(self.links) == 1:
                    return self._ask_shard(0, timeout, False)
                self.presence.meet(timeout)
            except EscrowError as problem:
                if problem.code not in AWAY:
                    raise
            shard = self._shard_at(number)
        return _BY_NUMBER - number if shard is None else shard

    def shard_of(self, number: int, timeout: float, *, patient: bool = False) -> int:
        """Return the shard at broker ``number``, requested from it if not known. Raises Unknown if the broker is away;
        with ``patient``, only after repeating the request for ``timeout`` seconds."""
        known = self._shard_at(number)
        return self._ask_shard(number, timeout, patient) if known is None else known

    def _shard_at(self, number: int) -> int | None:
        return next((shard for shard, known in list(self._shards.items()) if known == number), None)

    def _ask_shard(self, number: int, timeout: float, patient: bool) -> int:
        link = self.links[number]
        deadline = time.monotonic() + timeout
        hello = patient_action(link, HELLO({}), deadline) if patient else ask(link, HELLO({}), timeout)
        shard = hello["shard"]
        self.learn_shard(number, shard)
        return shard

    def spread(self, keys: pa.Array, keyless: Callable[[], int]) -> npt.NDArray[np.int64]:
        """Return the number of the broker of each row of a batch, by its key; all rows without a key go to the broker
        whose number ``keyless`` returns."""
        if len(self.links) == 1:
            return np.zeros(len(keys), np.int64)
        encoded = pc.dictionary_encode(keys)
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        table = [broker_of(key, len(self.links)) for key in encoded.dictionary.to_pylist()]
        without = keyless() if encoded.null_count else 0
        codes = pc.fill_null(encoded.indices, len(table)).to_numpy(zero_copy_only=False)
        return np.asarray(np.array([*table, without], np.int64)[codes])

    # Asking all of them

    def ask(self, number: int, call: Call[Answer], deadline: float, *, longest: float = TRY_SECONDS) -> Answer:
        """Return the answer to an action of broker ``number`` (its index in ``links``, not its shard), repeated while
        the broker cannot be reached; see :func:`patient_action`."""
        return patient_action(self.links[number], call, deadline, self.attendances[number], longest=longest)

    def every(self, act: Callable[[int], T], timeout: float) -> Answers[T]:
        """Call ``act(number)`` for each broker, several at a time. Returns the results, in the order of the URL, and
        the brokers that are away.

        If none answers, raises the last problem; a broker's refusal is raised at once. Nothing is waited for longer
        than ``timeout`` seconds.
        """
        if len(self.links) == 1:
            return Answers([(0, act(0))])
        results: dict[int, T] = {}
        problems: dict[int, BaseException] = {}
        news = threading.Condition()

        def work(number: int) -> None:
            try:
                result = act(number)
            except BaseException as problem:
                with news:
                    problems[number] = problem
                    news.notify_all()
            else:
                with news:
                    results[number] = result
                    news.notify_all()

        for number in range(len(self.links)):
            threading.Thread(target=work, args=(number,), name="escrowmq-ask", daemon=True).start()
        deadline, suspects = time.monotonic() + timeout, time.monotonic() + AWAY_SECONDS
        with news:
            while (left := deadline - time.monotonic()) > 0:
                open_ = [n for n in range(len(self.links)) if n not in results and n not in problems]
                if not open_ or (results and all(self.presence.away(number) for number in open_)):
                    break
                if time.monotonic() >= suspects:  # slow, or silent?
                    for number in open_:
                        self.presence.suspect(number)
                    suspects = time.monotonic() + AWAY_SECONDS
                news.wait(min(left, 0.05))
            return self._answers(dict(results), dict(problems))

    def _answers(self, results: dict[int, T], problems: dict[int, BaseException]) -> Answers[T]:
        answers = Answers[T]()
        problem: EscrowError | None = None
        for number, link in enumerate(self.links):
            if number in results:
                answers.found.append((number, results[number]))
                continue
            raised = problems.get(number) or self.presence.refusal(number)
            if not isinstance(raised, EscrowError) or raised.code not in AWAY:
                raise raised
            problem = raised
            answers.missing.append({"broker": link.address, "reason": raised.message})
        if not answers.found and problem is not None:
            raise error(problem.code, "; ".join(f"{one['broker']}: {one['reason']}" for one in answers.missing))
        return answers
