"""Killed between any two commands, and several processes at once: every id is in the half set or in one run, or was in
both sets.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from set_sites import RedisSite, SqlSite

import forked
from escrowmq.compensation.sets.seam import SetStore
from escrowmq.testing.set_conformance import FAR_US, LEASE, new_store_name

CHILD = Path(__file__).with_name("sets_child.py")
IDS = [bytes([n]) * 16 for n in range(10)]
LEFT = set(IDS[3:])
NEW = {bytes([200 + n]) * 16 for n in range(5)}

PLACES = {
    "take:sets.taking": (LEFT, set()),
    "take:sets.taken": (LEFT, set()),
    "take-all:sets.taking:2": (LEFT, set()),
    "take-all:sets.taken:2": (LEFT, set()),
    "settle:sets.settled": (LEFT, set(IDS[3:8])),
    "settle-all:sets.settled": (LEFT, LEFT),
    "announce:sets.halves-added": (LEFT | NEW, set()),
    "enter:sets.commits-added": (set(IDS[6:]), set()),
    "take-all": (LEFT, set()),
}
"""Where it dies: what must be found afterwards, less what was settled."""


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
def site(request: pytest.FixtureRequest) -> SqlSite | RedisSite:
    return request.getfixturevalue(f"{request.param}_site")


def fill(store: SetStore) -> None:
    store.add_halves(IDS, range(10))
    store.add_commits(IDS[:3], 1)


def everything(site: SqlSite | RedisSite, store: SetStore) -> list[bytes]:
    """Adopt whatever was left lying, and take the rest."""
    found: list[bytes] = []
    seen = Counter[str]()
    for run in runs_of(site, store.name):
        site.expire(store.name, run)
    while (run := store.adopt(LEASE, 100)) is not None or (run := store.take(FAR_US, 100, LEASE)) is not None:
        seen[run.name] += 1
        found += run.ids
    assert set(seen.values()) <= {1}, "a run was adopted twice"
    return found


def runs_of(site: SqlSite | RedisSite, name: str) -> list[str]:
    if isinstance(site, SqlSite):
        with site.admin.connect() as admin:
            return list(admin.exec_driver_sql("SELECT run FROM escrow_set_run").scalars())
    import redis

    with redis.Redis.from_url(site.url) as admin:
        return [run.decode() for run in admin.zrange(f"escrowmq:sets:{{{name}}}:leases", 0, -1)]


@pytest.mark.invariant("I48")
def test_killed_between_any_two_commands(site: SqlSite | RedisSite) -> None:
    name = new_store_name()
    stores = [site.open(f"{name}-{number}") for number in range(len(PLACES))]
    for store in stores:
        fill(store)
    command = [sys.executable, str(CHILD), site.url, name, *PLACES]
    told = forked.run(command)
    assert told.stdout.splitlines() == [f"{place} {'killed' if ':' in place else 'ended 0'}" for place in PLACES], (
        told.stderr
    )
    for store, (place, (there, settled)) in zip(stores, PLACES.items(), strict=True):
        found = everything(site, store)
        assert len(found) == len(set(found)), f"{place}: an id is in two runs"
        assert set(found) == there - settled, place
        assert store.sizes().half == 0
        store.close()


def test_processes_at_once_share_no_id_and_lose_none(site: SqlSite | RedisSite) -> None:
    """Another process and this one take from one store until nothing is left."""
    name = new_store_name()
    store = site.open(f"{name}-0")
    ids = [number.to_bytes(16, "big") for number in range(300)]
    store.add_halves(ids, range(300))
    store.add_commits(ids[::3], 1)
    code = (
        "import sys; from escrowmq.compensation import open_sets; store = open_sets(sys.argv[1], sys.argv[2]); "
        "print(flush=True)\n"
        "sys.stdin.readline()\n"
        "while (run := store.take(1 << 52, 7, 600.0)) is not None: print(*(i.hex() for i in run.ids))\n"
    )
    command = [sys.executable, "-c", code, site.url, f"{name}-0"]
    pipe = subprocess.PIPE
    other = forked.Forked(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    found: list[bytes] = []
    assert other.stdout is not None
    assert other.stdin is not None
    try:
        other.stdout.readline()
        other.stdin.write("go\n")
        other.stdin.flush()
        while (run := store.take(FAR_US, 7, LEASE)) is not None:
            found += run.ids
    finally:
        out, err = other.communicate()
    assert other.returncode == 0, err
    found += [bytes.fromhex(text) for text in out.split()]
    assert Counter(found) == Counter(identity for n, identity in enumerate(ids) if n % 3)
    store.close()
