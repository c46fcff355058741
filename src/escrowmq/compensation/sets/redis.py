"""Two sets in Redis: sorted sets by time; the difference is one step of the server (``MULTI ... EXEC``).

Keys, all in one slot: ``half`` and ``commit``, id → time; ``run:NAME``, id → time of its announcement, for each run;
``leases``, run → end of its lease; ``token``, generated with the store; ``turn``, written and watched by every step
that moves ids between runs, so such steps run one after the other, and one that was overtaken is computed again.
Announcements and entries are one command each and do not interfere.

A step lists its ids, at most a thousand, so its cost does not depend on the size of the sets.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from escrowmq.compensation.sets.checks import STEP_IDS, CheckedSets, check_ids, check_time
from escrowmq.compensation.sets.seam import Run, Sizes
from escrowmq.compensation.sets.server import Command, Link, RedisServer, raise_first, wrong_type
from escrowmq.errors import Code, Overloaded
from escrowmq.outbox.targets.redis import DURABILITY
from escrowmq.platform.failpoints import reach

if TYPE_CHECKING:
    import redis

_TRIES = 200
"""Tries of a step that others overtake; each time one of them has completed its own."""
_PAUSE = 0.002


class RedisSets(CheckedSets):
    """One pair of sets in a Redis; see :class:`escrowmq.compensation.sets.seam.SetStore`."""

    def __init__(self, url: str, name: str, *, timeout: float = 10.0, durability: str = "memory") -> None:
        """Store the settings; does not connect yet. For one primary, with or without replicas. ``timeout``: seconds per
        response. ``durability``: minimum durability of the server, ``memory``, ``everysec`` or ``always``; the first
        call rejects a lower one with Misuse(BAD_SETTING). ``memory`` loses nothing either: a restart changes the epoch,
        and lost entries are read again. Raises Misuse (BAD_URL, BAD_ARGUMENT), Rejected(BAD_GROUP_NAME)."""
        super().__init__(name)
        self._server = RedisServer(url, timeout=timeout, durability=durability)
        self._durability = durability
        prefix = f"escrowmq:sets:{{{name}}}:"
        self._half, self._commit, self._leases = f"{prefix}half", f"{prefix}commit", f"{prefix}leases"
        self._token, self._turn, self._prefix = f"{prefix}token", f"{prefix}turn", prefix

    @property
    def keeps(self) -> str:
        """Description of the point in time at which entries are safe."""
        return f"{DURABILITY[self._durability]}; a restart changes the epoch, so that what may be lost is read again"

    def epoch(self) -> str:
        """Return a token under the store's own key, the server's run id, generated at every start, and its replication
        id, which changes when it is promoted or has followed another."""
        with self._open() as link:
            info = self._server.check(link)
            [token] = link.execute(("GET", self._token))
            if token is None:
                _, token = link.execute(("SET", self._token, secrets.token_hex(8), "NX"), ("GET", self._token))
            if token is None:
                raise Overloaded(Code.QUEUE_FULL, "the Redis of the sets is being emptied", "repeat it")
            return f"{token.decode()}.{info.get('run_id', '')}.{info.get('master_replid', '')}"

    def _add_halves(self, earliest: dict[bytes, int]) -> None:
        with self._open() as link:
            link.execute(("ZADD", self._half, "LT", *_score_pairs(earliest.items())))

    def _add_commits(self, ids: Sequence[bytes], now_us: int) -> None:
        with self._open() as link:
            link.execute(("ZADD", self._commit, "NX", *_score_pairs((identity, now_us) for identity in ids)))

    def add_commits_tx(self, pipeline: redis.client.Pipeline, ids: Sequence[bytes], now_us: int) -> None:
        """Do :meth:`add_commits` inside your ``MULTI``, atomically with your commands, for an effect in this Redis.
        ``pipeline`` has ``transaction=True`` and the same server and database. Raises Misuse(BAD_ARGUMENT)."""
        check_ids(ids)
        check_time(now_us)
        if ids:
            pipeline.zadd(self._commit, dict.fromkeys(ids, now_us), nx=True)

    def _drop(self, run: str) -> None:
        with self._open() as link:
            link.execute(("ZREM", self._leases, run))

    def _adopt(self, duration_us: int, limit: int) -> Run | None:
        with self._open() as link:
            for _ in self._retries():
                earliest = ("ZRANGE", self._leases, 0, 0, "WITHSCORES")
                _, now, first = link.execute(("WATCH", self._turn), ("TIME",), earliest)
                if not first or int(float(first[1])) > _to_us(now):
                    link.execute(("UNWATCH",))
                    return None
                run = first[0].decode()
                reach("sets.adopting")
                held = ("ZRANGE", self._run_key(run), 0, limit - 1)
                until = ("ZADD", self._leases, "XX", _to_us(now) + duration_us, run)
                answers = link.step(self._invalidate_others(), held, until)
                if answers is None:
                    continue
                raise_first(answers)
                if answers[1]:
                    return Run(run, tuple(answers[1]))
                self._release_if_empty(link, run)
        raise _contention_error()

    def _left(self, run: str, limit: int) -> tuple[bytes, ...]:
        with self._open() as link:
            [ids] = link.execute(("ZRANGE", self._run_key(run), 0, limit - 1))
            return tuple(ids)

    def _renew(self, run: str, duration_us: int) -> bool:
        with self._open() as link:
            [now] = link.execute(("TIME",))
            until = ("ZADD", self._leases, "XX", _to_us(now) + duration_us, run)
            answers = link.step(self._invalidate_others(), until, ("ZSCORE", self._leases, run)) or [None]
            raise_first(answers)
            return answers[-1] is not None

    def _settle(self, run: str, ids: Sequence[bytes]) -> None:
        with self._open() as link:
            key = self._run_key(run)
            link.execute(*(("ZREM", key, *ids[at : at + STEP_IDS]) for at in range(0, len(ids), STEP_IDS)))
            reach("sets.settled")
            self._release_if_empty(link, run)

    def _forget_commits(self, before_us: int) -> int:
        """See the interface. The announcement is checked just before the entry is removed: a wrongly removed entry
        costs a look-up."""
        forgotten = passed = 0
        with self._open() as link:
            while True:
                early = ("ZRANGE", self._commit, "-inf", f"({before_us}", "BYSCORE", "LIMIT", passed, STEP_IDS)
                [ids] = link.execute(early)
                if not ids:
                    return forgotten
                [announced] = link.execute(("ZMSCORE", self._half, *ids))
                alone = [identity for identity, us in zip(ids, announced, strict=True) if us is None]
                passed += len(ids) - len(alone)
                if alone:
                    forgotten += link.execute(("ZREM", self._commit, *alone))[0]

    def sizes(self) -> Sizes:
        with self._open() as link:
            # The half set before the runs: an id taken meanwhile is counted twice, never missed.
            first, half, commits, runs = link.execute(
                ("ZRANGE", self._half, 0, 0, "WITHSCORES"),
                ("ZCARD", self._half),
                ("ZCARD", self._commit),
                ("ZRANGE", self._leases, 0, -1),
            )
            keys = [self._run_key(run.decode()) for run in runs]
            held = link.execute(*(c for key in keys for c in (("ZCARD", key), ("ZRANGE", key, 0, 0, "WITHSCORES"))))
        times = [int(float(pair[1])) for pair in (first, *held[1::2]) if pair]
        return Sizes(half, commits, sum(held[::2]), sum(bool(count) for count in held[::2]), min(times, default=None))

    def close(self) -> None:
        super().close()
        self._server.close()

    # Steps

    def _open(self) -> Any:
        self._check_open()
        return self._server.link()

    def _run_key(self, run: str) -> str:
        return f"{self._prefix}run:{run}"

    def _invalidate_others(self) -> Command:
        """Return the command by which a step invalidates concurrent ones. It never fails: SET accepts any type."""
        return ("SET", self._turn, secrets.token_hex(8))

    def _retries(self) -> Any:
        for tried in range(_TRIES):
            if tried:
                time.sleep(_PAUSE * secrets.randbelow(min(tried, 10)))
            yield tried

    def _take(self, run: str, before_us: int, most: int, duration_us: int) -> tuple[int, list[bytes]]:
        """Do one step. The ids are read before it. They leave the half set only by such a step, so all of them are
        there when it runs; the step itself tests which of them the commit set has."""
        with self._open() as link:
            return self._take_by(link, run, before_us, most, duration_us)

    def _take_by(self, link: Link, run: str, before_us: int, most: int, duration_us: int) -> tuple[int, list[bytes]]:
        for _ in self._retries():
            early = ("ZRANGE", self._half, "-inf", f"({before_us}", "BYSCORE", "LIMIT", 0, most, "WITHSCORES")
            kinds = [("TYPE", self._commit), ("TYPE", self._leases)]
            _, now, found, *types, runs = link.execute(
                ("WATCH", self._turn), ("TIME",), early, *kinds, ("ZRANGE", self._leases, 0, -1)
            )
            if not found:
                link.execute(("UNWATCH",))
                return 0, []
            keys = [self._run_key(other.decode()) for other in runs]
            types += link.execute(*(("TYPE", key) for key in keys))
            # A failed command does not undo a step, so the types of the keys are checked first.
            if bad := next((kind for kind in types if kind not in (b"zset", b"none")), None):
                raise wrong_type(f"a {bad.decode()} instead of a sorted set")
            ids, times = found[::2], found[1::2]
            reach("sets.taking")
            step, kept = f"{self._prefix}step:{run}", f"{self._prefix}kept:{run}"
            answers = link.step(
                self._invalidate_others(),
                ("ZADD", step, *(part for pair in zip(times, ids, strict=True) for part in pair)),
                ("ZDIFFSTORE", kept, 2 + len(keys), step, self._commit, *keys),
                ("ZUNIONSTORE", self._run_key(run), 2, self._run_key(run), kept),
                ("ZADD", self._leases, _to_us(now) + duration_us, run),
                ("ZRANGE", kept, 0, -1),
                ("ZREM", self._half, *ids),
                ("ZREM", self._commit, *ids),
                ("DEL", step, kept),
            )
            if answers is None:
                continue
            if any(isinstance(answer, Exception) for answer in answers):
                # A key was overwritten since the check: the ids return to the half set.
                back = _score_pairs((i, int(float(us))) for i, us in zip(ids, times, strict=True))
                link.execute(("ZADD", self._half, "LT", *back))
                raise_first(answers)
            return len(ids), answers[5]
        raise _contention_error()

    def _release_if_empty(self, link: Link, run: str) -> None:
        """Release the lease of a run without ids; a run that received some meanwhile keeps it. A full Redis rejects
        every step, including this one: then the next adopter releases the lease."""
        key = self._run_key(run)
        _, count = link.execute(("WATCH", key), ("ZCARD", key))
        if count:
            link.execute(("UNWATCH",))
            return
        with suppress(Overloaded):
            link.step(("ZREM", self._leases, run))


def _score_pairs(pairs: Any) -> list[Any]:
    return [part for identity, time_us in pairs for part in (time_us, identity)]


def _to_us(response: list[bytes]) -> int:
    """Convert the response of TIME to microseconds."""
    return int(response[0]) * 1_000_000 + int(response[1])


def _contention_error() -> Overloaded:
    return Overloaded(Code.QUEUE_FULL, "other schedulers interrupted every try", "repeat it; nothing was recorded")
