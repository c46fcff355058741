"""Java's classes, kept by the first Spark session of the tests: later ones start in half the time."""

from __future__ import annotations

from escrowmq.pipeline.classes import open_spark_folder
from escrowmq.pipeline.java import find_java
from own_home import CACHE


def lacks_classes() -> bool:
    """Whether no earlier run has kept the classes of this Java and this PySpark in ``.cache``."""
    folder = open_spark_folder(find_java(), CACHE)
    return folder is not None and folder.lasts and folder.find_archive() is None
