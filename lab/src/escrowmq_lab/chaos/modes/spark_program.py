"""The stream of the mode ``spark-sink`` as a program: ``python -m escrowmq_lab.chaos.modes.spark_program FOLDER URL``.
It runs until it is killed, at any time, and resumes from its checkpoint when restarted. A query that fails because a
broker is unreachable is restarted on the same checkpoint."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from escrowmq.pipeline.session import local_session
from escrowmq.spark.source import register
from escrowmq_lab.chaos.modes.spark_sink import rows_folder

REST_SECONDS = 1.0
"""Interval (s) between checks whether the query has failed."""
_log = logging.getLogger(__name__)


def start(spark: Any, folder: Path, url: str) -> Any:
    """Start the query (a PySpark ``StreamingQuery``): rows of files into the topics that they name."""
    rows = (
        spark.readStream.schema("topic STRING, key STRING, body STRING")
        .option("maxFilesPerTrigger", 100)
        .json(str(rows_folder(folder)))
    )
    return (
        rows.writeStream.format("escrow")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .option("immunity", 5)  # transactions of a dead query get a check-back soon
        .trigger(processingTime="1 second")
        .start(url)
    )


def main(folder: Path, url: str) -> None:
    """Run the query, and restart it whenever it fails."""
    temporary = folder / "tmp"  # files left by a killed program are deleted with the run's folder
    temporary.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(temporary)
    with local_session("escrowmq-chaos", cores=1, rows=1000) as spark:
        register(spark)
        while True:
            query = start(spark, folder, url)
            while query.isActive:
                time.sleep(REST_SECONDS)
            _log.warning("the query is begun again: %s", query.exception())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    main(Path(sys.argv[1]), sys.argv[2])
