"""The delivery mode ``spark-sink`` of the chaos run does what it says where nothing is wrong."""

from pathlib import Path

from alone import run_alone, two_brokers
from pyspark.sql import SparkSession

from escrowmq_lab.chaos.modes.seam import Site
from escrowmq_lab.chaos.modes.spark_program import start
from escrowmq_lab.chaos.modes.spark_sink import SPARK_FOLDER, SparkSinkMode


def test_without_faults_each_row_of_a_file_has_one_effect(spark: SparkSession, tmp_path: Path) -> None:
    def stream(site: Site) -> None:
        spark.createDataFrame([(0,)], "number INT")  # makes the session this thread's, where Spark looks for the format
        query = start(spark, tmp_path / SPARK_FOLDER, site.url)
        while not site.ended.wait(0.1):
            assert query.isActive, query.exception()
        query.stop()

    with two_brokers(tmp_path / "brokers") as url:
        run_alone(SparkSinkMode(), tmp_path, url, beside=stream)
