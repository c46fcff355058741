"""A client of Spark Connect, in a process of its own: no Java, and the packages that Connect needs.

Run as a program, ``connect_program.py WHAT SERVER BROKER FOLDER``.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as f


def batch(spark: SparkSession, url: str, folder: str) -> None:
    """Read topic "in" in Python and SQL, and write it to topic "out"."""
    rows = spark.read.format("escrow").option("topic", "in").load(url)
    assert sorted(row["key"] for row in rows.select("key").collect()) == list("01234")
    assert rows.where("key > '2'").count() == 2
    spark.sql(f"CREATE TEMPORARY VIEW arrived USING escrow OPTIONS (url '{url}', topic 'in')")
    assert spark.sql("SELECT count(*), max(key) FROM arrived").collect() == [(5, "4")]
    out = rows.select("key", "body").write.format("escrow").mode("append").options(topic="out", write_id="once")
    out.save(url)
    out.save(url)


def registered(spark: SparkSession, url: str, folder: str) -> None:
    """Read with the client's own class."""
    from escrowmq.spark.source import register

    register(spark)
    assert spark.read.format("escrow").option("topic", "in").load(url).count() == 5


def refused(spark: SparkSession, url: str, folder: str) -> None:
    """An error of the source comes to the client, with its code and hint."""
    try:
        spark.read.format("escrow").option("topic", "none").load(url).count()
    except Exception as problem:
        said = str(problem)
    else:
        said = "nothing"
    assert "UNKNOWN_TOPIC" in said, said


def stream(spark: SparkSession, url: str, folder: str) -> None:
    """Stream topic "orders" into topic "loud", ten rows a batch, until all is done."""
    rows = spark.readStream.format("escrow").options(topic="orders", maxRowsPerTrigger=10).load(url)
    loud = rows.select("key", f.upper(f.col("body").cast("string")).alias("body"))
    writer = loud.writeStream.format("escrow").options(topic="loud", checkpointLocation=f"{folder}/checkpoint")
    writer.trigger(availableNow=True).start(url).awaitTermination()


def main(what: str, server: str, url: str, folder: str) -> None:
    spark = SparkSession.builder.remote(server).getOrCreate()
    {one.__name__: one for one in (batch, registered, refused, stream)}[what](spark, url, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
