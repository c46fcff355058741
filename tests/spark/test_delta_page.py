"""The program of docs/delta.md, killed around the commit of the table and started again: each message is there once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from bad_runs import send
from killing import Broker, kill_session

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

PAGE = (Path(__file__).parents[2] / "docs" / "delta.md").read_text()
KILLED = """\
import os, signal
import deltalake

commit = deltalake.write_deltalake


def killed(*args, **options):
    if {where!r} == "after":
        commit(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)


deltalake.write_deltalake = killed
"""


def run(url: str, folder: Path, where: str | None) -> int:
    """Run the page's program, killed "before" or "after" the table's commit; its exit code."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for text, real in (("escrow://127.0.0.1:7700", url), ("maxRowsPerTrigger=10_000", "maxRowsPerTrigger=10")):
        assert text in program
        program = program.replace(text, real)
    for text in ("lake/orders", "lake/checkpoint"):
        program = program.replace(text, str(folder / text))
    head = "" if where is None else KILLED.format(where=where)
    settings = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    with (folder / "driver.log").open("ab") as log:
        driver = subprocess.Popen(
            [sys.executable, "-c", head + program],
            cwd=folder,
            env={**os.environ, **settings},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        return driver.wait(600)
    finally:
        kill_session(driver.pid)
        driver.wait()


def table(folder: Path) -> Counter[str]:
    """How often each key is in the table."""
    from deltalake import DeltaTable

    place = str(folder / "lake" / "orders")
    if not DeltaTable.is_deltatable(place):
        return Counter()
    return Counter(DeltaTable(place).to_pyarrow_table(columns=["key"])["key"].to_pylist())


def test_each_message_is_in_the_table_once_whenever_the_driver_is_killed(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "data")
    commits = tmp_path / "lake" / "checkpoint" / "commits"
    try:
        send(broker.url, 0, 25, "orders")
        assert run(broker.url, tmp_path, "before") == -signal.SIGKILL, (tmp_path / "driver.log").read_text()[-4000:]
        assert table(tmp_path) == Counter()
        assert run(broker.url, tmp_path, "after") == -signal.SIGKILL
        assert table(tmp_path).total() == 10
        assert not (commits / "0").exists(), "Spark repeats the batch"
        assert run(broker.url, tmp_path, None) == 0, (tmp_path / "driver.log").read_text()[-4000:]
        assert (commits / "2").exists()
        assert table(tmp_path) == {str(number): 1 for number in range(25)}
    finally:
        broker.kill()


def test_delta_rejects_the_second_of_two_drivers_that_write_the_same_batch(tmp_path: Path) -> None:
    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
    from deltalake.exceptions import CommitFailedError

    place, rows = str(tmp_path / "orders"), pa.table({"key": ["a"]})
    write_deltalake(place, rows)
    first, second = DeltaTable(place), DeltaTable(place)
    mark = CommitProperties(app_transactions=[Transaction("copy", 0)])
    write_deltalake(first, rows, mode="append", commit_properties=mark)
    with pytest.raises(CommitFailedError, match="Concurrent transaction"):
        write_deltalake(second, rows, mode="append", commit_properties=mark)
    assert DeltaTable(place).to_pyarrow_table().num_rows == 2
