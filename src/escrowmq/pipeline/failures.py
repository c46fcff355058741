"""Converts Spark exceptions that contain an EscrowMQ error back into that error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from escrowmq.errors import Code, error

_RAISED = re.compile(r"^(?:\w+\.)*errors\.\w+: ([A-Z][A-Z_]+): (.*?)\s*$", re.MULTILINE)
_LACKING = {
    r"ModuleNotFoundError: No module named '(\w+)": "the Python that Spark starts has no package {}",
    r'Cannot run program "([^"]*)"': "Spark cannot start {} as its Python",
    r"\[PYTHON_VERSION_MISMATCH\] ([^\n,]*)": "the Python that Spark starts is another: {}",
}
"""What the Python processes of Spark lack, by the exception that shows it."""
_LACKING_HINT = (
    "PYSPARK_PYTHON must name, on every worker, a Python like this one with the same packages, escrowmq[spark] and all"
)
_NO_FILE = re.compile(r"FileNotFoundException: File (file:\S+) does not exist")
_NO_FILE_HINT = (
    "on a cluster every worker must have it under this path; else put it where Spark finds it from anywhere, as "
    "hdfs://HOST/..."
)


@contextmanager
def unwrap_errors() -> Iterator[None]:
    """Context manager: convert a Spark exception that contains an EscrowMQ error back to that error. A missing package
    in Spark's Python processes becomes Misuse(MISSING_PACKAGE), a file that a worker does not see
    Misuse(BAD_ARGUMENT)."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as problem:
        text = str(problem)
        found = [match for match in _RAISED.finditer(text) if match[1] in Code.__members__]
        if found:
            raise error(Code[found[-1][1]], found[-1][2], "") from problem
        for pattern, lacking in _LACKING.items():
            if match := re.search(pattern, text):
                raise error(Code.MISSING_PACKAGE, lacking.format(match[1]), _LACKING_HINT) from problem
        if file := _NO_FILE.search(text):
            raise error(Code.BAD_ARGUMENT, f"a worker of the cluster has no {file[1]}", _NO_FILE_HINT) from problem
        raise
