"""Two sets in Redis: sorted sets by time, and the difference as one step of the server (``MULTI ... EXEC``).

Keys, all in one slot: ``half`` and ``commit``, id → time; ``run:NAME``, id → time of its announcement, for each run;
``leases``, run → end of its lease; ``token``, drawn when the store was made; ``turn``, which every step that moves ids
between runs sets anew, and watches: so such steps go one after the other, and one that another came before is computed
again. Announcements and entries are one command each, and disturb nobody.

A step gets its ids in the call, at most a thousand: it costs the same however large the sets are.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from escrowmq.compensation.sets.checks import (
    check_halves,
    check_ids,
    check_limit,
    check_store_name,
    check_time,
    lease_us,
)
from escrowmq.compensation.sets.seam import Run, Sizes
from escrowmq.compensation.sets.server import Command, Link, RedisServer, raise_first, wrong_type
from escrowmq.errors import Code, Misuse, Overloaded
from escrowmq.outbox.targets.redis import DURABILITY
from escrowmq.platform.failpoints import reach

if TYPE_CHECKING:
    import redis

STEP_IDS = 1_000
"""Ids that one step of ``take`` looks at: Redis serves no other client meanwhile."""
PATIENT_PART = 4
"""``take`` gives what it has when this part of the lease is over."""
_TRIES = 200
"""Of a step that others came before; each time one of them has done its own."""
_PAUSE = 0.002


class RedisSets:
    """One pair of sets in a Redis; see :class:`escrowmq.compensation.sets.seam.SetStore`."""

    def __init__(self, url: str, name: str, *, timeout: float = 10.0, durability: str = "memory") -> None:
        """``timeout``: seconds of one answer. ``durability``: what the server must keep to at least, ``memory``,
        ``everysec`` or ``always``; one that keeps to less is refused by the first call with Misuse(BAD_SETTING).
        ``memory`` loses nothing either: a restart changes the epoch, and what was lost is read again. Does not connect
        yet. For one primary, with or without replicas.

        Raises Misuse (BAD_URL, BAD_ARGUMENT), Rejected(BAD_GROUP_NAME).
        """
        self._name = check_store_name(name)
        self._server = RedisServer(url, timeout=timeout, durability=durability)
        self._durability = durability
        prefix = f"escrowmq:sets:{{{name}}}:"
        self._half, self._commit, self._leases = f"{prefix}half", f"{prefix}commit", f"{prefix}leases"
        self._token, self._turn, self._prefix = f"{prefix}token", f"{prefix}turn", prefix
        self._closed = False

    @property
    def name(self) -> str:
        """See the contract."""
        return self._name

    @property
    def keeps(self) -> str:
        """In words: when what was recorded is safe."""
        return f"{DURABILITY[self._durability]}; a restart changes the epoch, so that what may be lost is read again"

    def epoch(self) -> str:
        """See the contract. It is a token under the store's own key, the server's run id, which every start draws, and
        its replication id, which changes when it takes over from another or has followed one. Raises as the contract
        says."""
        with self._open() as link:
            told = self._server.check(link)
            [token] = link.ask(("GET", self._token))
            if token is None:
                _, token = link.ask(("SET", self._token, secrets.token_hex(8), "NX"), ("GET", self._token))
            if token is None:
                raise Overloaded(Code.QUEUE_FULL, "the Redis of the sets is being emptied", "repeat it")
            return f"{token.decode()}.{told.get('run_id', '')}.{told.get('master_replid', '')}"

    def add_halves(self, ids: Sequence[bytes], announced_us: Sequence[int]) -> None:
        """See the contract. One command."""
        earliest = check_halves(ids, announced_us)
        if earliest:
            with self._open() as link:
                link.ask(("ZADD", self._half, "LT", *_make_scored(earliest.items())))
            reach("sets.halves-added")

    def add_commits(self, ids: Sequence[bytes], now_us: int) -> None:
        """See the contract. One command."""
        check_ids(ids)
        check_time(now_us)
        if ids:
            with self._open() as link:
                link.ask(("ZADD", self._commit, "NX", *_make_scored((identity, now_us) for identity in ids)))
            reach("sets.commits-added")

    def add_commits_tx(self, pipeline: redis.client.Pipeline, ids: Sequence[bytes], now_us: int) -> None:
        """:meth:`add_commits` inside your ``MULTI``, for an effect that is in this Redis itself: it stands or falls
        with your commands.

        ``pipeline`` is one with ``transaction=True`` on the same server and database. Raises Misuse(BAD_ARGUMENT).
        """
        check_ids(ids)
        check_time(now_us)
        if ids:
            pipeline.zadd(self._commit, dict.fromkeys(ids, now_us), nx=True)

    def take(self, before_us: int, limit: int, lease: float) -> Run | None:
        """See the contract; the atomic step is repeated for every thousand ids that are looked at."""
        check_time(before_us)
        check_limit(limit)
        lasts_us, begun, run = lease_us(lease), time.monotonic(), secrets.token_hex(8)
        ids: list[bytes] = []
        more = True
        with self._open() as link:
            while more and len(ids) * 2 < limit and not (ids and (time.monotonic() - begun) * PATIENT_PART > lease):
                most = min(STEP_IDS, limit - len(ids))
                seen, kept = self._take(link, run, before_us, most, lasts_us)
                reach("sets.taken")
                ids += kept
                more = seen == most
            if ids:
                return Run(run, tuple(ids))
            link.ask(("ZREM", self._leases, run))
        return None

    def adopt(self, lease: float, limit: int) -> Run | None:
        """See the contract."""
        check_limit(limit)
        lasts_us = lease_us(lease)
        with self._open() as link:
            for _ in self._tries():
                _, now, first = link.ask(("WATCH", self._turn), ("TIME",), ("ZRANGE", self._leases, 0, 0, "WITHSCORES"))
                if not first or int(float(first[1])) > _us(now):
                    link.unwatch()
                    return None
                run = first[0].decode()
                reach("sets.adopting")
                commands: list[Command] = [self._next(), ("ZRANGE", self._run(run), 0, limit - 1)]
                commands += [("ZADD", self._leases, "XX", _us(now) + lasts_us, run)]
                answers = link.step(*commands)
                if answers is None:
                    continue
                raise_first(answers)
                if answers[1]:
                    reach("sets.adopted")
                    return Run(run, tuple(answers[1]))
                self._end(link, run)
        raise _make_overloaded()

    def left(self, run: str, limit: int) -> tuple[bytes, ...]:
        """See the contract."""
        check_limit(limit)
        with self._open() as link:
            [ids] = link.ask(("ZRANGE", self._run(run), 0, limit - 1))
            return tuple(ids)

    def renew(self, run: str, lease: float) -> bool:
        """See the contract."""
        lasts_us = lease_us(lease)
        with self._open() as link:
            [now] = link.ask(("TIME",))
            until = ("ZADD", self._leases, "XX", _us(now) + lasts_us, run)
            answers = link.step(self._next(), until, ("ZSCORE", self._leases, run)) or [None]
            raise_first(answers)
            return answers[-1] is not None

    def settle(self, run: str, ids: Sequence[bytes]) -> None:
        """See the contract."""
        check_ids(ids)
        if not ids:
            return
        with self._open() as link:
            key = self._run(run)
            link.ask(*(("ZREM", key, *ids[at : at + STEP_IDS]) for at in range(0, len(ids), STEP_IDS)))
            reach("sets.settled")
            self._end(link, run)

    def forget_commits(self, before_us: int) -> int:
        """See the contract; whether an id was announced is asked a moment before its entry goes: an entry that is
        missed costs a look-up."""
        check_time(before_us)
        forgotten = passed = 0
        with self._open() as link:
            while True:
                early = ("ZRANGE", self._commit, "-inf", f"({before_us}", "BYSCORE", "LIMIT", passed, STEP_IDS)
                [ids] = link.ask(early)
                if not ids:
                    return forgotten
                [announced] = link.ask(("ZMSCORE", self._half, *ids))
                alone = [identity for identity, us in zip(ids, announced, strict=True) if us is None]
                passed += len(ids) - len(alone)
                if alone:
                    forgotten += link.ask(("ZREM", self._commit, *alone))[0]

    def sizes(self) -> Sizes:
        """See the contract."""
        with self._open() as link:
            # The half set before the runs: an id that is taken meanwhile is seen twice, never not at all. A full Redis
            # answers this, too.
            first, half, commits, runs = link.ask(
                ("ZRANGE", self._half, 0, 0, "WITHSCORES"),
                ("ZCARD", self._half),
                ("ZCARD", self._commit),
                ("ZRANGE", self._leases, 0, -1),
            )
            keys = [self._run(run.decode()) for run in runs]
            held = link.ask(*(c for key in keys for c in (("ZCARD", key), ("ZRANGE", key, 0, 0, "WITHSCORES"))))
        times = [int(float(told[1])) for told in (first, *held[1::2]) if told]
        return Sizes(half, commits, sum(held[::2]), sum(bool(count) for count in held[::2]), min(times, default=None))

    def close(self) -> None:
        """See the contract."""
        self._closed = True
        self._server.close()

    # The steps

    def _open(self) -> Any:
        if self._closed:
            raise Misuse(Code.BAD_ARGUMENT, "the set store is closed")
        return self._server.link()

    def _run(self, run: str) -> str:
        return f"{self._prefix}run:{run}"

    def _next(self) -> Command:
        """For a step: let those who watch know that others came before them. SET takes a key of any kind, so this never
        fails."""
        return ("SET", self._turn, secrets.token_hex(8))

    def _tries(self) -> Any:
        for tried in range(_TRIES):
            if tried:
                time.sleep(_PAUSE * secrets.randbelow(min(tried, 10)))
            yield tried

    def _take(self, link: Link, run: str, before_us: int, most: int, lasts_us: int) -> tuple[int, list[bytes]]:
        """One step: how many ids were found in the half set, and those that the run now has.

        What is read before is only which ids there are. None of them leaves the half set but by such a step, so that
        all of them are there when it runs; which of them the commit set has is found out in the step.
        """
        for _ in self._tries():
            early = ("ZRANGE", self._half, "-inf", f"({before_us}", "BYSCORE", "LIMIT", 0, most, "WITHSCORES")
            kinds = [("TYPE", self._commit), ("TYPE", self._leases)]
            _, now, found, *told, runs = link.ask(
                ("WATCH", self._turn), ("TIME",), early, *kinds, ("ZRANGE", self._leases, 0, -1)
            )
            if not found:
                link.unwatch()
                return 0, []
            keys = [self._run(other.decode()) for other in runs]
            told += link.ask(*(("TYPE", key) for key in keys))
            # An error of a command undoes nothing of a step, so the kinds of the keys are looked at before.
            if bad := next((kind for kind in told if kind not in (b"zset", b"none")), None):
                raise wrong_type(f"a {bad.decode()} instead of a sorted set")
            ids, times = found[::2], found[1::2]
            reach("sets.taking")
            step, kept = f"{self._prefix}step:{run}", f"{self._prefix}kept:{run}"
            answers = link.step(
                self._next(),
                ("ZADD", step, *(part for pair in zip(times, ids, strict=True) for part in pair)),
                ("ZDIFFSTORE", kept, 2 + len(keys), step, self._commit, *keys),
                ("ZUNIONSTORE", self._run(run), 2, self._run(run), kept),
                ("ZADD", self._leases, _us(now) + lasts_us, run),
                ("ZRANGE", kept, 0, -1),
                ("ZREM", self._half, *ids),
                ("ZREM", self._commit, *ids),
                ("DEL", step, kept),
            )
            if answers is None:
                continue
            if any(isinstance(answer, Exception) for answer in answers):
                # Somebody has put something else under a key since it was looked at: the ids go back to where they
                # were.
                back = _make_scored((i, int(float(us))) for i, us in zip(ids, times, strict=True))
                link.ask(("ZADD", self._half, "LT", *back))
                raise_first(answers)
            return len(ids), answers[5]
        raise _make_overloaded()

    def _end(self, link: Link, run: str) -> None:
        """Let the lease of a run go that has no ids; one that was given some at this moment keeps it.

        A full Redis refuses every step, this one, too: the lease of nothing is then let go by whoever would adopt it.
        """
        key = self._run(run)
        _, count = link.ask(("WATCH", key), ("ZCARD", key))
        if count:
            link.unwatch()
            return
        with suppress(Overloaded):
            link.step(("ZREM", self._leases, run))


def _make_scored(pairs: Any) -> list[Any]:
    return [part for identity, time_us in pairs for part in (time_us, identity)]


def _us(told: list[bytes]) -> int:
    """Return the answer to TIME in microseconds."""
    return int(told[0]) * 1_000_000 + int(told[1])


def _make_overloaded() -> Overloaded:
    return Overloaded(
        Code.QUEUE_FULL, "other schedulers came before this one each time", "repeat it; nothing was recorded"
    )
