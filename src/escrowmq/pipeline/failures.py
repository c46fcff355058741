"""Our errors as our errors again: Spark hands over what our sources raised in its Python processes as a long text of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from escrowmq.errors import Code, error

_RAISED = re.compile(r"^(?:\w+\.)*errors\.\w+: ([A-Z][A-Z_]+): (.*?)\s*$", re.MULTILINE)


_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_NO_PYTHON = re.compile(r'Cannot run program "([^"]*)"')
_OTHER_PYTHON = re.compile(r"\[PYTHON_VERSION_MISMATCH\] ([^\n,]*)")


@contextmanager
def told_plainly() -> Iterator[None]:
    """Inside, an exception of Spark that carries one of ours is raised as ours, of the same branch and code.

    So is what shows that Spark's Python processes are no Python of ours: Misuse(MISSING_PACKAGE), which names what is lacking.
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
        if (lacking := _lacking(text)) is not None:
            hint = "PYSPARK_PYTHON must name, on every worker, a Python like this one with the same packages, escrowmq[spark] and all"
            raise error(Code.MISSING_PACKAGE, lacking, hint) from problem
        raise


def _lacking(text: str) -> str | None:
    """What Spark's own Python processes do not have."""
    if module := _NO_MODULE.search(text):
        return f"the Python that Spark starts has no package {module[1]}"
    if program := _NO_PYTHON.search(text):
        return f"Spark cannot start {program[1]} as its Python"
    if version := _OTHER_PYTHON.search(text):
        return f"the Python that Spark starts is another: {version[1]}"
    return None
