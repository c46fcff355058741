"""A streaming query on a broker with rights, with its event log, its log and its UI; then a failure with its traceback:
``planted_spark.py URL FOLDER FILE`` writes what the UI shows into the folder. The token is in the file and in the
environment.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path

from escrowmq.pipeline.session import local_session
from escrowmq.spark.source import register

PAGES = ("jobs", "stages", "storage", "environment", "executors", "executors/threadDump/?executorId=driver", "SQL")
SOURCES = ("environment", "executors", "sql?details=true&planDescription=true", "stages?details=true", "streaming")


def main(url: str, folder: Path, file: str) -> None:
    events = folder / "events"
    events.mkdir()
    settings = {
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": events.as_uri(),
    }
    with local_session("planted", cores=1, rows=100, settings=settings) as spark:
        spark.sparkContext.setLogLevel("INFO")
        register(spark)
        rows = spark.readStream.format("escrow").options(tokenFile=file).load(url, topic="t").select("key", "body")
        sink = rows.writeStream.format("escrow").options(topic="t2", tokenFile=file)
        query = sink.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start(url)
        query.awaitTermination()
        batch = spark.read.format("escrow").load(url, topic="t2")  # by the environment
        print(batch.count(), batch.explain("extended"), query.lastProgress, file=sys.stderr)
        ui, number = spark.sparkContext.uiWebUrl, spark.sparkContext.applicationId
        addresses = [f"{ui}/{page}" for page in (*PAGES, "StreamingQuery")]
        addresses += [f"{ui}/SQL/execution/?id={execution}" for execution in range(3)]
        addresses += [f"{ui}/api/v1/applications/{number}/{source}" for source in SOURCES]
        for at, address in enumerate(addresses):
            try:
                with urllib.request.urlopen(address, timeout=60) as answer:
                    (folder / f"ui-{at}.html").write_bytes(answer.read())
            except urllib.error.HTTPError as problem:
                print(address, problem.code, file=sys.stderr)
        spark.read.format("escrow").load(url, topic="forbidden", tokenFile=file).count()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
