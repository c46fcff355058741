"""The migrations make the tables of ``escrowmq.outbox.tables``, and the models describe them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from django.core.management import call_command
from django.db import connection, transaction

import escrowmq.django.migrations
from escrowmq import django as escrow
from escrowmq import outbox
from escrowmq.django.models import OperatorAction, OutboxMessage
from escrowmq.outbox.tables import LANES, SCHEMA_VERSION, metadata


def describe(engine: sa.Engine) -> dict[str, Any]:
    """What the database says of the tables."""
    found = sa.inspect(engine)
    return {
        name: {
            "columns": [{**column, "type": str(column["type"])} for column in found.get_columns(name)],
            "key": found.get_pk_constraint(name)["constrained_columns"],
            "unique": sorted(tuple(one["column_names"]) for one in found.get_unique_constraints(name)),
            "indexes": sorted((str(one["name"]), one["column_names"]) for one in found.get_indexes(name)),
        }
        for name in sorted(metadata.tables)
    }


def test_a_migration_makes_what_the_outbox_makes(empty: str) -> None:
    call_command("migrate", "escrowmq", verbosity=0)
    engine = escrow.engine_of()
    by_django = describe(engine)
    with engine.begin() as lent:
        assert lent.scalar(sa.text("SELECT version FROM trans_schema")) == SCHEMA_VERSION
        assert lent.scalar(sa.text("SELECT COUNT(*) FROM trans_lane")) == LANES
        for name in metadata.tables:
            lent.exec_driver_sql(f"DROP TABLE {name}")
    own = sa.create_engine(empty)
    outbox.migrate(own)
    assert describe(own) == by_django
    own.dispose()


def test_tables_of_the_outbox_are_taken_over(empty: str) -> None:
    own = sa.create_engine(empty)
    outbox.migrate(own)
    with own.begin() as session:
        outbox.send_tx(session, "orders", b"from before")
    call_command("migrate", "escrowmq", verbosity=0)
    assert bytes(OutboxMessage.objects.get().body) == b"from before"
    call_command("migrate", "escrowmq", "zero", verbosity=0)
    assert "escrow_task" not in connection.introspection.table_names()
    with own.connect() as left:
        assert left.scalar(sa.text("SELECT COUNT(*) FROM trans_message")) == 1, "unsent messages are kept"
    call_command("migrate", "escrowmq", verbosity=0)
    assert OutboxMessage.objects.count() == 1
    own.dispose()


@pytest.mark.parametrize("model", [OutboxMessage, OperatorAction])
def test_a_model_has_the_columns_of_its_table(model: Any) -> None:
    table = metadata.tables[model._meta.db_table]
    fields = {field.column: field.null for field in model._meta.concrete_fields}
    assert fields == {column.name: column.nullable for column in table.columns}
    assert [column.name for column in table.primary_key] == [model._meta.pk.column]


@pytest.mark.usefixtures("site")
def test_a_model_reads_and_changes_a_row() -> None:
    with transaction.atomic():
        identity = escrow.send_tx("orders", b"\x00\xff", key="ключ", properties={"a": "b"})
    row = OutboxMessage.objects.get()
    row.save()
    (same,) = outbox.attention.list_messages(escrow.engine_of(), state=outbox.State.PENDING)
    assert (same.id, same.key, same.properties) == (identity, "ключ", {"a": "b"})
    assert outbox.attention.show(escrow.engine_of(), identity).body == b"\x00\xff"


def test_no_migration_is_missing(empty: str) -> None:
    call_command("makemigrations", "escrowmq", check=True, dry_run=True, verbosity=0)
    folder = Path(escrowmq.django.migrations.__file__).parent
    versions = [int(found[1]) for path in folder.iterdir() if (found := re.search(r"version_(\d+)\.py$", path.name))]
    assert max(versions) == SCHEMA_VERSION, "a version of the tables needs a migration that calls upgrade()"
