"""The extras of this project: which package comes with which, and the error where one is missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from escrowmq.errors import Code, Misuse

EXTRAS = {
    "adbc_driver_postgresql": "adbc",
    "adbc_driver_sqlite": "adbc",
    "aio_pika": "rabbitmq",
    "aiomysql": "mysql",
    "aiosqlite": "outbox",
    "celery": "celery",
    "cloudevents": "cloudevents",
    "confluent_kafka": "kafka",
    "cryptography": "serve",
    "django": "django",
    "django_tasks": "django",
    "duckdb": "sql",
    "fastapi": "http",
    "google": "rocketmq",
    "grpc": "rocketmq",
    "httpx": "http",
    "jinja2": "console",
    "kombu": "celery",
    "opentelemetry": "otel",
    "prometheus_client": "serve",
    "psycopg": "postgres",
    "pymysql": "mysql",
    "pyspark": "spark",
    "redis": "redis",
    "rich": "cli",
    "rocketmq": "rocketmq",
    "sqlalchemy": "outbox",
    "typer": "cli",
    "uvicorn": "http",
}
"""The extra with which a package comes, by the name under which it is imported."""
LAB = frozenset({"escrowmq_lab", "greenlet"})  # packages of the distribution ``escrowmq-lab`` in this repository


def missing_package(package: str, who: str, extra: str | None = None) -> Misuse:
    """Return the error for a missing package, with the command that installs it (``extra``, or that of the package)."""
    name = package.partition(".")[0]
    wanted = f"escrowmq[{extra or EXTRAS[name]}]" if name not in LAB else "escrowmq-lab"
    hint = f'python -m pip install "{wanted}"'
    return Misuse(Code.MISSING_PACKAGE, f"{who} needs {name}, which is not installed", hint)


def from_extra(package: str, modules: Mapping[str, str], *, needs: Mapping[str, str], who: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package``: each name of ``modules`` from the module named there, which is the
    value itself if its last part is the name. It raises AttributeError for other names, and Misuse(MISSING_PACKAGE),
    "``who`` needs ...", without one of the packages ``needs``, each with its extra; ``{name}`` in ``who`` is the
    requested name."""

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
