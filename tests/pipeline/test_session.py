"""What a session brings along for the Python processes that it starts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark.sql import SparkSession

from escrowmq.pipeline import session


def test_its_processes_import_what_is_installed_not_the_archive(spark: SparkSession) -> None:
    """In the archive nothing is compiled: each process would compile all that it imports."""

    def where(_: int) -> str:
        import pyspark

        return str(pyspark.__file__)

    assert spark.sparkContext.parallelize([1]).map(where).collect() == [where(0)]


def test_a_home_has_what_starts_spark_and_no_archive(tmp_path: Path) -> None:
    home = Path(session.write_home(tmp_path / "deep" / "home") or "")
    assert {one.name for one in home.iterdir()} == {"bin", "jars"}
    assert (home / "bin" / "spark-submit").is_file()


@pytest.mark.parametrize("found", [None, "a folder without jars"])
def test_a_pyspark_that_is_no_package_is_left_alone(
    found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = None if found is None else SimpleNamespace(submodule_search_locations=[os.fspath(tmp_path / found)])
    monkeypatch.setattr(session.importlib.util, "find_spec", lambda _: spec)
    assert session.write_home(tmp_path / "home") is None
    assert not (tmp_path / "home").exists()
