"""Loads PostgreSQL with the rows of an outbox, one connection per caller: see ``_load.py``. Works: threads, batches,
queue.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg
from _load import arguments, begin, end, in_threads

TABLE = (
    "CREATE TABLE IF NOT EXISTS bench_outbox (id bigserial PRIMARY KEY, topic text, body bytea, at timestamptz "
    "DEFAULT now())"
)
INSERT = "INSERT INTO bench_outbox (topic, body) VALUES (%s, %s)"


def insert(connection: psycopg.Connection, values: list[tuple[str, bytes]]) -> None:
    """One transaction, its rows in a pipeline."""
    with connection.cursor() as cursor:
        cursor.executemany(INSERT, values)
    connection.commit()


def main() -> None:
    given = arguments()
    address = given.address.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(1)")  # several processes make it at once
        connection.execute(TABLE)
    if given.work == "queue":
        connection, left = psycopg.connect(address), given.rows
        begun = begin()
        while left:
            size = min(left, 1000)
            insert(connection, [("bench", given.body)] * size)
            left -= size
        end(begun, given.rows, [])
        return

    def caller(number: int) -> Callable[[], int]:
        connection = psycopg.connect(address)
        values = [("bench", given.body)] * given.rows

        def step() -> int:
            insert(connection, values)
            return given.rows

        return step

    in_threads(given, caller)


if __name__ == "__main__":
    main()
