"""One console over one broker for all tests of a process that only look, and consoles of a test's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import console_world
import pytest
from console_visitor import Visitor
from pyspark.sql import SparkSession

import escrowmq as mq
from escrowmq.connecting import links
from escrowmq.console import ConsoleSettings, beside
from escrowmq.pipeline.session import local_session
from forked import Forked
from kept_classes import lacks_classes

QUICK = ConsoleSettings(sample_seconds=0.05, call_timeout=60.0, page_timeout=120.0)
"""Samples come soon; a page that has to be there has its time, however busy the machine."""


@pytest.fixture(scope="session")
def world_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker with something of everything."""
    with console_world.served_broker(tmp_path_factory.mktemp("world") / "data") as url:
        with mq.connect(url) as bus:
            console_world.fill(bus)
        yield url


@pytest.fixture(scope="session")
def world(world_url: str) -> Iterator[mq.Bus]:
    """A bus of that broker."""
    with mq.connect(world_url) as bus:
        yield bus


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session of this test process."""
    with local_session("tests", cores=2, rows=1000, keeps_classes=lacks_classes()) as session:
        yield session


@pytest.fixture
def open_console() -> Iterator[Callable[..., Visitor]]:
    """Open a console over a broker, and visit it."""
    with ExitStack() as stack:

        def run(url: str | list[Any], settings: ConsoleSettings = QUICK, **options: Any) -> Visitor:
            over = links(url, {}) if isinstance(url, str) else url
            at = stack.enter_context(beside(lambda _: over, listen="127.0.0.1:0", settings=settings, **options))
            visitor = Visitor(at["console"])
            stack.callback(visitor.http.close)
            return visitor

        yield run


@pytest.fixture(scope="session")
def console_url(world_url: str) -> Iterator[str]:
    """The console of that broker."""
    with beside(lambda _: links(world_url, {}), listen="127.0.0.1:0", settings=QUICK) as at:
        yield at["console"]


@pytest.fixture
def visitor(console_url: str) -> Iterator[Visitor]:
    """Somebody who looks at it."""
    made = Visitor(console_url)
    yield made
    made.http.close()


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Any, dict[str, Any]]]]:
    """Start a command with --json; the process and its ready line."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: str) -> tuple[Any, dict[str, Any]]:
        command = [sys.executable, "-m", "escrowmq", *words, "--json"]
        process = Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        return process, json.loads(line)

    yield run
    for process in started:
        process.kill()
        process.communicate()
