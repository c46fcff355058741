"""A cluster whose worker sees no folder of the driver's: what lies in one is refused, and nothing is made there.

Another file of the same name on each worker, and what such a cluster is for: test_kafka_cluster.py,
tests/pipeline/test_kafka_jobs.py. It is long (`make chaos`): it starts a cluster, though neither Kafka nor HDFS.
"""

from __future__ import annotations

import re
import subprocess
import sys

import cluster_program
import pyarrow as pa
import pytest
from pyarrow import parquet

from apart import Strangers, Talk

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.timeout(2400)]

PLANT = """\
import pathlib, sqlite3, sys
import escrowmq as mq
here = pathlib.Path(sys.argv[1])
here.mkdir(parents=True)
with mq.connect(f"file:{here / 'data'}") as bus:
    assert bus.producer("shop").send_batch([mq.Message("orders", b"", key=f"o-{n}") for n in range(9)]).ok
database = sqlite3.connect(here / "orders.db")
database.execute("CREATE TABLE orders (id TEXT PRIMARY KEY)")
database.execute(f"INSERT INTO orders VALUES ('o-1')")
database.commit()
"""


@pytest.mark.invariant("I43")
def test_what_lies_in_a_folder_of_the_driver_is_refused(alone: Strangers) -> None:
    here, out = alone.folder / "sources", alone.folder / "found"
    plant = [sys.executable, "-c", PLANT, str(here)]
    subprocess.run(plant, check=True)
    parquet.write_table(pa.table({"id": ["o-1"]}), here / "orders.parquet")
    words = [str(here / name) for name in ("data", "orders.db", "orders.parquet")]
    driver = Talk(alone, cluster_program.__file__, alone.hands.url)
    said = driver.ask("refused", *words, str(out / "findings"))
    driver.end()
    lacks(said["data"], "NOT_A_DATA_FOLDER: .* has no data folder ", words[0])
    lacks(said["database"], "BAD_ARGUMENT: .* has no database ", words[1])
    lacks(said["file"], "BAD_ARGUMENT: a worker of the cluster has no file:/*", words[2])
    lacks(
        said["out"],
        r"BAD_ARGUMENT: what is found: workers of the cluster \(.*\) do not see the folder ",
        str(out / "findings"),
    )
    assert not out.exists()


def lacks(said: object, begins: str, names: str) -> None:
    assert re.match(begins + names, str(said)), said
