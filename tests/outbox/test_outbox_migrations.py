"""The tables are made, upgraded step by step, and found wanting with a clear word; by migrate and by ddl alike."""

import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from outbox_world import patience
from sqlalchemy.exc import IntegrityError

import escrowmq as mq
from escrowmq.outbox import check_schema, claim_tx, ddl, metadata, migrate, migrations, send_tx
from escrowmq.outbox.acts import list_acts, verify_acts
from escrowmq.outbox.tables import LANES, SCHEMA_VERSION, trans_driven, trans_lane, trans_message, trans_schema

GOLDEN = Path(__file__).parent / "golden"


def shape(engine: sa.Engine) -> dict[str, object]:
    """Columns, keys and indexes of every table, as the database tells them."""
    told = sa.inspect(engine)
    return {
        name: (
            [(c["name"], str(c["type"]), c["nullable"]) for c in told.get_columns(name)],
            told.get_pk_constraint(name)["constrained_columns"],
            sorted((i["name"], tuple(i["column_names"]), bool(i["unique"])) for i in told.get_indexes(name)),
        )
        for name in sorted(told.get_table_names())
    }


def version(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(sa.select(trans_schema.c.version))


def lanes(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(trans_lane))


def refusal(engine: sa.Engine) -> mq.Misuse:
    with engine.begin() as connection, pytest.raises(mq.Misuse) as refused:
        check_schema(connection)
    return refused.value


def test_migrate_makes_everything_and_again_changes_nothing(engine: sa.Engine) -> None:
    assert refusal(engine).code is mq.Code.NO_TABLES
    assert migrate(engine) == 0
    made = shape(engine)
    assert set(made) == set(metadata.tables)
    assert (version(engine), lanes(engine)) == (SCHEMA_VERSION, LANES)
    assert migrate(engine) == SCHEMA_VERSION
    assert shape(engine) == made
    with engine.begin() as connection:
        check_schema(connection)


def test_the_texts_for_alembic_make_the_same_tables(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        for text in ddl("mariadb" if engine.dialect.name == "mysql" else engine.dialect.name):
            connection.exec_driver_sql(text)
    by_texts = shape(engine)
    assert (version(engine), lanes(engine)) == (SCHEMA_VERSION, LANES)
    assert migrate(engine) == SCHEMA_VERSION
    with engine.begin() as connection:
        for table in metadata.tables:
            connection.exec_driver_sql(f"DROP TABLE {table}")
    migrate(engine)
    assert shape(engine) == by_texts


def test_tables_without_their_rows_are_version_0_and_are_filled(engine: sa.Engine) -> None:
    """What create_all, or an Alembic migration without the texts, leaves."""
    metadata.create_all(engine)
    assert refusal(engine).code is mq.Code.SCHEMA_VERSION
    assert "no version row" in str(refusal(engine))
    made = shape(engine)
    assert migrate(engine) == 0
    assert (shape(engine), version(engine), lanes(engine)) == (made, SCHEMA_VERSION, LANES)


def test_a_migration_that_was_cut_short_is_taken_up(engine: sa.Engine) -> None:
    kind = "mysql" if engine.dialect.name == "mysql" else engine.dialect.name
    texts, first = ddl(kind), len(ddl(kind, 0, 1))
    for cut in (1, first // 2, first - 2, first, first + 1):
        with engine.begin() as connection:
            for text in texts[:cut]:
                connection.exec_driver_sql(text)
        assert migrate(engine) == (cut >= first)
        assert (version(engine), lanes(engine)) == (SCHEMA_VERSION, LANES)
        with engine.begin() as connection:
            for table in sa.inspect(connection).get_table_names():
                connection.exec_driver_sql(f"DROP TABLE {table}")


def test_several_migrate_at_once(engine: sa.Engine) -> None:
    start, results = threading.Barrier(4), []

    def one() -> None:
        own = sa.create_engine(engine.url, **patience(engine.url))
        start.wait()
        try:
            results.append(migrate(own))
        finally:
            own.dispose()

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, SCHEMA_VERSION, SCHEMA_VERSION, SCHEMA_VERSION]
    assert lanes(engine) == LANES


def test_an_older_version_is_upgraded_step_by_step_and_keeps_its_rows(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored tables of version 1 under a program that knows 6: each step runs once, in order."""
    kind = "mariadb" if engine.dialect.name == "mysql" else engine.dialect.name
    with engine.begin() as connection:
        for text in (GOLDEN / f"version-1-{kind}.sql").read_text().split(";\n"):
            if text.strip():
                connection.exec_driver_sql(text)
        kept = b"from version one"
        zeros = dict.fromkeys(("lane", "state", "delay_us", "attempts", "due_us", "created_us"), 0)
        connection.execute(sa.insert(trans_message).values(id=kept, topic="orders", body=b"x", **zeros))
        mark = "INSERT INTO trans_recv_log (consumer_group, message_id, seen_us) VALUES (:group, :id, 1)"
        connection.execute(sa.text(mark), {"group": "cart", "id": kept})
    steps = {
        **migrations.STEPS,
        5: lambda dialect: [sa.text("ALTER TABLE trans_message ADD COLUMN colour INTEGER")],
        6: lambda dialect: [sa.text("UPDATE trans_message SET colour = 7")],
    }
    monkeypatch.setattr(migrations, "STEPS", steps)
    monkeypatch.setattr(migrations, "SCHEMA_VERSION", 6)
    told = refusal(engine)
    assert (told.code, "older" in told.message, "migrate" in told.hint) == (mq.Code.SCHEMA_VERSION, True, True)
    assert ddl(kind, 5)[0] == "UPDATE trans_message SET colour = 7"
    assert migrate(engine) == 1
    assert migrate(engine) == 6
    with engine.connect() as connection:
        found = connection.execute(sa.text("SELECT id, colour FROM trans_message")).all()
    assert [(bytes(row[0]), row[1]) for row in found] == [(kept, 7)]
    with engine.begin() as connection:  # a mark of version 1 names no topic: it stands for each
        assert not claim_tx(connection, message_id=kept, topic="orders", group="cart")
        assert claim_tx(connection, message_id=kept, topic="orders", group="points")
        assert claim_tx(connection, message_id=kept, topic="hints", group="points")


def test_a_failed_step_leaves_the_version_where_it_was(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate(engine)
    bad = {**migrations.STEPS, 5: lambda dialect: [sa.text("INSERT INTO trans_schema VALUES (1, 9)")]}
    monkeypatch.setattr(migrations, "STEPS", bad)
    monkeypatch.setattr(migrations, "SCHEMA_VERSION", 5)
    with pytest.raises(IntegrityError):
        migrate(engine)
    assert version(engine) == 4
    monkeypatch.setattr(migrations, "STEPS", {**bad, 5: lambda dialect: []})
    assert migrate(engine) == 4
    assert version(engine) == 5


@pytest.mark.parametrize("kind", migrations.DIALECTS)
@pytest.mark.parametrize("step", migrations.STEPS)
def test_the_texts_of_each_version_are_those_that_were_released(kind: str, step: int) -> None:
    """If this fails, tables.py was changed: released tables change by a new step, and the steps before stay as they
    are.

    (Before a version's first release: ``python tests/outbox/golden/write.py`` writes its texts anew.)
    """
    assert ";\n".join([*ddl(kind, step - 1, step), ""]) == (GOLDEN / f"version-{step}-{kind}.sql").read_text()


def test_a_mark_of_version_1_still_tells_a_repeat(engine: sa.Engine) -> None:
    """Tables of version 1 are upgraded in place, also by texts, also when the step was cut short."""
    kind = "mysql" if engine.dialect.name == "mysql" else engine.dialect.name
    with engine.begin() as connection:
        for text in (GOLDEN / f"version-1-{kind}.sql").read_text().split(";\n"):
            if text.strip():
                connection.exec_driver_sql(text)
        connection.exec_driver_sql(ddl(kind, 1, 2)[0])  # and then it died
    assert version(engine) == 1
    assert migrate(engine) == 1
    assert (version(engine), migrate(engine)) == (SCHEMA_VERSION, SCHEMA_VERSION)


def test_stuck_rows_of_version_3_keep_what_they_have_and_the_record_of_acts_begins_empty(engine: sa.Engine) -> None:
    kind = "mysql" if engine.dialect.name == "mysql" else engine.dialect.name
    with engine.begin() as connection:
        for text in ddl(kind, 0, 3):
            connection.exec_driver_sql(text)
        row = "INSERT INTO trans_driven (id, producer_group, state, topic, body, delay_us, attempts, created_us)"
        connection.execute(
            sa.text(f"{row} VALUES (:id, 'shop', 5, 'orders', :id, 0, 0, 0)"), {"id": b"from version 3  "}
        )
    assert migrate(engine) == 3
    with engine.connect() as connection:
        kept = connection.execute(sa.select(trans_driven)).mappings().one()
    assert (bytes(kept["id"]), kept["was"], kept["reason"]) == (b"from version 3  ", None, None)
    assert (list_acts(engine), verify_acts(engine)["broken"]) == ([], [])


def test_newer_tables_are_refused_and_left_alone(shop: sa.Engine) -> None:
    with shop.begin() as connection:
        connection.execute(sa.update(trans_schema).values(version=SCHEMA_VERSION + 1))
    told = refusal(shop)
    assert (told.code, "newer" in told.message, "upgrade escrowmq" in told.hint) == (
        mq.Code.SCHEMA_VERSION,
        True,
        True,
    )
    with pytest.raises(mq.Misuse, match="SCHEMA_VERSION"):
        migrate(shop)
    with shop.begin() as connection, pytest.raises(mq.Misuse, match="newer"):
        send_tx(connection, "orders", b"x")
    assert version(shop) == SCHEMA_VERSION + 1


def test_migrate_works_beside_the_begin_recipe_for_sqlite(tmp_path: Path) -> None:
    """SQLAlchemy's recipe for working savepoints: no driver transactions, BEGIN from a listener."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    sa.event.listen(engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    assert migrate(engine) == 0
    with engine.connect() as connection:
        send_tx(connection, "orders", b"x")
        connection.rollback()
        send_tx(connection, "orders", b"y")
        connection.commit()
    with engine.connect() as connection:
        assert connection.scalars(sa.select(trans_message.c.body)).all() == [b"y"]
    engine.dispose()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_another_schema_by_the_translate_map(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA tenant_7")
    tenant = engine.execution_options(schema_translate_map={None: "tenant_7"})
    assert migrate(tenant) == 0
    with tenant.begin() as connection:
        send_tx(connection, "orders", b"x")
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM tenant_7.trans_message").scalar() == 1
        with pytest.raises(mq.Misuse, match="NO_TABLES"):
            send_tx(connection, "orders", b"x")


@pytest.mark.parametrize(("kind", "start"), [("oracle", 0), ("sqlite", -1), ("sqlite", SCHEMA_VERSION + 1)])
def test_wrong_questions_to_ddl(kind: str, start: int) -> None:
    with pytest.raises(mq.Misuse, match="BAD_ARGUMENT"):
        ddl(kind, start)


def test_the_way_between_two_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration of Alembic's names both ends, so it says the same for ever."""
    monkeypatch.setattr(migrations, "STEPS", {**migrations.STEPS, 5: lambda dialect: [sa.text("SELECT 5")]})
    monkeypatch.setattr(migrations, "SCHEMA_VERSION", 5)
    assert ddl("sqlite", 0, 4) + ddl("sqlite", 4, 5) == ddl("sqlite")
    assert ddl("sqlite", 4, 5)[0] == "SELECT 5"
    with pytest.raises(mq.Misuse, match="no way from version 2 to 1"):
        ddl("sqlite", 2, 1)


def test_ddl_from_this_version_is_nothing() -> None:
    assert ddl("postgresql", SCHEMA_VERSION) == []


def test_migrate_wants_an_engine() -> None:
    with pytest.raises(mq.Misuse, match=r"outbox\.aio"):
        migrate("sqlite://")  # type: ignore[arg-type]
