"""Many shards on paper: 1,000 shards, a million producers, and their check-backs, simulated with the rules of one
broker.

What is not there yet is a map that says which shards a tenant lives on (a *tenant* is the producer groups and topics
that meet in one transaction), and somebody who moves it. The rules of placing are compared by what they ask of one
shard; then the check-backs of all shards are played through, in steps of a tenth of a second, in four hours of need:
lost outcomes as always, a third of all producers killed at once, databases of a twentieth of all tenants hanging for a
minute, and a shard that fails over. What one broker does in a second (questions answered, connections taken) is
measured on a real one first (``--measured Q,C`` gives figures from before).
"""

from __future__ import annotations

import argparse
import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from _harness import Report, arguments, broker

import escrowmq as mq
from escrowmq.settings import BrokerSettings

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
STEP = 0.1
"""Seconds of one step of the simulation."""


@dataclasses.dataclass(frozen=True)
class World:
    """Who is there, and what one broker does. Rates are for a second."""

    shards: int = 1000
    producers: int = 1_000_000
    tenants: int = 20_000
    skew: float = 1.0
    """The n-th largest tenant has producers in proportion to 1 / n to the power of this."""
    rate: float = 1.0
    """Transactions of one producer."""
    open_seconds: float = 0.02
    """How long a transaction is undecided when nothing happens."""
    lost: float = 1e-4
    """The part of the transactions whose outcome is lost on the way."""
    restart: tuple[float, float] = (30.0, 120.0)
    """Seconds until a killed producer is back: from, to."""
    answer_seconds: float = 0.005
    """What the checker of one producer takes for a question."""
    questions: float = 5_000.0
    """Questions that one broker asks and takes answers to."""
    connects: float = 200.0
    """Connections with a session that one broker takes."""
    settings: BrokerSettings = dataclasses.field(default_factory=BrokerSettings)

    def sizes(self) -> Ints:
        """Producers of each tenant, the largest first, at least one each; their sum is ``producers``."""
        weights = 1.0 / np.arange(1, self.tenants + 1, dtype=np.float64) ** self.skew
        sizes = np.maximum(np.floor(weights / weights.sum() * self.producers), 1).astype(np.int64)
        sizes[0] += self.producers - sizes.sum()
        return sizes


# Placing


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which shards each tenant lives on: pairs of a tenant and a shard."""

    tenant: Ints
    shard: Ints
    most_links: int = 1 << 30
    """A producer is connected to so many of its tenant's shards at most, and uses these alone."""

    def spread(self, tenants: int) -> Ints:
        """How many shards each tenant has."""
        return np.bincount(self.tenant, minlength=tenants)

    def links(self, tenants: int) -> Ints:
        """Shards that a producer of each tenant is connected to."""
        return np.minimum(self.spread(tenants), self.most_links)

    def connections(self, world: World) -> Floats:
        """Connections of each shard."""
        of_tenant = world.sizes() * self.links(world.tenants) / self.spread(world.tenants)
        return np.bincount(self.shard, of_tenant[self.tenant], world.shards)


def hashed(world: World, counts: Ints, rng: np.random.Generator) -> Placement:
    """``counts`` shards for each tenant by a hash: any that come."""
    tenant = np.repeat(np.arange(len(counts)), counts)
    shard = np.concatenate([rng.choice(world.shards, count, replace=False) for count in counts])
    return Placement(tenant, shard)


def balanced(world: World, counts: Ints, rng: np.random.Generator, tries: int = 4) -> Placement:
    """As :func:`hashed`, by a map that is kept: each place goes to the one with the fewest producers of ``tries`` that
    the hash gives."""
    sizes, load = world.sizes(), np.zeros(world.shards)
    tenants, shards = [], []
    for tenant, count in enumerate(counts):
        drawn = rng.choice(world.shards, min(count * tries, world.shards), replace=False)
        chosen = drawn[np.argsort(load[drawn], kind="stable")[:count]]
        load[chosen] += sizes[tenant] / count
        tenants.append(np.full(count, tenant))
        shards.append(chosen)
    return Placement(np.concatenate(tenants), np.concatenate(shards))


def by_size(world: World, each: int = 500, least: int = 2) -> Ints:
    """Shards of each tenant: one for ``each`` producers, ``least`` for the smallest."""
    return np.clip(-(-world.sizes() // each), least, world.shards)


def demands(world: World, placement: Placement) -> dict[str, float]:
    """What a placement asks of its shards: connections, and transactions for a second."""
    sizes, spread = world.sizes(), placement.spread(world.tenants)
    connections = placement.connections(world)
    load = np.bincount(placement.shard, world.rate * (sizes / spread)[placement.tenant], world.shards)
    return {
        "connections of a producer": float((sizes * placement.links(world.tenants)).sum() / sizes.sum()),
        "of the median shard": float(np.median(connections)),
        "of the fullest": float(connections.max()),
        "shards over max_connections": float((connections > world.settings.max_connections).sum()),
        "transactions/s of the busiest": float(load.max()),
        "to the mean": float(load.max() / load.mean()),
        "groups of the fullest": float(np.bincount(placement.shard, minlength=world.shards).max()),
    }


# Check-backs


@dataclasses.dataclass
class Undecided:
    """Transactions whose outcome was lost, as columns; times in seconds from the beginning."""

    shard: Ints
    tenant: Ints
    prepared: Floats
    answerable: Floats
    """When a checker can say more than UNKNOWN of it."""

    def __len__(self) -> int:
        return len(self.shard)


@dataclasses.dataclass(frozen=True)
class Played:
    """What became of them. ``seconds`` from prepare to decision, of those that were decided; ``questions`` by step and
    for the busiest shard in one."""

    seconds: Floats
    undecided: int
    parked: int
    questions: int
    busiest: float
    """The most questions that one shard asked in a second."""
    nobody: int
    """How many waited, at some time, because nobody of their tenant was there."""


def play(
    world: World,
    placement: Placement,
    lost: Undecided,
    there: Callable[[float], Floats],
    until: float,
    away: dict[int, tuple[float, float]],
) -> Played:
    """Ask about transactions as brokers do, until ``until``.

    ``there`` gives, for a time, how many producers of each tenant are connected; ``away`` are shards that answer
    nothing between two times. A question is due ``transaction_timeout`` after the prepare, then every
    ``check_interval``, ``check_max`` times; it is asked only if somebody of the tenant is there and the broker has
    asked fewer than it can in this step, the oldest first. Somebody who is there answers ``1 / answer_seconds`` for a
    second.
    """
    settings, count = world.settings, len(lost)
    due = lost.prepared + settings.transaction_timeout
    asked = np.zeros(count, np.int64)
    decided = np.full(count, np.nan)
    parked = np.zeros(count, bool)
    nobody = np.zeros(count, bool)
    questions, busiest = 0, 0.0
    place = lost.tenant * world.shards + lost.shard
    spread = np.maximum(placement.spread(world.tenants), 1)
    for step in range(int(until / STEP)):
        now = step * STEP
        ready = np.flatnonzero((due <= now) & np.isnan(decided) & ~parked)
        if away:
            gone = [shard for shard, (start, end) in away.items() if start <= now < end]
            ready = ready[~np.isin(lost.shard[ready], gone)]
        if not len(ready):
            continue
        members = there(now)
        absent = members[lost.tenant[ready]] <= 0.0
        nobody[ready[absent]] = True
        ready = ready[~absent]
        out = asked[ready] >= settings.check_max
        parked[ready[out]] = True
        ready = ready[~out]
        # The tenants' checkers: what they answer in a step goes to their shards in equal parts, and never to fewer than
        # one.
        able = members * STEP / world.answer_seconds
        ready = _first(ready, place[ready], due[ready], np.maximum(able / spread, 1.0)[lost.tenant[ready]])
        ready = _first(ready, lost.shard[ready], due[ready], np.full(len(ready), world.questions * STEP))
        if not len(ready):
            continue
        asked[ready] += 1
        questions += len(ready)
        busiest = max(busiest, np.bincount(lost.shard[ready]).max() / STEP)
        answered = lost.answerable[ready] <= now
        decided[ready[answered]] = now + world.answer_seconds
        due[ready[~answered]] = now + settings.check_interval
    seconds = (decided - lost.prepared)[~np.isnan(decided)]
    left = int(np.isnan(decided).sum() - parked.sum())
    return Played(seconds, left, int(parked.sum()), questions, busiest, int(nobody.sum()))


def _first(rows: Ints, of: Ints, due: Floats, most: Floats) -> Ints:
    """Of ``rows``, the oldest ``most`` of each value in ``of``."""
    if not len(rows):
        return rows
    order = np.lexsort((due, of))
    sorted_of = of[order]
    begins = np.flatnonzero(np.r_[True, sorted_of[1:] != sorted_of[:-1]])
    rank = np.arange(len(rows)) - np.repeat(begins, np.diff(np.r_[begins, len(rows)]))
    return rows[order[rank < most[order]]]


def steady(world: World, placement: Placement, seconds: float, rng: np.random.Generator) -> Undecided:
    """Outcomes that are lost as always, for so long."""
    count = rng.poisson(world.producers * world.rate * world.lost * seconds)
    return _drawn(world, placement, rng.uniform(0.0, seconds, count), world.sizes().astype(np.float64), rng)


def _drawn(
    world: World, placement: Placement, prepared: Floats, weights: Floats, rng: np.random.Generator
) -> Undecided:
    """Transactions prepared at these times, of tenants in proportion to ``weights``, each on one of its tenant's
    shards."""
    tenant = rng.choice(world.tenants, len(prepared), p=weights / weights.sum())
    spread = placement.spread(world.tenants)
    begins = np.r_[0, np.cumsum(spread)[:-1]]
    order = np.argsort(placement.tenant, kind="stable")
    picked = order[begins[tenant] + (rng.random(len(tenant)) * spread[tenant]).astype(np.int64)]
    return Undecided(placement.shard[picked], tenant, prepared, prepared.copy())


def killed(
    world: World, placement: Placement, part: float, rng: np.random.Generator
) -> tuple[Undecided, Callable[[float], Floats]]:
    """A part of all producers killed at time 0, each back after its restart; what they had open, and who is there when.
    Tenants with fewer producers than two may be away whole."""
    sizes = world.sizes()
    dead = rng.binomial(sizes, part)
    back = [np.sort(rng.uniform(*world.restart, count)) for count in dead]
    all_back, owners = np.concatenate(back), np.repeat(np.arange(world.tenants), dead)
    count = rng.poisson(dead.sum() * world.rate * world.open_seconds)
    lost = _drawn(world, placement, np.zeros(count), dead.astype(np.float64), rng)

    def there(now: float) -> Floats:
        return sizes - np.bincount(owners[all_back > now], minlength=world.tenants).astype(np.float64)

    return lost, there


def hanging(world: World, placement: Placement, part: float, seconds: float, rng: np.random.Generator) -> Undecided:
    """The databases of a part of all tenants hang for so long: what was prepared meanwhile is undecided, and a checker
    answers UNKNOWN until the end. A producer waits with its next transaction for the one that hangs, up to its pool of
    eight."""
    sizes = world.sizes()
    hung = rng.random(world.tenants) < part
    each = min(world.rate * seconds, 8.0)
    count = rng.poisson(sizes[hung].sum() * each)
    lost = _drawn(
        world, placement, rng.uniform(0.0, min(8.0 / world.rate, seconds), count), sizes * hung.astype(np.float64), rng
    )
    lost.answerable[:] = seconds
    return lost


# What one broker does


def measured(options: argparse.Namespace) -> tuple[float, float]:
    """Questions with their answers, and connections with a session, of one real broker, for a second."""
    with broker(options) as url:
        questions = max(_questions(url, run) for run in range(options.repeats))
        connects = max(_connects(url) for _ in range(options.repeats))
    return questions, connects


def _questions(url: str, run: int, count: int = 20_000) -> float:
    """Questions and answers while ``count`` transactions of one group are due and one producer with a batch checker is
    there."""
    group, done, seen = f"asked-{run}", threading.Event(), [0]

    class Checker:
        def decide_ids(self, ids: pa.FixedSizeBinaryArray) -> npt.NDArray[np.uint8]:
            seen[0] += len(ids)
            if seen[0] >= count:
                done.set()
            return np.full(len(ids), int(mq.COMMIT), np.uint8)

    with mq.connect(url) as bus:
        with bus.producer(group, unasked=True) as silent:
            silent.prepare_batch(pa.table({"topic": ["asked"] * count, "body": [b"x"] * count}))
        bus.admin.alter_producers(group, transaction_timeout=0.001, why="all are due at once")
        began = time.perf_counter()
        with bus.producer(group, checker=Checker()):
            done.wait(120)
            return seen[0] / (time.perf_counter() - began)


def _connects(url: str, count: int = 200) -> float:
    """Connections, each with a producer's session, made by as many threads as there are cores to spare."""

    def one(number: int) -> mq.Bus:
        bus = mq.connect(url)
        bus.producer(f"connects-{number % 8}", unasked=True).send("connects", b"x")
        return bus

    began = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        buses = list(pool.map(one, range(count)))
    took = time.perf_counter() - began
    for bus in buses:
        bus.close()
    return count / took


# The figures

BEST = "by size, a map, 2 links each"
RULES: dict[str, Callable[[World, np.random.Generator], Placement]] = {
    "4 shards each, hashed": lambda world, rng: hashed(world, np.full(world.tenants, 4), rng),
    "by size, hashed": lambda world, rng: hashed(world, by_size(world), rng),
    "by size, a map": lambda world, rng: balanced(world, by_size(world), rng),
    BEST: lambda world, rng: dataclasses.replace(balanced(world, by_size(world), rng), most_links=2),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--measured", metavar="Q,C", help="questions and connections of one broker for a second, measured before"
    )
    parser.add_argument("--shards", type=int, default=World.shards)
    parser.add_argument("--producers", type=int, default=World.producers)
    parser.add_argument("--tenants", type=int, default=World.tenants)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.measured:
        questions, connects = map(float, options.measured.split(","))
    else:
        questions, connects = measured(options)
    world = World(options.shards, options.producers, options.tenants, questions=questions, connects=connects)
    report = Report("many shards, simulated", options)
    report.begin()
    report.add("questions of one broker", "/s", "-", [questions])
    report.add("connections of one broker", "/s", "-", [connects])
    for name, place in RULES.items():
        for what, value in demands(world, place(world, np.random.default_rng(options.seed))).items():
            report.add(f"{name}: {what}", "", "-", [value])
    rng = np.random.default_rng(options.seed)
    placement = RULES[BEST](world, rng)
    for name, played in scenes(world, placement, rng).items():
        tell(report, name, played)
    back = placement.connections(world) / connects
    report.add(
        "a shard fails over: all its clients are back",
        "s",
        "-",
        [float(np.median(back)), float(back.min()), float(back.max())],
    )
    report.end()


def scenes(world: World, placement: Placement, rng: np.random.Generator) -> dict[str, Played]:
    """The four hours of need, five minutes of each."""
    sizes = world.sizes().astype(np.float64)
    dead, there = killed(world, placement, 1 / 3, rng)
    first = int(placement.shard[0])

    def all_there(now: float) -> Floats:
        return sizes

    ordinary = steady(world, placement, 240.0, rng)
    hung = hanging(world, placement, 0.05, 60.0, rng)
    return {
        "lost outcomes as always": play(world, placement, ordinary, all_there, 300.0, {}),
        "a third of all producers killed": play(world, placement, dead, there, 300.0, {}),
        "5 % of tenants' databases hang 60 s": play(world, placement, hung, all_there, 300.0, {}),
        "one shard away for 5 s": play(world, placement, _of(ordinary, first), all_there, 300.0, {first: (60.0, 65.0)}),
    }


def _of(lost: Undecided, shard: int) -> Undecided:
    mine = np.flatnonzero(lost.shard == shard)
    return Undecided(lost.shard[mine], lost.tenant[mine], lost.prepared[mine], lost.answerable[mine])


def tell(report: Report, name: str, played: Played) -> None:
    """The figures of one scene."""
    report.add(f"{name}: transactions", "", "-", [float(len(played.seconds) + played.undecided + played.parked)])
    if len(played.seconds):
        for percent in (50, 99, 100):
            report.add(f"{name}: decided after, p{percent}", "s", "-", [float(np.percentile(played.seconds, percent))])
    report.add(f"{name}: not decided at the end", "", "0", [float(played.undecided)])
    report.add(f"{name}: parked", "", "0", [float(played.parked)])
    report.add(f"{name}: questions", "", "-", [float(played.questions)])
    report.add(f"{name}: of the busiest shard", "/s", "-", [played.busiest])
    report.add(f"{name}: waited, nobody was there", "", "-", [float(played.nobody)])


if __name__ == "__main__":
    main()
