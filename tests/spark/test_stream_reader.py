"""The streaming reader alone, called as Spark calls it, without a JVM."""

from pathlib import Path

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable

import escrowmq as mq
from escrowmq.spark.options import read_options
from escrowmq.spark.streaming import EscrowStreamReader


def test_a_batch_that_is_planned_twice_counts_what_it_skips_once(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'data'}"
    options = read_options({"url": url, "topic": "t", "onPurged": "skip"}, streaming=True)
    with mq.connect(url) as bus:  # closed before the folder is read: it lacks nothing then
        bus.admin.create_topic("t", 1)
        producer = bus.producer("filler")
        for number in range(5):
            producer.send("t", b"%d" % number)
    reader = EscrowStreamReader(options, pa.schema([("body", pa.binary())]))
    try:
        end = reader.latestOffset({}, ReadAllAvailable())
        with mq.connect(url) as bus:
            bus.admin.alter_topic("t", retention_size=1)
        for _ in range(2):
            [left] = reader.partitions({}, end)
            assert (left.range.start, left.range.end) == (4, 5)
        after = reader.latestOffset(end, ReadAllAvailable())
        [name] = [name for name in end if " " not in name]
        assert {key: at for key, at in after.items() if "skipped" in key} == {f"{name} skipped 0": 4, " skipped": 4}
        assert reader.partitions(end, after) == []
        assert reader.latestOffset(after, ReadAllAvailable()) == after, "noted, and over"
    finally:
        reader.stop()
