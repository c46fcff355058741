"""Loads PostgreSQL with the rows of an outbox, one connection per caller: see ``_load.py``. Works: threads, batches."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
from _load import arguments, in_threads

TABLE = "CREATE TABLE IF NOT EXISTS bench_outbox (id bigserial PRIMARY KEY, topic text, body bytea, at timestamptz DEFAULT now())"


def main() -> None:
    given = arguments()
    address = given.address.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(1)")  # several processes make it at once
        connection.execute(TABLE)

    def caller(number: int) -> Callable[[], int]:
        connection = psycopg.connect(address)
        values = [("bench", given.body)] * given.rows

        def step() -> int:
            with connection.cursor() as cursor:
                cursor.executemany("INSERT INTO bench_outbox (topic, body) VALUES (%s, %s)", values)
            connection.commit()
            return given.rows

        return step

    in_threads(given, caller)


if __name__ == "__main__":
    main()
