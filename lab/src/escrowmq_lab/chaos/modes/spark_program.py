"""The stream of the mode ``spark-sink`` as a program: ``python -m escrowmq_lab.chaos.modes.spark_program FOLDER URL``.

It runs until it is killed, and may be, at any time: started again it goes on from its checkpoint. A query that fails,
because a broker is away, is begun again on the same checkpoint.
"""

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
"""Between two looks whether the query has failed."""
_log = logging.getLogger(__name__)


def start(spark: Any, folder: Path, url: str) -> Any:
    """Return the query (a PySpark ``StreamingQuery``): rows of files into the topics that they name."""
    rows = (
        spark.readStream.schema("topic STRING, key STRING, body STRING")
        .option("maxFilesPerTrigger", 100)
        .json(str(rows_folder(folder)))
    )
    return (
        rows.writeStream.format("escrow")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .option("immunity", 5)  # what a query that died left is asked about soon
        .trigger(processingTime="1 second")
        .start(url)
    )


def main(folder: Path, url: str) -> None:
    """Keep the query going."""
    temporary = folder / "tmp"  # what a killed program leaves goes with the run's folder
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
