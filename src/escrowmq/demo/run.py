"""The whole demo: orders, brokers, the director, the audit, and the run folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from escrowmq.demo.brokers import LOG, LeaderAndStandby, OneBroker, check_kafka, copy_log, run_kafka
from escrowmq.demo.databases import manifest
from escrowmq.demo.director import DemoOptions, Director
from escrowmq.demo.orders import generate_orders, read_orders
from escrowmq.demo.screen import Screen
from escrowmq.platform.logs import PlainLines

if TYPE_CHECKING:
    from rich.console import Console

    from escrowmq.pipeline.audit import Verdict


def run(options: DemoOptions, console: Console | None = None) -> Verdict | None:
    """Run the demo. Returns the audit's verdict (None with ``audit=False``); ``verdict.settled`` means success. The run
    folder keeps everything: databases, the broker's data, events.jsonl, verdict.json and report.html. Raises Misuse for
    a bad orders file or folder and for missing packages, Unknown if a process ends by itself."""
    screen = Screen(console)
    if options.orders:
        orders = read_orders(options.orders, options.limit)
    else:
        orders = generate_orders(options.count, options.seed).slice(0, options.limit)
    if options.audit:
        from escrowmq.pipeline.java import find_java

        find_java()  # fail now rather than after the run
    if options.log is not None:
        with screen.waiting("preparing Kafka; the first time Maven downloads it"):
            check_kafka()
    folder = options.run_folder()
    pq.write_table(orders, folder / "orders.parquet")
    run_on = _on_one_broker if options.log is None else _on_kafka
    verdict = run_on(options, folder, orders, screen)
    if verdict is not None:
        screen.show(verdict, folder)
    return verdict


def _on_one_broker(options: DemoOptions, folder: Path, orders: pa.Table, screen: Screen) -> Verdict | None:
    """Run on one broker. The audit reads the log from the broker's folder, after the broker has ended."""
    _write_manifest(folder, LOG)
    brokers = OneBroker(folder)
    with closing(Director(options, folder, orders, screen, brokers)) as director:
        with screen.running(orders.num_rows, brokers.description, folder):
            director.direct()
        director.end()
    return _audit(folder, screen) if options.audit else None


def _on_kafka(options: DemoOptions, folder: Path, orders: pa.Table, screen: Screen) -> Verdict | None:
    """Run on Kafka. The audit reads from the leader; then the log is copied into the run folder, for later audits."""
    with ExitStack() as stack:
        stack.enter_context(_log_to(folder / "nodes" / "demo.log"))
        with screen.waiting("starting Kafka"):
            address = stack.enter_context(run_kafka(folder))
        brokers = LeaderAndStandby(folder, address)
        _write_manifest(folder, brokers.url)
        with closing(Director(options, folder, orders, screen, brokers)) as director:
            with screen.running(orders.num_rows, brokers.description, folder):
                director.direct()
            verdict = _audit(folder, screen) if options.audit else None
            director.end()
        with screen.waiting("copying the log out of Kafka"):
            copy_log(address, folder)
    _write_manifest(folder, LOG)
    return verdict


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Write this process's log to the folder of the other logs, instead of between the progress bars."""
    path.parent.mkdir(exist_ok=True)
    handler = logging.FileHandler(path, delay=True, encoding="utf-8")
    handler.setFormatter(PlainLines())
    logger = logging.getLogger("escrowmq")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


def _write_manifest(folder: Path, log: str) -> None:
    """Write the manifest; ``log``: the broker's data folder in the run folder, or a URL."""
    (folder / "manifest.json").write_text(json.dumps(manifest(log), indent=2) + "\n")


def _audit(folder: Path, screen: Screen) -> Verdict:
    from escrowmq.pipeline import audit

    with screen.auditing() as progress:
        return audit.run(folder, progress=progress)
