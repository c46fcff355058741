"""Redis fails in its ways: each gives a clear error, and nothing is lost or half done."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from cutting import CuttingProxy
from set_sites import PATIENT

from escrowmq.compensation import RedisSets
from escrowmq.compensation.sets.seam import Sizes
from escrowmq.errors import Code, Denied, EscrowError, Misuse, Overloaded, Unknown
from escrowmq.platform.failpoints import Failpoint, arm
from escrowmq.testing.set_conformance import FAR_US, LEASE, new_ids, new_store_name
from escrowmq_lab.servers import redis as redis_serving
from escrowmq_lab.servers.process import Server, free_port

SHORT = 0.3
"""Seconds of patience where nobody is going to answer."""


@pytest.fixture
def redis_url(redis_url: str) -> str:
    """For stores that must have an answer."""
    return redis_url + PATIENT


@pytest.fixture
def admin(redis_url: str) -> Iterator[redis.Redis]:
    """Of the server that tests share: left as it was found."""
    with redis.Redis.from_url(redis_url) as client:
        yield client
        client.replicaof("NO", "ONE")
        client.config_set("appendfsync", "always")
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
        client.flushall()


@pytest.fixture
def name() -> str:
    return new_store_name()


@pytest.fixture
def sets(redis_url: str, name: str) -> Iterator[RedisSets]:
    store = RedisSets(redis_url, name)
    yield store
    store.close()


@pytest.fixture
def at_place() -> Iterator[Callable[[str, Callable[[], Any]], None]]:
    """Something is done the first time that the store comes to a place."""
    yield lambda place, act: arm(Failpoint(place, 1, act))
    arm()


def key(name: str, which: str) -> str:
    return f"escrowmq:sets:{{{name}}}:{which}"


def fails(call: Callable[[], Any], code: Code) -> EscrowError:
    with pytest.raises(EscrowError) as raised:
        call()
    assert raised.value.code is code, raised.value
    return raised.value


def filled(sets: RedisSets) -> list[bytes]:
    """Ten announced, three of them done."""
    ids = new_ids(10)
    sets.add_halves(ids, range(10))
    sets.add_commits(ids[:3], 1)
    return ids


def taken_whole(sets: RedisSets, ids: list[bytes]) -> None:
    """What :func:`filled` left is all there."""
    run = sets.take(FAR_US, 100, LEASE)
    assert run is not None
    assert run.ids == tuple(ids[3:])
    assert sets.sizes() == Sizes(0, 0, 7, 1, 3)


# Nobody there, or nobody who answers


def test_no_server() -> None:
    sets = RedisSets(f"redis://127.0.0.1:{free_port()}/0", "cart")
    problem = fails(lambda: sets.add_halves(new_ids(1), [1]), Code.DISCONNECTED)
    assert isinstance(problem, Unknown)
    assert not problem.left, "it was not even sent"
    sets.close()


def test_a_server_that_says_nothing(redis_server: Server, name: str) -> None:
    sets, patient = RedisSets(redis_server.url, name, timeout=SHORT), RedisSets(redis_server.url + PATIENT, name)
    ids = filled(patient)
    redis_server.pause()
    try:
        assert isinstance(fails(sets.epoch, Code.TIMED_OUT), Unknown)
        fails(lambda: sets.take(FAR_US, 10, LEASE), Code.TIMED_OUT)
    finally:
        redis_server.resume()
    with redis.Redis.from_url(redis_server.url) as admin:
        for left in admin.keys(key(name, "run:*")):
            admin.zadd(key(name, "leases"), {left.rpartition(b":")[2]: 0})  # if the step was done when it woke up
    run = patient.adopt(LEASE, 10) or patient.take(FAR_US, 100, LEASE)
    assert run is not None
    assert run.ids == tuple(ids[3:])
    sets.close()
    patient.close()


def test_writes_that_are_paused(redis_server: Server, sets: RedisSets, admin: redis.Redis, name: str) -> None:
    impatient = RedisSets(redis_server.url, name, timeout=SHORT)
    ids = filled(sets)
    admin.execute_command("CLIENT", "PAUSE", 3_600_000, "WRITE")
    try:
        assert isinstance(fails(lambda: impatient.take(FAR_US, 10, LEASE), Code.TIMED_OUT), Unknown)
        fails(lambda: impatient.add_commits(ids, 1), Code.TIMED_OUT)
    finally:
        admin.execute_command("CLIENT", "UNPAUSE")
    assert sets.sizes().half in (0, 10), "all of a step, or nothing"
    impatient.close()


# Connections that are lost


@pytest.fixture
def proxy(redis_url: str) -> Iterator[CuttingProxy]:
    made = CuttingProxy(redis_url)
    yield made
    made.close()


@pytest.mark.invariant("I48")
@pytest.mark.parametrize("place", [b"ZDIFFSTORE", b"ZREM", b"EXEC"])
def test_a_connection_lost_inside_a_step_has_done_nothing(
    sets: RedisSets, proxy: CuttingProxy, name: str, place: bytes
) -> None:
    ids = filled(sets)
    cut = RedisSets(proxy.url, name)
    cut.epoch()
    proxy.cut_at = place
    assert isinstance(fails(lambda: cut.take(FAR_US, 10, LEASE), Code.DISCONNECTED), Unknown)
    assert proxy.cuts == 1
    proxy.cut_at = None
    taken_whole(cut, ids)
    cut.close()


def test_an_answer_that_is_lost_leaves_a_run_that_is_adopted(
    sets: RedisSets, proxy: CuttingProxy, admin: redis.Redis, name: str
) -> None:
    ids = filled(sets)
    cut = RedisSets(proxy.url, name)
    cut.epoch()
    proxy.cut_at, proxy.answered = b"EXEC", True
    fails(lambda: cut.take(FAR_US, 10, LEASE), Code.DISCONNECTED)
    proxy.cut_at = None
    assert sets.sizes() == Sizes(0, 0, 7, 1, 3), "it was done, and whole"
    [run] = admin.zrange(key(name, "leases"), 0, -1)
    admin.zadd(key(name, "leases"), {run: 0})
    adopted = cut.adopt(LEASE, 10)
    assert adopted is not None
    assert adopted.ids == tuple(ids[3:])
    cut.close()


@pytest.mark.parametrize("answered", [False, True])
def test_an_entry_whose_answer_is_lost_is_made_again(
    sets: RedisSets, proxy: CuttingProxy, name: str, answered: bool
) -> None:
    cut = RedisSets(proxy.url, name)
    cut.epoch()
    proxy.cut_at, proxy.answered = b"ZADD", answered
    ids = new_ids(5)
    assert isinstance(fails(lambda: cut.add_halves(ids, range(5)), Code.DISCONNECTED), Unknown)
    assert sets.sizes().half == (5 if answered else 0)
    proxy.cut_at = None
    cut.add_halves(ids, range(5))
    assert sets.sizes().half == 5
    cut.close()


# Keys that hold something else


@pytest.mark.parametrize("which", ["half", "commit", "leases"])
def test_a_wrong_type_under_a_key_is_refused_and_the_rest_stays(
    sets: RedisSets, admin: redis.Redis, name: str, which: str
) -> None:
    ids = new_ids(4)
    first = key(name, which)
    admin.set(first, "not ours")
    if which != "half":
        sets.add_halves(ids, range(4))
    if which != "commit":
        sets.add_commits(ids[:1], 1)
    broken: list[Callable[[], Any]] = [lambda: sets.take(FAR_US, 10, LEASE), sets.sizes]
    broken += {
        "half": [lambda: sets.add_halves(ids, range(4))],
        "commit": [lambda: sets.add_commits(ids, 1), lambda: sets.forget_commits(FAR_US)],
        "leases": [lambda: sets.adopt(LEASE, 1), lambda: sets.renew("run", LEASE)],
    }[which]
    if which == "half":
        broken = [call for call in broken if call != sets.sizes] + [sets.sizes]
    for call in broken:
        assert isinstance(fails(call, Code.BAD_SETTING), Misuse)
    assert admin.get(first) == b"not ours", "it is not ours to change"
    admin.delete(first)
    sets.add_halves(ids, range(4))
    sets.add_commits(ids[:1], 1)
    run = sets.take(FAR_US, 10, LEASE)
    assert run is not None
    assert run.ids == tuple(ids[1:])


def test_a_wrong_type_under_a_run_a_token_and_a_turn(sets: RedisSets, admin: redis.Redis, name: str) -> None:
    ids = filled(sets)
    admin.zadd(key(name, "leases"), {"strange": 0})
    admin.set(key(name, "run:strange"), "not ours")
    for call in (lambda: sets.take(FAR_US, 10, LEASE), lambda: sets.adopt(LEASE, 1), lambda: sets.left("strange", 1)):
        fails(call, Code.BAD_SETTING)
    admin.delete(key(name, "run:strange"))
    assert sets.adopt(LEASE, 1) is None, "a run without ids is gone"
    admin.rpush(key(name, "token"), "not ours")
    fails(sets.epoch, Code.BAD_SETTING)
    admin.delete(key(name, "turn"), key(name, "token"))
    admin.rpush(key(name, "turn"), "not ours")
    taken_whole(sets, ids)  # the turn is set anew whatever it was


@pytest.mark.parametrize("which", ["commit", "leases"])
def test_a_type_that_changes_in_the_middle_of_a_step(
    sets: RedisSets, admin: redis.Redis, name: str, which: str, at_place: Callable[[str, Callable[[], Any]], None]
) -> None:
    """A command that fails undoes nothing of a step: what it has taken is put back."""
    ids = filled(sets)
    at_place("sets.taking", lambda: admin.set(key(name, which), "not ours"))
    fails(lambda: sets.take(FAR_US, 10, LEASE), Code.BAD_SETTING)
    assert set(admin.zrange(key(name, "half"), 0, -1)) == set(ids)


# Others in between


def test_a_step_that_another_came_before_is_computed_again(
    sets: RedisSets, redis_url: str, name: str, at_place: Callable[[str, Callable[[], Any]], None]
) -> None:
    ids, others = filled(sets), []
    with_others = RedisSets(redis_url, name)
    at_place("sets.taking", lambda: others.append(with_others.take(5, 10, LEASE)))
    run = sets.take(FAR_US, 10, LEASE)
    assert run is not None
    assert (others[0].ids, run.ids) == ((ids[3], ids[4]), tuple(ids[5:]))
    with_others.close()


def test_an_entry_that_comes_in_the_middle_of_a_step_counts(
    sets: RedisSets, redis_url: str, name: str, at_place: Callable[[str, Callable[[], Any]], None]
) -> None:
    """The difference is computed by the step itself, not from what was read before."""
    ids = filled(sets)
    consumer = RedisSets(redis_url, name)
    at_place("sets.taking", lambda: (consumer.add_commits(ids[3:6], 1), consumer.add_halves(ids[9:], [0])))
    run = sets.take(FAR_US, 10, LEASE)
    assert run is not None
    assert set(run.ids) == set(ids[6:])
    assert sets.sizes() == Sizes(0, 0, 4, 1, 6)
    consumer.close()


def test_two_that_adopt_at_one_moment(
    sets: RedisSets, redis_url: str, admin: redis.Redis, name: str, at_place: Callable[[str, Callable[[], Any]], None]
) -> None:
    filled(sets)
    run = sets.take(FAR_US, 10, LEASE)
    assert run is not None
    admin.zadd(key(name, "leases"), {run.name: 0})
    other, adopted = RedisSets(redis_url, name), []
    at_place("sets.adopting", lambda: adopted.append(other.adopt(LEASE, 10)))
    assert sets.adopt(LEASE, 10) is None
    assert adopted == [run]
    at_place("sets.adopting", lambda: adopted.append(other.renew(run.name, LEASE)))
    admin.zadd(key(name, "leases"), {run.name: 0})
    assert sets.adopt(LEASE, 10) is None, "its scheduler came back in time"
    assert adopted == [run, True]
    other.close()


# Full, forbidden, read-only, loading


@pytest.mark.invariant("I48")
def test_a_full_server_takes_nothing_and_loses_nothing(
    sets: RedisSets, admin: redis.Redis, name: str, at_place: Callable[[str, Callable[[], Any]], None]
) -> None:
    ids = filled(sets)
    more = new_ids(3)
    sets.epoch()
    at_place("sets.taking", lambda: admin.config_set("maxmemory", 1))
    full: list[Callable[[], Any]] = [
        lambda: sets.take(FAR_US, 10, LEASE),  # full from its middle on
        lambda: sets.take(FAR_US, 10, LEASE),
        lambda: sets.add_halves(more, range(3)),
        lambda: sets.add_commits(more, 1),
    ]
    for call in full:
        assert isinstance(fails(call, Code.DISK_FULL), Overloaded)
    sets.epoch()
    admin.config_set("maxmemory", 0)
    assert sets.sizes() == Sizes(10, 3, 0, 0, 0)
    taken_whole(sets, ids)
    admin.config_set("maxmemory", 1)
    [run] = admin.zrange(key(name, "leases"), 0, -1)
    sets.settle(run.decode(), ids)
    admin.config_set("maxmemory", 0)
    assert sets.sizes() == Sizes(0, 0, 0, 0, None), "settling gives memory back"


@pytest.mark.parametrize("missing", ["zadd", "zdiffstore", "zrem", "watch", "info"])
def test_a_user_without_rights(sets: RedisSets, admin: redis.Redis, redis_url: str, name: str, missing: str) -> None:
    ids = filled(sets)
    admin.execute_command("ACL", "SETUSER", "clerk", "reset", "on", ">word", "~escrowmq:sets:*", "+@all", f"-{missing}")
    try:
        clerk = RedisSets(f"redis://clerk:word@{redis_url.partition('@')[2]}", name)
        assert isinstance(fails(lambda: clerk.take(FAR_US, 10, LEASE), Code.DENIED), Denied)
        clerk.close()
    finally:
        admin.execute_command("ACL", "DELUSER", "clerk")
    taken_whole(sets, ids)


def test_a_wrong_password_and_foreign_keys(admin: redis.Redis, redis_url: str) -> None:
    wrong = RedisSets("redis://:wrong@" + redis_url.partition("@")[2], "cart")
    fails(wrong.sizes, Code.DENIED)
    wrong.close()
    admin.execute_command("ACL", "SETUSER", "stranger", "reset", "on", ">word", "~other:*", "+@all")
    stranger = RedisSets("redis://stranger:word@" + redis_url.partition("@")[2], "cart")
    fails(lambda: stranger.add_halves(new_ids(1), [1]), Code.DENIED)
    stranger.close()
    admin.execute_command("ACL", "DELUSER", "stranger")


def test_a_replica_takes_nothing(sets: RedisSets, admin: redis.Redis, redis_url: str, name: str) -> None:
    ids, epoch = filled(sets), sets.epoch()
    admin.replicaof("127.0.0.1", free_port())
    for call in (lambda: sets.add_halves(new_ids(1), [1]), lambda: sets.take(FAR_US, 10, LEASE), sets.epoch):
        assert isinstance(fails(call, Code.QUEUE_FULL), Overloaded)
    late = RedisSets(redis_url, name)
    fails(late.sizes, Code.QUEUE_FULL)
    late.close()
    admin.replicaof("NO", "ONE")
    taken_whole(sets, ids)
    assert sets.epoch() != epoch, "what it followed may have had less"


def test_a_server_that_loads_its_data(tmp_path: Path, name: str) -> None:
    with redis_serving.serving(tmp_path, durable=False) as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.mset({f"key-{n}": "x" * 100 for n in range(5000)})
            admin.save()
        server.kill()
        # 50 ms a key, so it loads for as long as the test looks; it answers every now and then
        slow = [*server.command, "--key-load-delay", "50000", "--loading-process-events-interval-bytes", "1024"]
        loading = Server(server.url, slow, ready=lambda _: True, log=server.log)
        loading.start()
        sets = RedisSets(server.url + PATIENT, name)
        try:
            while True:
                with pytest.raises(EscrowError) as raised:
                    sets.epoch()
                if raised.value.code is not Code.DISCONNECTED:  # it does not listen yet
                    break
            assert raised.value.code is Code.QUEUE_FULL
            assert "loading" in raised.value.message
        finally:
            sets.close()
            loading.kill()


# What it keeps


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_a_server_that_throws_sets_away_is_refused(redis_url: str, admin: redis.Redis, policy: str) -> None:
    sets = RedisSets(redis_url, "cart")
    sets.epoch()
    admin.config_set("maxmemory", 100 << 20)
    admin.config_set("maxmemory-policy", policy)
    fails(sets.epoch, Code.BAD_SETTING)
    late = RedisSets(redis_url, "cart")
    fails(lambda: late.add_halves(new_ids(1), [1]), Code.BAD_SETTING)
    admin.config_set("maxmemory-policy", "volatile-lru")
    late.epoch()  # nothing of the sets has a time to live
    sets.close()
    late.close()


def test_how_durable_it_must_be_can_be_asked_for(redis_url: str, admin: redis.Redis) -> None:
    asked = RedisSets(redis_url, "cart", durability="always")
    asked.epoch()
    assert "synced to disk" in asked.keeps
    asked.close()
    admin.config_set("appendfsync", "everysec")
    late = RedisSets(redis_url, "cart", durability="always")
    assert isinstance(fails(late.epoch, Code.BAD_SETTING), Misuse)
    late.close()
    less = RedisSets(redis_url, "cart", durability="everysec")
    less.epoch()
    less.close()
    fails(lambda: RedisSets(redis_url, "cart", durability="often"), Code.BAD_ARGUMENT)


@pytest.mark.parametrize("durable", [True, False])
def test_a_restart_changes_the_epoch(tmp_path: Path, name: str, durable: bool) -> None:
    with redis_serving.serving(tmp_path, durable=durable) as server:
        sets = RedisSets(server.url + PATIENT, name)
        ids, epoch = filled(sets), sets.epoch()
        server.kill()
        problem = fails(sets.epoch, Code.DISCONNECTED)
        assert isinstance(problem, Unknown)
        server.start()
        again = sets.epoch()
        assert again != epoch
        assert sets.epoch() == again
        assert sets.sizes().half == (10 if durable else 0)
        if durable:
            taken_whole(sets, ids)
        server.kill()
        shutil.rmtree(tmp_path / "redis")
        (tmp_path / "redis").mkdir()
        server.start()
        assert sets.epoch() not in (epoch, again), "another server under the same address"
        assert sets.sizes() == Sizes(0, 0, 0, 0, None)
        sets.close()


@pytest.mark.invariant("I48")
def test_emptied_under_use(sets: RedisSets, admin: redis.Redis, name: str, redis_url: str) -> None:
    """Whoever uses it goes on, and the epoch says that something was lost."""
    emptied, failures = threading.Event(), []

    def use() -> None:
        store = RedisSets(redis_url, name)
        try:
            rounds = 0
            while rounds < 3:
                ids = filled(store)
                run = store.take(FAR_US, 10, LEASE)
                if run is not None:
                    assert store.renew(run.name, LEASE) in (True, False)
                    store.settle(run.name, ids)
                rounds += emptied.is_set()
        except BaseException as failure:
            failures.append(failure)
        finally:
            store.close()

    epoch, user = sets.epoch(), threading.Thread(target=use)
    user.start()
    for _ in range(20):
        admin.flushall()
    emptied.set()
    user.join()
    assert not failures, failures
    assert sets.epoch() != epoch


def test_an_entry_in_the_callers_own_step(sets: RedisSets, admin: redis.Redis, name: str) -> None:
    ids = filled(sets)
    with admin.pipeline(transaction=True) as step:
        step.incr("effect")
        sets.add_commits_tx(step, ids, 7)
        step.execute()
    assert sets.sizes().commits == 10
    with admin.pipeline(transaction=True) as step:
        step.watch("mark")
        step.multi()
        sets.add_commits_tx(step, new_ids(2), 7)
        admin.set("mark", "another was here")
        with pytest.raises(redis.WatchError):
            step.execute()
    assert sets.sizes().commits == 10
    assert sets.take(FAR_US, 10, LEASE) is None


def test_urls() -> None:
    for url in ("redis://127.0.0.1:port/0", "http://127.0.0.1", "redis://127.0.0.1/0?protocol=3"):
        fails(lambda url=url: RedisSets(url, "cart"), Code.BAD_URL)
