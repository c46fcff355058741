"""What a user has who installed this with pip: no extra, or one. Every command works, or names the command that installs what it lacks.

The environments are real ones, put together from what is installed here (``environments.py``).
"""

from __future__ import annotations

import json
import subprocess
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import environments
import pytest
import typer

from escrowmq.cli.main import app

HERE = Path(__file__).parent
URL = ["--url", "file:data"]
DATABASE = ["--database-url", "sqlite:///shop.db"]
NOT_THERE = "folder-that-is-not-there"

NEEDS: dict[tuple[str, ...], str | None] = {
    ("send", "orders", "paid", *URL): None,
    ("tail", "orders", *URL): None,
    ("status", *URL): None,
    ("find", "o-1", *URL): None,
    ("plan", "list"): None,
    ("topics", "list", *URL): None,
    ("transactions", "list", *URL): None,
    ("groups", "list", *URL): None,
    ("writers", "list", *URL): None,
    ("acts", "list", *URL): None,
    ("dead-letters", "list", "cart", *URL): None,
    ("lookup", "o-1", *URL): None,
    ("backup", "data", "--to", "copy"): None,
    ("log", "dump", "data"): None,
    ("serve", "-d", "served", "-l", "127.0.0.1:0"): None,
    ("outbox", "migrate", *DATABASE): "outbox",
    ("outbox", "list", *DATABASE): "outbox",
    ("inbox", "list", "cart", *DATABASE): "outbox",
    ("stuck", "list", *DATABASE): "outbox",
    ("compensate", "list", *DATABASE): "outbox",
    ("status", *URL, *DATABASE): "outbox",
    ("find", "o-1", *URL, *DATABASE): "outbox",
    ("audit", NOT_THERE): "spark",
    ("report", "--url", f"file:{NOT_THERE}", "--out", "page"): "spark",
    ("demo", "--orders", NOT_THERE): "spark",
    ("gateway", *URL, "--listen", "127.0.0.1:0"): "http",
    ("console", *URL, "--listen", "127.0.0.1:0"): "console",
}
"""Commands, and the extra that each needs."""
WITH_DATABASES = {"outbox", "postgres", "mysql", "redis", "kafka", "rabbitmq", "spark", "console"}
BRINGS = {"outbox": WITH_DATABASES, "http": {"http", "console"}}
"""Extras that bring what another one brings."""


@cache
def names() -> list[str]:
    """All commands and groups of commands."""
    return sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # it is a group


def run(folder: Path, extra: str | None, commands: list[list[str]]) -> list[dict[str, Any]]:
    python = environments.make(folder / "env", extra)
    (folder / "work").mkdir()
    done = subprocess.run(
        [python, HERE / "runner.py", folder / "work"],
        input=json.dumps(commands), capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"words"')]


@pytest.mark.parametrize("extra", [None, *environments.extras()])
def test_every_command_works_or_names_what_to_install(tmp_path: Path, extra: str | None) -> None:
    commands = [list(words) for words in NEEDS]
    helps = [[name, "--help"] for name in names()]
    found = run(tmp_path, extra, [*commands, *helps])
    assert [one["words"] for one in found] == [*commands, *helps]
    assert {" ".join(one["words"]): one["trace"] for one in found if one["trace"]} == {}
    wrong = {}
    for one in found[: len(commands)]:
        needs = NEEDS[tuple(one["words"])]
        told = " ".join(one["told"].split())
        has = needs is None or extra == needs or extra in BRINGS.get(needs, ())
        if has and "MISSING_PACKAGE" in told:
            wrong[" ".join(one["words"])] = told
        if not has and f'python -m pip install "escrowmq[{needs}]"' not in told:
            wrong[" ".join(one["words"])] = told
    assert wrong == {}
    assert all(one["code"] == 0 for one in found[len(commands) :])


def test_every_package_of_an_extra_is_known_to_the_errors() -> None:
    """Else a command that lacks it ends with a traceback."""
    from escrowmq.platform.extras import EXTRAS

    plain = environments.closure(None).keys()
    by_package = {"confluent-kafka": "confluent_kafka", "aio-pika": "aio_pika", "opentelemetry-api": "opentelemetry"}
    for extra in environments.extras():
        own = [
            text for text in distribution("escrowmq").requires or () if f'extra == "{extra}"' in text.replace("'", '"')
        ]
        for text in own:
            package = text.partition(";")[0].strip().split("[")[0].split(">")[0].split("<")[0].split("=")[0].strip()
            if package != "escrowmq" and package not in plain and package != "opentelemetry-instrumentation":
                assert by_package.get(package, package).lower() in EXTRAS, package
