"""Databases fail in their ways: each gives a clear error, and nothing is lost or half done."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from cutting import CuttingProxy
from set_sites import SqlSite
from sqlalchemy.orm import Session

from escrowmq.compensation import SqlSets, open_sets
from escrowmq.compensation.sets import durability
from escrowmq.compensation.sets.seam import SetStore, Sizes
from escrowmq.errors import Code, Corrupt, Denied, EscrowError, Misuse, Overloaded, Unknown
from escrowmq.platform.failpoints import Failpoint, arm
from escrowmq.testing.set_conformance import FAR_US, LEASE, new_ids, new_store_name
from escrowmq_lab.servers.process import free_port

SITES = ["sqlite", "postgresql", "mariadb"]


@pytest.fixture(params=SITES)
def site(request: pytest.FixtureRequest) -> SqlSite:
    return request.getfixturevalue(f"{request.param}_site")


@pytest.fixture(params=SITES[1:])
def server_site(request: pytest.FixtureRequest) -> SqlSite:
    return request.getfixturevalue(f"{request.param}_site")


@pytest.fixture
def proxy(postgresql_site: SqlSite) -> Iterator[CuttingProxy]:
    made = CuttingProxy(postgresql_site.url)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sets.db"


@pytest.fixture
def at_place() -> Iterator[Callable[[str, Callable[[], Any]], None]]:
    """Something is done the first time that the store comes to a place."""
    yield lambda place, act: arm(Failpoint(place, 1, act))
    arm()


def fails(call: Callable[[], Any], code: Code) -> EscrowError:
    with pytest.raises(EscrowError) as raised:
        call()
    assert raised.value.code is code, raised.value
    return raised.value


def filled(sets: SetStore) -> list[bytes]:
    """Ten announced, three of them done."""
    ids = new_ids(10)
    sets.add_halves(ids, range(10))
    sets.add_commits(ids[:3], 1)
    return ids


def taken_whole(sets: SetStore, ids: list[bytes]) -> None:
    """What :func:`filled` left is all there."""
    run = sets.take(FAR_US, 100, LEASE)
    assert run is not None
    assert run.ids == tuple(ids[3:])
    assert sets.sizes() == Sizes(0, 0, 7, 1, 3)


# SQLite


def test_a_locked_file_is_not_now(file: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{file}", connect_args={"timeout": 0})
    sets = SqlSets(engine, "cart")
    ids = filled(sets)
    with sa.create_engine(f"sqlite:///{file}").connect() as other:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        for call in (lambda: sets.take(FAR_US, 10, LEASE), lambda: sets.add_commits(ids, 1)):
            assert isinstance(fails(call, Code.QUEUE_FULL), Overloaded)
        other.exec_driver_sql("ROLLBACK")
    taken_whole(sets, ids)
    sets.close()
    engine.dispose()


def test_a_full_file_takes_nothing_and_loses_nothing(file: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{file}")
    most: list[int] = []

    @sa.event.listens_for(engine, "checkout")
    def limit(connection: Any, *_: Any) -> None:
        connection.execute(f"PRAGMA max_page_count = {most[0] if most else 1 << 30}")

    sets = SqlSets(engine, "cart")
    ids = filled(sets)
    with engine.connect() as connection:
        most.append(connection.exec_driver_sql("PRAGMA page_count").scalar() or 0)
    more = new_ids(5000)
    assert isinstance(fails(lambda: sets.add_halves(more, range(5000)), Code.DISK_FULL), Overloaded)
    assert sets.sizes() == Sizes(10, 3, 0, 0, 0), "all of a call, or nothing"
    most[0] = 1 << 30
    sets.add_halves(more, range(100, 5100))
    assert sets.sizes().half == 5010
    run = sets.take(100, 10, LEASE)
    assert run is not None
    assert run.ids == tuple(ids[3:])
    sets.close()
    engine.dispose()


def test_files_that_are_no_database_read_only_or_nowhere(file: Path, tmp_path: Path) -> None:
    file.write_bytes(b"no database at all" * 1000)
    damaged = open_sets(f"sqlite:///{file}", "cart")
    assert isinstance(fails(damaged.sizes, Code.DAMAGED), Corrupt)
    assert file.read_bytes() == b"no database at all" * 1000
    nowhere = open_sets(f"sqlite:///{tmp_path}/no/such/folder.db", "cart")
    assert isinstance(fails(nowhere.sizes, Code.DISCONNECTED), Unknown)
    good = open_sets(f"sqlite:///{tmp_path}/good.db", "cart")
    ids = filled(good)
    reader = open_sets(f"sqlite:///file:{tmp_path}/good.db?mode=ro&uri=true", "cart")
    assert isinstance(fails(lambda: reader.add_commits(ids, 1), Code.DENIED), Denied)
    taken_whole(good, ids)
    for store in (damaged, nowhere, good, reader):
        store.close()


def test_a_file_that_is_not_synced_has_the_machines_start_in_its_epoch(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sa.create_engine(f"sqlite:///{file}")
    sets = SqlSets(engine, "cart")
    epoch = sets.epoch()

    @sa.event.listens_for(engine, "checkout")
    def hurry(connection: Any, *_: Any) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    boot = file.parent / "boot_id"
    boot.write_text("first\n")
    monkeypatch.setattr(durability, "BOOT", boot)
    assert sets.epoch() == f"{epoch}.first"
    boot.write_text("second\n")
    assert sets.epoch() == f"{epoch}.second"
    boot.unlink()
    assert isinstance(fails(sets.epoch, Code.BAD_SETTING), Misuse)
    sets.close()
    engine.dispose()


# Servers


@pytest.mark.parametrize("scheme", ["postgresql", "mariadb"])
def test_no_server(scheme: str) -> None:
    sets = open_sets(f"{scheme}://nobody:word@127.0.0.1:{free_port()}/nothing", "cart")
    problem = fails(lambda: sets.add_halves(new_ids(1), [1]), Code.DISCONNECTED)
    assert isinstance(problem, Unknown)
    assert "word" not in str(problem)
    sets.close()


def test_a_wrong_password(server_site: SqlSite) -> None:
    url = sa.make_url(server_site.url).set(password="wrong").render_as_string(hide_password=False)
    sets = open_sets(url, "cart")
    assert isinstance(fails(sets.sizes, Code.DENIED), Denied)
    sets.close()


def test_a_connection_lost_inside_a_step_has_done_nothing(
    server_site: SqlSite, at_place: Callable[[str, Callable[[], Any]], None]
) -> None:
    sets = server_site.open(new_store_name())
    ids = filled(sets)

    def kill() -> None:
        with server_site.admin.connect() as admin:
            if admin.dialect.name == "postgresql":
                text = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
                admin.exec_driver_sql(text.replace("%", "%%"))
                return
            others = "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()"
            for thread in admin.exec_driver_sql(others).scalars().all():
                admin.exec_driver_sql(f"KILL {thread}")

    at_place("sets.taking", kill)
    assert isinstance(fails(lambda: sets.take(FAR_US, 10, LEASE), Code.DISCONNECTED), Unknown)
    taken_whole(sets, ids)
    sets.close()


@pytest.mark.parametrize("answered", [False, True])
def test_a_commit_whose_answer_is_lost(postgresql_site: SqlSite, proxy: CuttingProxy, answered: bool) -> None:
    name = new_store_name()
    sets, cut = postgresql_site.open(name), open_sets(proxy.url, name)
    ids = filled(cut)
    proxy.cut_at, proxy.answered = b"COMMIT\0", answered  # and not READ COMMITTED
    assert isinstance(fails(lambda: cut.take(FAR_US, 10, LEASE), Code.DISCONNECTED), Unknown)
    assert proxy.cuts == 1
    proxy.cut_at = None
    if answered:
        assert sets.sizes() == Sizes(0, 0, 7, 1, 3), "it was done, and whole"
        with postgresql_site.admin.begin() as admin:
            admin.exec_driver_sql("UPDATE escrow_set_run SET leased_until_us = 0")
        run = cut.adopt(LEASE, 10)
        assert run is not None
        assert run.ids == tuple(ids[3:])
    else:
        taken_whole(cut, ids)
    sets.close()
    cut.close()


@pytest.mark.parametrize(
    ("state", "times", "code"),
    [
        ("40001", 2, None),
        ("40P01", 2, None),
        ("40001", 99, Code.QUEUE_FULL),
        ("53100", 1, Code.DISK_FULL),
        ("25006", 1, Code.QUEUE_FULL),
        ("42501", 1, Code.DENIED),
    ],
)
def test_errors_that_postgresql_gives_in_the_middle_of_a_step(
    postgresql_site: SqlSite, state: str, times: int, code: Code | None
) -> None:
    """The database itself raises them, so many times: a serialization failure and a deadlock are repeated, the rest is
    told."""
    sets = postgresql_site.open(new_store_name())
    ids, mark = filled(sets), f"mark_{secrets.token_hex(6)}"
    body = (
        f"IF nextval('{mark}') <= {times} THEN RAISE EXCEPTION 'on purpose' USING ERRCODE = '{state}'; END IF; "
        "RETURN NEW;"
    )
    with postgresql_site.admin.begin() as admin:
        admin.exec_driver_sql(f"CREATE SEQUENCE {mark}")
        admin.exec_driver_sql(f"CREATE FUNCTION {mark}() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {body} END$$")
        admin.exec_driver_sql(
            f"CREATE TRIGGER {mark} BEFORE INSERT ON escrow_set_run FOR EACH ROW EXECUTE FUNCTION {mark}()"
        )
    try:
        if code is not None:
            fails(lambda: sets.take(FAR_US, 10, LEASE), code)
            assert sets.sizes() == Sizes(10, 3, 0, 0, 0), "nothing half done"
    finally:
        if code is not None:
            with postgresql_site.admin.begin() as admin:
                admin.exec_driver_sql(f"DROP FUNCTION {mark} CASCADE")
    taken_whole(sets, ids)
    if code is None:
        with postgresql_site.admin.begin() as admin:
            assert admin.exec_driver_sql(f"SELECT last_value FROM {mark}").scalar() == times + 1
            admin.exec_driver_sql(f"DROP FUNCTION {mark} CASCADE")
    sets.close()


def test_two_that_lock_in_different_orders_are_repeated(postgresql_site: SqlSite) -> None:
    """A real deadlock: somebody holds what the announcement wants second, and wants what it holds first."""
    while not undone_by_a_deadlock(postgresql_site):
        pass


def undone_by_a_deadlock(postgresql_site: SqlSite) -> bool:
    """Whether the announcement was undone and repeated. It looks for a deadlock once, a second after it began to wait:
    if the other came to wait only after that, it is the other that is undone."""
    name = new_store_name()
    sets, ids = postgresql_site.open(name), sorted(new_ids(2))
    sets.add_halves(ids, [10, 10])
    row = "UPDATE escrow_half_set SET announced_us = announced_us WHERE id = %s"
    with postgresql_site.admin.connect() as other:
        other.exec_driver_sql("SET deadlock_timeout = '10s'")  # so that it is the store's transaction that is undone
        other.commit()
        other.exec_driver_sql(row, (ids[1],))
        work = threading.Thread(target=lambda: sets.add_halves(ids, [5, 5]))
        work.start()
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        with postgresql_site.admin.connect() as watcher:
            while not watcher.exec_driver_sql(waiting).scalar():
                watcher.rollback()
        try:
            other.exec_driver_sql(row, (ids[0],))
            repeated = True
        except sa.exc.OperationalError as problem:
            if "deadlock detected" not in str(problem):
                raise
            repeated = False
        other.rollback()
        work.join()
    run = sets.take(6, 10, LEASE)
    assert run is not None
    assert run.ids == tuple(ids), "both times are the earlier ones"
    sets.close()
    return repeated


def test_a_user_without_rights(postgresql_site: SqlSite) -> None:
    sets = postgresql_site.open("rights")
    ids = filled(sets)
    role = f"clerk_{secrets.token_hex(6)}"
    with postgresql_site.admin.begin() as admin:
        admin.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD 'word'")
    url = sa.make_url(postgresql_site.url).set(username=role, password="word").render_as_string(hide_password=False)
    clerk = open_sets(url, "rights")
    assert isinstance(fails(lambda: clerk.take(FAR_US, 10, LEASE), Code.DENIED), Denied)
    clerk.close()
    with postgresql_site.admin.begin() as admin:
        admin.exec_driver_sql(f"DROP ROLE {role}")
    taken_whole(sets, ids)
    sets.close()


def test_a_server_that_syncs_late_has_its_start_in_the_epoch(mariadb_site: SqlSite) -> None:
    """The table in memory that a start empties; here it is emptied by hand."""
    sets = mariadb_site.open(new_store_name())
    first = sets.epoch()
    assert sets.epoch() == first
    with mariadb_site.admin.begin() as admin:
        admin.exec_driver_sql("DELETE FROM escrow_set_start")
    assert sets.epoch() != first
    sets.close()


def test_commits_of_a_server_that_answers_early_are_waited_for(postgresql_site: SqlSite) -> None:
    """The servers of tests have synchronous_commit off; the store's own transactions ask for better."""
    sets = postgresql_site.open(new_store_name())
    assert isinstance(sets, SqlSets)
    sets.epoch()
    seen = sets._transact(lambda connection: connection.exec_driver_sql("SHOW synchronous_commit").scalar())
    assert seen == "on"
    sets.close()


# Tables


def test_tables_of_another_shape_are_refused_and_left_alone(site: SqlSite) -> None:
    site.empty()
    with site.admin.begin() as admin:
        admin.exec_driver_sql("CREATE TABLE escrow_taken (id INTEGER PRIMARY KEY, mine INTEGER)")
        admin.exec_driver_sql("INSERT INTO escrow_taken VALUES (1, 2)")
    sets = site.open("cart")
    for call in (sets.epoch, sets.sizes, lambda: sets.add_halves(new_ids(1), [1])):
        assert isinstance(fails(call, Code.BAD_SETTING), Misuse)
    with site.admin.begin() as admin:
        assert admin.exec_driver_sql("SELECT mine FROM escrow_taken").scalar() == 2
        admin.exec_driver_sql("DROP TABLE escrow_taken")
    taken_whole(sets, filled(sets))
    sets.close()
    site.empty()


def test_a_column_that_is_gone_under_use_is_told(site: SqlSite) -> None:
    sets = site.open(new_store_name())
    ids = filled(sets)
    with site.admin.begin() as admin:
        admin.exec_driver_sql("ALTER TABLE escrow_commit_set RENAME COLUMN entered_us TO other_us")
    for call in (lambda: sets.add_commits(new_ids(1), 1), sets.sizes):
        assert isinstance(fails(call, Code.BAD_SETTING), Misuse)
    with site.admin.begin() as admin:
        admin.exec_driver_sql("ALTER TABLE escrow_commit_set RENAME COLUMN other_us TO entered_us")
    taken_whole(sets, ids)
    sets.close()
    site.empty()


def test_whoever_restores_a_backup_deletes_the_stores_row(site: SqlSite) -> None:
    name = new_store_name()
    sets = site.open(name)
    ids, epoch = filled(sets), sets.epoch()
    with site.admin.begin() as admin:
        admin.exec_driver_sql("DELETE FROM escrow_set_store")
    assert sets.epoch() != epoch
    taken_whole(sets, ids)
    sets.close()


# In the caller's transaction


def test_effect_and_entry_are_one_transaction(site: SqlSite) -> None:
    sets = site.open(new_store_name())
    assert isinstance(sets, SqlSets)
    ids = filled(sets)
    with Session(site.admin) as session:
        sets.add_commits_tx(session, ids[3:6], 1)
        session.rollback()
    assert sets.sizes().commits == 3
    with Session(site.admin) as session, session.begin():
        sets.add_commits_tx(session, ids[3:6], 1)
    with site.admin.begin() as connection:
        sets.add_commits_tx(connection, ids[:7], 2)
        sets.add_commits_tx(connection, [], 2)
    assert sets.sizes().commits == 7
    run = sets.take(FAR_US, 10, LEASE)
    assert run is not None
    assert run.ids == tuple(ids[7:])
    sets.close()


def test_a_transaction_before_there_are_tables(site: SqlSite) -> None:
    """Nothing is made inside it: MariaDB would commit it."""
    site.empty()
    sets = site.open("cart")
    assert isinstance(sets, SqlSets)
    with site.admin.begin() as connection:
        assert isinstance(fails(lambda: sets.add_commits_tx(connection, new_ids(1), 1), Code.NO_TABLES), Misuse)
    sets.epoch()
    with site.admin.begin() as connection:
        sets.add_commits_tx(connection, new_ids(1), 1)
    assert sets.sizes().commits == 1
    sets.close()
