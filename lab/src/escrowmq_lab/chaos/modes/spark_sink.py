"""Files of rows become messages by a Spark stream (docs/spark.md, "A stream into a topic, exactly once"). A producer's
local transaction stores the name of a file and its rows; the file is written afterwards, and renamed into the folder
that the stream reads. If the producer dies in between, its next process finds the name in its database and writes the
file. The stream is a program beside the nodes, :mod:`escrowmq_lab.chaos.modes.spark_program`."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import sqlalchemy as sa

from escrowmq.errors import Misuse
from escrowmq.pipeline.java import find_java
from escrowmq_lab.chaos.books import body_of
from escrowmq_lab.chaos.modes.inboxes import InboxMode
from escrowmq_lab.chaos.modes.seam import Regret, Site

SPARK_FOLDER = "spark-sink"
"""Folder inside the run's: ``rows`` has the files, ``checkpoint`` belongs to the query."""

metadata = sa.MetaData()
files = sa.Table(
    "chaos_files",
    metadata,
    sa.Column("name", sa.String(96), primary_key=True),
    sa.Column("consumer", sa.Integer, nullable=False),
    sa.Column("ids", sa.Text, nullable=False),  # JSON
    sa.Column("written", sa.Boolean, nullable=False),
)


class SparkSinkMode(InboxMode):
    """Rows of files, a Spark stream into the topics of all consumers, the inbox."""

    name = "spark-sink"
    promise = (
        "each batch of the query exactly once into the topics: the brokers hold the last batch of the query; "
        "each effect exactly once: the consumer's database holds the inbox's mark"
    )

    @classmethod
    def lacks(cls) -> str | None:
        """Return a message if PySpark or Java is missing."""
        if importlib.util.find_spec("pyspark") is None:
            return "PySpark is not installed"
        try:
            find_java()
        except Misuse as problem:
            return problem.message
        return None

    @classmethod
    def beside(cls, folder: Path, url: str) -> list[str] | None:
        """Return the command of the stream."""
        return [sys.executable, "-m", "escrowmq_lab.chaos.modes.spark_program", str(folder / SPARK_FOLDER), url]

    def place(self, site: Site) -> None:
        """Place files, each in a local transaction; one in ten is rolled back. Confirmed means that the file exists."""
        metadata.create_all(site.engine)
        while True:
            self._write_files(site)
            if site.closing.is_set():
                break
            consumer, ids = self.batch(site, 100)
            dooms = site.chance.random() < 0.1
            site.books.intend(self.name, ids, dooms=dooms)
            row = {"name": f"{ids[0]}.json", "consumer": consumer, "ids": json.dumps(ids), "written": False}
            try:
                with site.engine.begin() as connection:
                    connection.execute(files.insert(), row)
                    site.books.enter(connection, self.name, ids)
                    if dooms:
                        raise Regret
            except Regret:
                continue
        site.placed.set()
        site.ended.wait()

    def _write_files(self, site: Site) -> None:
        """Write all files whose local transaction is committed and that do not exist yet."""
        with site.engine.connect() as connection:
            due = connection.execute(sa.select(files).where(~files.c.written)).all()
        for row in due:
            ids = json.loads(row.ids)
            write_file(site.folder.parent / SPARK_FOLDER, row.name, self.topic(row.consumer), ids)
            with site.engine.begin() as connection:
                connection.execute(sa.update(files).where(files.c.name == row.name).values(written=True))
            site.books.confirm(self.name, ids)


def rows_folder(folder: Path) -> Path:
    """Return the folder that the stream reads, created if necessary."""
    rows = folder / "rows"
    rows.mkdir(parents=True, exist_ok=True)
    return rows


def write_file(folder: Path, name: str, topic: str, ids: Sequence[str]) -> None:
    """Write a file of rows atomically, unless it exists. Only its producer writes it."""
    file = rows_folder(folder) / name
    if file.exists():
        return
    making = folder / "making"
    making.mkdir(exist_ok=True)
    lines = [json.dumps({"topic": topic, "key": one, "body": body_of(one).decode()}) + "\n" for one in ids]
    (making / name).write_text("".join(lines))
    os.replace(making / name, file)
