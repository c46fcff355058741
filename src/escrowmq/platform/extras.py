"""Extras of this project: the packages of each, and the error for a missing one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from escrowmq.errors import Code, Misuse

EXTRAS = {
    "aio_pika": "rabbitmq",
    "aiomysql": "mysql",
    "aiosqlite": "outbox",
    "confluent_kafka": "kafka",
    "fastapi": "http",
    "httpx": "http",
    "jinja2": "console",
    "opentelemetry": "otel",
    "psycopg": "postgres",
    "pymysql": "mysql",
    "pyspark": "spark",
    "redis": "redis",
    "sqlalchemy": "outbox",
    "uvicorn": "http",
}
"""Extra of each package, by import name."""
LAB = frozenset({"escrowmq_lab", "greenlet"})
"""Packages of the distribution ``escrowmq-lab`` in this repository."""


def missing_package(package: str, who: str, extra: str | None = None) -> Misuse:
    """Return the error for a missing package; its hint is the command that installs it.

    ``extra``: the extra to install, if not that of the package.
    """
    name = package.partition(".")[0]
    wanted = f"escrowmq[{extra or EXTRAS[name]}]" if name not in LAB else "escrowmq-lab"
    hint = f'python -m pip install "{wanted}"'
    return Misuse(Code.MISSING_PACKAGE, f"{who} needs {name}, which is not installed", hint)


def from_extra(package: str, modules: Mapping[str, str], *, needs: Mapping[str, str], who: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package``: it loads each name of ``modules`` from the given module. If the last
    part of the module is the name, the module itself is the value. ``needs``: imported packages, and the extra of each.
    The function raises AttributeError for other names, and Misuse(MISSING_PACKAGE), "``who`` needs ...", if one of
    these packages is missing; ``{name}`` in ``who`` is the requested name."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(f"{package}.{modules[name]}")
        except ModuleNotFoundError as problem:
            missing = (problem.name or "").partition(".")[0]
            if missing not in needs:
                raise
            raise missing_package(missing, who.format(name=name), needs[missing]) from problem
        value = module if modules[name] == name else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get
