"""A streaming job as a user would write it: orders in, revenue per country and minute out, exactly once.

Run as a program: ``revenue_job.py URL CHECKPOINT MASTER [TOPIC]``; ends when all orders that are there have been read.
"""

import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

ROWS_PER_BATCH = 120

SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.task.maxFailures": "4",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.5",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "500ms",
}


def revenue(orders: DataFrame) -> DataFrame:
    """Orders (JSON bodies) → a message for every country and minute that is over: key, body."""
    order = f.from_json(f.col("body").cast("string"), "country STRING, at TIMESTAMP, cents BIGINT")
    sums = (
        orders.select(order.alias("o"))
        .select("o.*")
        .withWatermark("at", "1 minute")
        .groupBy(f.window("at", "1 minute"), "country")
        .agg(f.sum("cents").alias("cents"), f.count("*").alias("orders"))
    )
    key = f.concat_ws("|", "country", f.date_format("window.start", "HH:mm"))
    return sums.select(key.alias("key"), f.to_json(f.struct("country", "cents", "orders")).alias("body"))


def start(spark: SparkSession, url: str, checkpoint: str, topic: str):
    """The query, until everything that is there now is done."""
    from escrowmq.spark.source import register

    register(spark)
    orders = (
        spark.readStream.format("escrow")
        .option("topic", "orders")
        .option("maxRowsPerTrigger", ROWS_PER_BATCH)
        .load(url)
    )
    return (
        revenue(orders)
        .writeStream.format("escrow")
        .option("topic", topic)
        .option("timeout", 20)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start(url)
    )


def main() -> None:
    """On a session of the given master."""
    from escrowmq.pipeline.session import local_session

    url, checkpoint, master, *topic = sys.argv[1:]
    with local_session("revenue", master=master, rows=1000, settings=SETTINGS) as spark:
        start(spark, url, checkpoint, topic[0] if topic else "revenue").awaitTermination()


if __name__ == "__main__":
    main()
