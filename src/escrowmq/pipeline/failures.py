"""Converts Spark exceptions that contain an EscrowMQ error back into that error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from escrowmq.errors import Code, error

_RAISED = re.compile(r"^(?:\w+\.)*errors\.\w+: ([A-Z][A-Z_]+): (.*?)\s*$", re.MULTILINE)
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_NO_PYTHON = re.compile(r'Cannot run program "([^"]*)"')
_NO_FILE = re.compile(r"FileNotFoundException: File (file:\S+) does not exist")
_OTHER_PYTHON = re.compile(r"\[PYTHON_VERSION_MISMATCH\] ([^\n,]*)")


@contextmanager
def unwrap_errors() -> Iterator[None]:
    """Context manager: convert a Spark exception that contains an EscrowMQ error back to that error, with its class and
    code.

    A missing package in Spark's Python processes becomes Misuse(MISSING_PACKAGE), which names it. A file that a worker
    does not see becomes Misuse(BAD_ARGUMENT).
    """
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as problem:
        text = str(problem)
        found = [match for match in _RAISED.finditer(text) if match[1] in Code.__members__]
        if found:
            raise error(Code[found[-1][1]], found[-1][2], "") from problem
        if (lacking := _find_lacking(text)) is not None:
            hint = (
                "PYSPARK_PYTHON must name, on every worker, a Python like this one with the same packages, "
                "escrowmq[spark] and all"
            )
            raise error(Code.MISSING_PACKAGE, lacking, hint) from problem
        if file := _NO_FILE.search(text):
            hint = (
                "on a cluster every worker must have it under this path; else put it where Spark finds it from "
                "anywhere, as hdfs://HOST/..."
            )
            raise error(Code.BAD_ARGUMENT, f"a worker of the cluster has no {file[1]}", hint) from problem
        raise


def _find_lacking(text: str) -> str | None:
    """Return what the Python processes of Spark lack; None if the text does not show it."""
    if module := _NO_MODULE.search(text):
        return f"the Python that Spark starts has no package {module[1]}"
    if program := _NO_PYTHON.search(text):
        return f"Spark cannot start {program[1]} as its Python"
    if version := _OTHER_PYTHON.search(text):
        return f"the Python that Spark starts is another: {version[1]}"
    return None
