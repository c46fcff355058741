"""Our errors as our errors again: Spark hands over what our sources raised in its Python processes as a long text of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from escrowmq.errors import Code, error

_RAISED = re.compile(r"^(?:\w+\.)*errors\.\w+: ([A-Z][A-Z_]+): (.*?)\s*$", re.MULTILINE)


@contextmanager
def told_plainly() -> Iterator[None]:
    """Inside, an exception of Spark that carries one of ours is raised as ours, of the same branch and code."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as problem:
        found = [match for match in _RAISED.finditer(str(problem)) if match[1] in Code.__members__]
        if not found:
            raise
        raise error(Code[found[-1][1]], found[-1][2], "") from problem
