"""An act on a database and its record are one transaction: both or neither; and an edit of the record is found at its
place.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError, ProgrammingError
from test_outbox_locked import locked

import escrowmq as mq
import forked
from escrowmq.acts.telling import acting_user
from escrowmq.errors import Code
from escrowmq.outbox import State, acts, attention, migrate, send_batch_tx, tables
from escrowmq.outbox.acts import each_act, list_acts, record, verify_acts
from escrowmq.outbox.tables import trans_act, trans_act_head, trans_message
from escrowmq.platform import failpoints

HERE = Path(__file__).parent
N = trans_act.c.number


def wait(engine: sa.Engine, count: int) -> list[bytes]:
    with engine.begin() as connection:
        ids = send_batch_tx(connection, [mq.Message("orders", b"%d" % n) for n in range(count)])
        connection.execute(sa.update(trans_message).values(state=State.WAITING))
    return ids


def states(engine: sa.Engine) -> dict[bytes, State]:
    with engine.connect() as connection:
        rows = connection.execute(sa.select(trans_message.c.id, trans_message.c.state)).all()
    return {bytes(row.id): State(row.state) for row in rows}


def child(engine: sa.Engine, *words: str) -> list[Any]:
    url = engine.url.render_as_string(hide_password=False)
    command = [sys.executable, HERE / "acts_child.py", url, *words]
    ran = forked.run(command, cwd=HERE)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


# Both or neither


@pytest.mark.invariant("I44")
def test_killed_at_every_step_it_is_done_and_recorded_or_neither(shop: sa.Engine) -> None:
    ids = wait(shop, 4)
    forks = child(shop, "killed", *(identity.hex() for identity in ids))
    assert [fork["killed"] for fork in forks] == [True] * 4
    told = states(shop)
    for fork in forks:
        done = told[bytes.fromhex(fork["id"])] is State.DISCARDED
        recorded = any(act["what"]["messages"] == [fork["id"]] for act in each_act(shop))
        assert (done, recorded) == (fork["done"], fork["done"])
    assert verify_acts(shop)["broken"] == []
    assert attention.retry(shop, ids, why="and it goes on")[3].code is Code.OK


@pytest.mark.invariant("I44")
def test_every_act_killed_around_its_commit_is_done_and_recorded_or_neither(sqlite_shop: sa.Engine) -> None:
    wait(sqlite_shop, 1)
    id_, zeros = b"\1" * 16, {"attempts": 1, "delay_us": 0, "created_us": 0}
    mark = {"consumer_group": "cart", "message_id": id_, "topic": "orders"}
    place = {"consumer_group": "cart", "topic": "orders", "shard": 42, "queue": 0, "stride": 1, "part": 0}
    driven = {"producer_group": "shop", "topic": "orders", "body": b"", "state": 5, "was": 2, "reason": "CONFLICT"}
    case = {"name": "cart", "message_id": id_, "state": 1, "attempts": 5, "first_us": 0, "changed_us": 0, "reason": ""}
    with sqlite_shop.begin() as connection:
        connection.execute(sa.update(trans_message).values(id=id_))
        connection.execute(sa.insert(tables.trans_recv_log).values(seen_us=1, **mark))
        connection.execute(sa.insert(tables.trans_prepared).values(body=b"", prepared_us=1, **mark))
        connection.execute(sa.insert(tables.trans_recv_offset).values(next_offset=9, epoch=1, **place))
        connection.execute(sa.insert(tables.trans_driven).values(id=id_, transaction_id=id_, **driven, **zeros))
        connection.execute(sa.insert(tables.trans_compensation_case).values(**case))
    forks = child(sqlite_shop, "each")
    assert {fork["act"] for fork in forks} == {fork["act"] for fork in forks if fork["place"] == "outbox.act-committed"}
    for fork in forks:
        if fork["place"] == "outbox.act-recorded":
            assert fork["changed"] == [], fork
        else:
            assert {"trans_act", "trans_act_head"} < set(fork["changed"]), fork
    found = list_acts(sqlite_shop)
    assert [act["act"] for act in found] == [fork["act"] for fork in forks[::2]]
    assert {tuple(act["ended"].get("results", {"OK": 1})) for act in found} == {("OK",)}
    assert verify_acts(sqlite_shop)["broken"] == []


@pytest.mark.invariant("I44")
def test_two_processes_at_once_make_one_chain(shop: sa.Engine) -> None:
    ids = wait(shop, 20)
    assert child(shop, "beside", *(identity.hex() for identity in ids)) == [[0, 0]]
    found = list_acts(shop)
    assert [act["number"] for act in found] == list(range(1, 41))
    assert {act["by"] for act in found} == {"operator 0", "operator 1"}
    done = [act["what"]["messages"][0] for act in found if act["ended"]["results"] == {"OK": 1}]
    assert sorted(done) == sorted(identity.hex() for identity in ids), "each was discarded once"
    verified = verify_acts(shop)
    assert (verified["records"], verified["broken"], verified["last"]) == (40, [], found[-1]["hash"])


@pytest.mark.parametrize("step", ["outbox.act-locked", "outbox.act-done", "outbox.act-recorded"])
def test_a_failure_at_any_step_undoes_both(sqlite_shop: sa.Engine, step: str) -> None:
    def fail() -> None:
        raise OperationalError("COMMIT", {}, RuntimeError("the server closed the connection"))

    (identity,) = wait(sqlite_shop, 1)
    failpoints.arm(failpoints.Failpoint(step, 1, fail))
    try:
        with pytest.raises(mq.Unknown, match="the act was not done"):
            attention.discard(sqlite_shop, [identity])
    finally:
        failpoints.arm()
    assert states(sqlite_shop) == {identity: State.WAITING}
    assert list_acts(sqlite_shop) == []


@pytest.mark.invariant("I44")
def test_a_locked_database_is_told_and_nothing_is_done(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 0.01})
    migrate(engine)
    (identity,) = wait(engine, 1)
    with locked(engine), pytest.raises(mq.Overloaded, match=r"QUEUE_FULL.*database is locked.*act was not done"):
        attention.discard(engine, [identity])
    assert (states(engine), list_acts(engine)) == ({identity: State.WAITING}, [])
    engine.dispose()


@pytest.mark.invariant("I44")
def test_a_full_disk_is_told_and_nothing_is_done(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    migrate(engine)
    (identity,) = wait(engine, 1)

    @sa.event.listens_for(engine, "begin")
    def fill(connection: sa.Connection) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

    with (
        pytest.raises(mq.Overloaded, match=r"DISK_FULL.*act was not done"),
        record(engine, "outbox.discard", {"messages": ["x" * 100_000]}) as (connection, _),
    ):
        connection.execute(sa.update(trans_message).values(state=State.DISCARDED))
    assert (states(engine), list_acts(engine)) == ({identity: State.WAITING}, [])
    engine.dispose()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_an_act_does_not_wait_for_ever_for_a_lock(shop: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acts, "PATIENCE", 0.01)
    (identity,) = wait(shop, 1)
    with shop.begin() as other:
        other.execute(sa.select(trans_act_head).with_for_update())
        with pytest.raises(mq.Overloaded, match="act was not done"):
            attention.discard(shop, [identity])
    assert list_acts(shop) == []


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
def test_a_lock_that_was_waited_for_in_vain_is_not_waited_for_again(shop: sa.Engine) -> None:
    (identity,) = wait(shop, 1)
    begun: list[int] = []

    @sa.event.listens_for(shop, "begin")
    def on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("SET innodb_lock_wait_timeout = 1")
        begun.append(1)

    with shop.begin() as other:
        other.execute(sa.select(trans_act_head).with_for_update())
        begun.clear()
        with pytest.raises(mq.Overloaded, match="act was not done"):
            attention.discard(shop, [identity])
    assert (len(begun), list_acts(shop)) == (1, [])


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_who_may_not_write_the_record_does_nothing(shop: sa.Engine) -> None:
    (identity,) = wait(shop, 1)
    role = f"clerk_{identity.hex()[:8]}"
    with shop.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role}")
        connection.exec_driver_sql(f"GRANT SELECT, UPDATE ON ALL TABLES IN SCHEMA public TO {role}")
    sa.event.listen(shop, "begin", lambda connection: connection.exec_driver_sql(f"SET LOCAL ROLE {role}"))
    with pytest.raises(mq.Denied, match="trans_act"):
        attention.discard(shop, [identity])
    assert (states(shop), list_acts(shop)) == ({identity: State.WAITING}, [])
    with shop.begin() as connection:  # no more than this is needed, and with it nobody changes a record
        connection.exec_driver_sql("RESET ROLE")
        connection.exec_driver_sql(f"REVOKE ALL ON trans_act FROM {role}")
        connection.exec_driver_sql(f"GRANT SELECT, INSERT ON trans_act TO {role}")
    assert attention.discard(shop, [identity])[0].code is Code.OK
    for edit in (sa.update(trans_act).values(record="x"), sa.delete(trans_act)):
        with pytest.raises(ProgrammingError, match="permission denied"), shop.begin() as connection:
            connection.execute(edit)
    with shop.begin() as connection:
        connection.exec_driver_sql("RESET ROLE")
        connection.exec_driver_sql(f"DROP OWNED BY {role}")
        connection.exec_driver_sql(f"DROP ROLE {role}")


@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_what_the_database_undid_because_of_others_is_done_again(shop: sa.Engine) -> None:
    """A deadlock: the first try of one act is the victim. (SQLite has one lock, so it has none.)"""
    number: Any = {"mysql": 1213}.get(shop.dialect.name, "40P01")
    raw = type("Raw", (Exception,), {"sqlstate": None if isinstance(number, int) else number})
    (identity,) = wait(shop, 1)

    def fail() -> None:
        raise OperationalError("UPDATE", {}, raw(number))

    failpoints.arm(failpoints.Failpoint("outbox.act-done", 1, fail))
    try:
        (done,) = attention.discard(shop, [identity])
    finally:
        failpoints.arm()
    assert (done.code, len(list_acts(shop)), states(shop)) == (Code.OK, 1, {identity: State.DISCARDED})


def test_an_act_of_many_rows_is_done_in_parts_each_with_its_record(
    sqlite_shop: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acts, "PART", 3)
    ids = wait(sqlite_shop, 7)
    failpoints.arm(failpoints.Failpoint("outbox.act-locked", 3, lambda: (_ for _ in ()).throw(KeyboardInterrupt)))
    try:
        with pytest.raises(KeyboardInterrupt):
            attention.discard(sqlite_shop, ids)
    finally:
        failpoints.arm()
    assert [act["ended"]["results"] for act in list_acts(sqlite_shop)] == [{"OK": 3}, {"OK": 3}]
    assert list(states(sqlite_shop).values()) == [State.DISCARDED] * 6 + [State.WAITING]
    done = attention.discard(sqlite_shop, [ids[0], ids[6], ids[6]])
    assert [one.code for one in done] == [Code.CONFLICT, Code.OK, Code.OK], "of equal ids both have the result"


# The record


def test_acts_are_listed_by_pages_first_or_newest(sqlite_shop: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acts, "_CHUNK", 2)
    for number in range(1, 6):
        with record(sqlite_shop, "test.act", {"number": number}, by="b" * 2000, why="w" * 2000) as (_, ended):
            ended["x"] = number
    found = list_acts(sqlite_shop)
    assert [act["what"]["number"] for act in found] == [1, 2, 3, 4, 5]
    assert [len(found[0]["by"] or ""), len(found[0]["why"] or "")] == [1000, 1000]
    assert found[0]["ended_us"] == found[0]["time_us"]
    assert list_acts(sqlite_shop, 2) == found[:2]
    assert list_acts(sqlite_shop, 2, after=2) == found[2:4]
    assert list_acts(sqlite_shop, 3, newest=True) == found[2:]
    assert list_acts(sqlite_shop, after=5) == []
    assert list(each_act(sqlite_shop, after=3)) == found[3:]
    monkeypatch.setattr(acts, "PAGE_BYTES", 1)
    assert list_acts(sqlite_shop) == found[:1]
    assert list_acts(sqlite_shop, newest=True) == found[4:]


def test_who_is_the_systems_user_unless_it_is_said(sqlite_shop: sa.Engine) -> None:
    with record(sqlite_shop, "test.act", {}):
        pass
    (found,) = list_acts(sqlite_shop)
    assert (found["by"], found["why"], found["ended"]) == (acting_user(), None, {})


Edit = Callable[[sa.Connection], object]


def sql(text: str) -> Edit:
    return lambda connection: connection.exec_driver_sql(text)


def exchanged(connection: sa.Connection) -> None:
    for was, now in ((2, 0), (3, 2), (0, 3)):
        connection.execute(sa.update(trans_act).where(was == N).values(number=now))


def put_in(connection: sa.Connection) -> None:
    for number in (5, 4, 3):
        connection.execute(sa.update(trans_act).where(number == N).values(number=number + 1))
    line = connection.scalar(sa.select(trans_act.c.record).where(N == 2))
    connection.execute(sa.insert(trans_act).values(number=3, record=line))
    connection.execute(sa.update(trans_act_head).values(number=6))


@pytest.mark.invariant("I44")
@pytest.mark.parametrize(
    ("edit", "line", "told"),
    [
        (sql("UPDATE trans_act SET record = replace(record, 'honest 3', 'forged 3')"), 3, "it was changed"),
        (sql("UPDATE trans_act SET record = 'x' WHERE number = 3"), 3, "not a record of an act"),
        (sql("DELETE FROM trans_act WHERE number = 3"), 3, "record 3 is missing before it"),
        (sql("DELETE FROM trans_act WHERE number > 3"), 4, "records 4 to 5 are missing at the end"),
        (sql("DELETE FROM trans_act"), 1, "records 1 to 5 are missing at the end"),
        (exchanged, 2, "missing before it"),
        (put_in, 3, "the previous line is not its predecessor"),
        (sql("INSERT INTO trans_act SELECT 9, record FROM trans_act WHERE number = 5"), 6, "somebody put this behind"),
        (sql("UPDATE trans_act_head SET hash = 'x'"), 5, "it is not the last written record"),
        (sql("DELETE FROM trans_act_head"), 6, "trans_act_head, which names the last record, is missing"),
    ],
)
def test_an_edit_by_hand_is_found_at_its_place(sqlite_shop: sa.Engine, edit: Edit, line: int, told: str) -> None:
    for number in range(1, 6):
        with record(sqlite_shop, "test.act", {}, why=f"honest {number}"):
            pass
    assert verify_acts(sqlite_shop)["broken"] == []
    with sqlite_shop.begin() as connection:
        edit(connection)
    first = verify_acts(sqlite_shop)["broken"][0]
    assert first["line"] == line
    assert told in first["what"]
    list_acts(sqlite_shop)  # what can be read still is
    with record(sqlite_shop, "test.act", {}, why="and acts go on"):
        pass
    assert list_acts(sqlite_shop, 1, newest=True)[0]["why"] == "and acts go on"


def test_each_kind_of_database_keeps_the_bytes_of_a_record_and_shows_an_edit(shop: sa.Engine) -> None:
    odd = "é \u20ac \U0001f600 \\ ' \" % :x \0 \n"
    for _ in range(2):
        with record(shop, "test.act", {odd: [odd]}, by=odd, why=odd) as (_, ended):
            ended[odd] = 1 << 60
    found = list_acts(shop)[1]
    assert (found["by"], found["why"], found["what"], found["ended"]) == (odd, odd, {odd: [odd]}, {odd: 1 << 60})
    assert verify_acts(shop)["broken"] == []
    with shop.begin() as connection:
        line = connection.scalar(sa.select(trans_act.c.record).where(N == 1))
        connection.execute(sa.update(trans_act).where(N == 1).values(record=line.replace("test.act", "best.act")))
    (broken,) = verify_acts(shop)["broken"]
    assert (broken["line"], broken["number"]) == (1, 1)
    assert "was changed" in broken["what"]


def test_who_verifies_beside_acts_sees_no_break(sqlite_shop: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acts, "_CHUNK", 3)
    over = threading.Event()
    problems: list[Exception] = []

    def act() -> None:
        try:
            for number in range(40):
                with record(sqlite_shop, "test.act", {"number": number}):
                    pass
        except Exception as problem:
            problems.append(problem)
        over.set()

    thread = threading.Thread(target=act)
    thread.start()
    while not over.is_set():
        assert verify_acts(sqlite_shop)["broken"] == []
    thread.join()
    assert (problems, verify_acts(sqlite_shop)["records"]) == ([], 40)
