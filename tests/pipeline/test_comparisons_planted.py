"""Bugs planted in the comparisons of the audit and of reconciliation: the tests that must notice each do (see
tests/planting).
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from catalogue import BUGS
from pyspark.sql import SparkSession

from planting import Plant

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.mark.invariant("I43")
@pytest.mark.parametrize("name", [one.name for one in BUGS.values() if one.spark])
def test_a_planted_bug_is_caught(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    one = BUGS[name]
    file, _, function = one.test.partition("::")
    test = getattr(importlib.import_module(Path(file).stem), function)
    plant = Plant(monkeypatch)
    one.plant(plant)
    with pytest.raises(AssertionError) as caught:
        test(spark)
    assert plant.called, "nothing ran what was planted"
    assert one.word in str(caught.value)
